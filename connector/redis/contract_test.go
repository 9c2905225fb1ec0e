package redis_test

import (
	"encoding/json"
	"strings"
	"testing"

	"kvstrata/connector"
	"kvstrata/connector/connectortest"
	"kvstrata/connector/redis"
	"kvstrata/connector/redis/redistest"
)

func TestContract(t *testing.T) {
	connectortest.Run(t, connectortest.Rig{Setup: func(t *testing.T) connectortest.Environment {
		s := redistest.Start(t, "--maxmemory-policy", "noeviction")
		var f connector.Factory
		if err := f.Register("redis", redis.Transport().Connector()); err != nil {
			t.Fatal(err)
		}
		return connectortest.Environment{
			Factory: &f,
			Address: s.Addr,
			Config: func(role connector.Role, through string) connector.Config {
				c := connector.DefaultConfig()
				c.Connector, c.Role = "redis", role
				if through == "" {
					through = s.Addr
				}
				for key, value := range map[string]any{"address": through, "group_blocks": 4, "timeout": 1, "connections": 2} {
					c.Extra[key], _ = json.Marshal(value) // text and numbers
				}
				return c
			},
			Restart: func(*testing.T) { s.Restart() },
			Fill:    func(*testing.T) { s.Do("CONFIG", "SET", "maxmemory", "1") },
			Remove: func(_ *testing.T, last []connector.Name) {
				for _, key := range strings.Fields(s.Do("KEYS", "*")) {
					for _, n := range last {
						if strings.HasSuffix(key, n.Hash.String()) {
							s.Do("DEL", key)
						}
					}
				}
			},
		}
	}})
}
