package tcp_test

import (
	"encoding/json"
	"testing"

	"kvstrata/connector"
	"kvstrata/connector/connectortest"
	"kvstrata/connector/transports"
)

func TestContract(t *testing.T) {
	for _, test := range []struct {
		name  string
		extra map[string]any
		local bool // the bytes never see a network
	}{
		{"over the network", map[string]any{"shared_memory": false}, false},
		{"with a secret", map[string]any{"shared_memory": false, "secret": "correct horse battery"}, false},
		{"through shared memory", map[string]any{"shared_memory": true}, true},
	} {
		t.Run(test.name, func(t *testing.T) {
			connectortest.Run(t, connectortest.Rig{
				Direct: true, Local: test.local, Setup: func(t *testing.T) connectortest.Environment {
					return connectortest.Environment{
						Factory: transports.Default(),
						Config: func(role connector.Role, _ string) connector.Config {
							c := connector.DefaultConfig()
							c.Connector, c.Role = "tcp", role
							for key, value := range test.extra {
								c.Extra[key], _ = json.Marshal(value) // truth values and text
							}
							c.Extra["listen"], c.Extra["stall_timeout"] = []byte(`"127.0.0.1:0"`), []byte("0.5")
							return c
						},
					}
				},
			})
		})
	}
}
