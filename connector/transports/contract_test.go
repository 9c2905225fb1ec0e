package transports_test

import (
	"cmp"
	"context"
	"encoding/json"
	"log/slog"
	"net"
	"os"
	"strings"
	"testing"

	"kvstrata/connector"
	"kvstrata/connector/connectortest"
	"kvstrata/connector/lmcache"
	"kvstrata/connector/redis/redistest"
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

// byHash returns those of a store's keys that are of the groups whose last blocks have the names.
func byHash(keys []string, last []connector.Name) (found []string) {
	for _, key := range keys {
		for _, n := range last {
			if strings.Contains(key, n.Hash.String()) {
				found = append(found, key)
			}
		}
	}
	return found
}

func TestRedis(t *testing.T) {
	connectortest.Run(t, connectortest.Rig{Setup: func(t *testing.T) connectortest.Environment {
		server := redistest.Start(t)
		return connectortest.Environment{
			Factory: transports.Default(), Address: server.Addr,
			Config: func(role connector.Role, through string) connector.Config {
				return config("redis", role, map[string]any{
					"address": cmp.Or(through, server.Addr), "group_blocks": connectortest.GroupBlocks, "timeout": 1,
				})
			},
			Restart: func(*testing.T) { server.Restart() },
			Fill: func(*testing.T) {
				server.Do("CONFIG", "SET", "maxmemory-policy", "noeviction")
				server.Do("CONFIG", "SET", "maxmemory", "1")
			},
			Remove: func(_ *testing.T, last []connector.Name) {
				for _, key := range byHash(strings.Fields(server.Do("KEYS", "*")), last) {
					server.Do("DEL", key)
				}
			},
		}
	}})
}

func TestLMCache(t *testing.T) {
	connectortest.Run(t, connectortest.Rig{Unchecked: true, Setup: func(t *testing.T) connectortest.Environment {
		server := newLMCache(t)
		return connectortest.Environment{
			Factory: transports.Default(), Address: server.address,
			Config: func(role connector.Role, through string) connector.Config {
				return config("lmcache", role, map[string]any{
					"remote_url": "lm://" + cmp.Or(through, server.address), "group_blocks": connectortest.GroupBlocks,
					"chunk_size": connectortest.GroupBlocks * connectortest.BlockTokens, "blocking_timeout_secs": 1,
				})
			},
			Restart: server.restart,
			// It evicts for what is new, but for what is too long.
			Fill: func(t *testing.T) { server.longest = connectortest.GroupBytes - 1; server.restart(t) },
		}
	}})
}

// lmcacheServer is a server that can start again at its address.
type lmcacheServer struct {
	address string
	longest int // value
	stop    func()
}

func newLMCache(t *testing.T) *lmcacheServer {
	s := &lmcacheServer{address: "127.0.0.1:0", longest: 1 << 20, stop: func() {}}
	s.restart(t)
	t.Cleanup(func() { s.stop() })
	return s
}

func (s *lmcacheServer) restart(t *testing.T) {
	t.Helper()
	s.stop()
	cfg := lmcache.DefaultServerConfig()
	cfg.MaxValue = s.longest
	server, err := lmcache.NewServer(cfg, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", s.address)
	if err != nil {
		t.Fatal(err)
	}
	s.address = l.Addr().String()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- server.Run(ctx, l) }()
	s.stop = func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
		s.stop = func() {}
	}
}
