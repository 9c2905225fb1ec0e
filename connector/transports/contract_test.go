package transports_test

import (
	"encoding/json"
	"os"
	"testing"

	"kvstrata/connector"
	"kvstrata/connector/connectortest"
	"kvstrata/connector/transports"
	"kvstrata/leaktest"
)

func TestMain(m *testing.M) { os.Exit(leaktest.Run(m)) }

// config returns an engine's configuration with so much extra.
func config(name string, role connector.Role, extra map[string]any) connector.Config {
	c := connector.DefaultConfig()
	c.Connector, c.Role = name, role
	for key, value := range extra {
		c.Extra[key], _ = json.Marshal(value) // strings, numbers and truth values
	}
	return c
}

func TestTCP(t *testing.T) {
	for _, test := range []struct {
		name  string
		extra map[string]any
	}{
		{"over the network", map[string]any{"shared_memory": false}},
		{"through shared memory", nil},
		{"with a secret", map[string]any{"shared_memory": false, "secret": "correct horse battery"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			connectortest.Run(t, connectortest.Rig{
				Direct: true, Local: test.extra["shared_memory"] == nil, Setup: func(t *testing.T) connectortest.Environment {
					return connectortest.Environment{
						Factory: transports.Default(),
						Config: func(role connector.Role, _ string) connector.Config {
							extra := map[string]any{"listen": "127.0.0.1:0", "stall_timeout": 0.5}
							for k, v := range test.extra {
								extra[k] = v
							}
							return config("tcp", role, extra)
						},
					}
				},
			})
		})
	}
}
