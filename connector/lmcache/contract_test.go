package lmcache_test

import (
	"bytes"
	"encoding/json"
	"net"
	"testing"
	"time"

	"kvstrata/connector"
	"kvstrata/connector/connectortest"
	"kvstrata/connector/lmcache"
	"kvstrata/connector/store"
)

// TestContract has both halves keep the contract over our server, which evicts where others refuse.
func TestContract(t *testing.T) {
	connectortest.Run(t, connectortest.Rig{Unchecked: true, Evicts: true, Setup: func(t *testing.T) connectortest.Environment {
		cfg := lmcache.DefaultServerConfig()
		cfg.Bytes, cfg.MaxValue = 256<<20, 1<<20
		s := serve(t, cfg, "")
		var f connector.Factory
		if err := f.Register("lmcache", lmcache.Transport().Connector()); err != nil {
			t.Fatal(err)
		}
		config := func(role connector.Role, through string) connector.Config {
			c := connector.DefaultConfig()
			c.Connector, c.Role = "lmcache", role
			if through == "" {
				through = s.address
			}
			for key, value := range map[string]any{
				"remote_url": "lm://" + through, "group_blocks": 4, "chunk_size": 4 * connectortest.BlockTokens, "blocking_timeout_secs": 1, "chunk_hashes": "engine",
			} {
				c.Extra[key], _ = json.Marshal(value) // strings and numbers
			}
			return c
		}
		return connectortest.Environment{
			Factory: &f, Config: config, Address: s.address,
			Restart: func(t *testing.T) { s.stop(); serve(t, cfg, s.address) },
			Remove: func(t *testing.T, last []connector.Name) {
				m := connectortest.Model()
				shape := lmcache.Shape{Format: lmcache.KV2LTD, DType: lmcache.Float16, KV: 2, Layers: m.Layers, Hidden: m.KVHeads * m.HeadSize}
				client := lmcache.DefaultConfig()
				client.RemoteURL, client.ChunkSize, client.ChunkHashes = "lm://"+s.address, 4*connectortest.BlockTokens, "engine"
				b, err := lmcache.New(client, m, shape)
				if err != nil {
					t.Fatal(err)
				}
				defer func() { _ = b.Close() }() // never connected
				c, err := net.Dial("tcp", s.address)
				if err != nil {
					t.Fatal(err)
				}
				defer func() { _ = c.Close() }() // all is said
				if err := c.SetDeadline(time.Now().Add(patience)); err != nil {
					t.Fatal(err)
				}
				r := &raw{c, t}
				for _, n := range last {
					// The server forgets a key whose value is too long for it.
					key := b.Key(&store.Group{Blocks: []connector.Name{n}})
					r.send(request(lmcache.Put, key, cfg.MaxValue+1), bytes.Repeat([]byte{0}, cfg.MaxValue+1), request(lmcache.Exist, key, 0))
					if r.reply().Code != lmcache.Fail {
						t.Fatalf("%s is there still", key)
					}
				}
			},
		}
	}})
}
