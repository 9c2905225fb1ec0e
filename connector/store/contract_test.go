package store_test

import (
	"os"
	"strings"
	"testing"

	"kvstrata/connector"
	"kvstrata/connector/connectortest"
	"kvstrata/leaktest"
)

func TestMain(m *testing.M) { os.Exit(leaktest.Run(m)) }

// The halves keep the contract over a store that has no network: what is left out here is what networks do.
func TestContract(t *testing.T) {
	connectortest.Run(t, connectortest.Rig{Local: true, Setup: func(t *testing.T) connectortest.Environment {
		m := &memory{values: make(map[string][]byte), room: 1 << 40}
		var f connector.Factory
		if err := f.Register("memory", m.transport()); err != nil {
			t.Fatal(err)
		}
		return connectortest.Environment{
			Factory: &f,
			Config: func(role connector.Role, _ string) connector.Config {
				c := connector.DefaultConfig()
				c.Connector, c.Role = "memory", role
				c.Extra["group_blocks"] = []byte("4")
				return c
			},
			Fill: func(*testing.T) {
				m.mu.Lock()
				defer m.mu.Unlock()
				m.room = 3 * connectortest.GroupBytes
			},
			Remove: func(_ *testing.T, last []connector.Name) {
				m.mu.Lock()
				defer m.mu.Unlock()
				for key := range m.values {
					for _, n := range last {
						if strings.HasSuffix(key, n.Hash.String()) {
							delete(m.values, key)
						}
					}
				}
			},
		}
	}})
}
