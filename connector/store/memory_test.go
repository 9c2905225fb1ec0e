package store_test

import (
	"context"
	"encoding/hex"
	"errors"
	"os"
	"sync"
	"testing"

	"kvstrata/connector"
	"kvstrata/connector/connectortest"
	"kvstrata/connector/store"
	"kvstrata/leaktest"
)

func TestMain(m *testing.M) { os.Exit(leaktest.Run(m)) }

// memory is a store in this process: a transport of an engine to itself, or of tests.
type memory struct {
	mu     sync.Mutex
	values map[string][]byte
	room   int // bytes
}

// backend is one engine's way to a memory.
type backend struct {
	*memory
	space string // keys of caches that are not alike differ
}

var errFull = errors.New("the store is full")

func (m *memory) transport() connector.Transport {
	return store.Transport{Open: func(o store.Opening) (store.Backend, error) {
		return &backend{m, hex.EncodeToString(o.Compatibility[:8])}, nil
	}}.Connector()
}

func (b *backend) Name() string { return "memory" }

func (b *backend) Key(g *store.Group) string {
	return b.space + ":" + g.Blocks[len(g.Blocks)-1].Hash.String()
}

func (b *backend) Prefix(_ context.Context, keys []string) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for i, k := range keys {
		if _, ok := b.values[k]; !ok {
			return i, nil
		}
	}
	return len(keys), nil
}

func (b *backend) Put(_ context.Context, items []store.Item) []error {
	b.mu.Lock()
	defer b.mu.Unlock()
	errs := make([]error, len(items))
	for i, item := range items {
		if b.room -= item.Bytes; b.room < 0 {
			errs[i] = errFull
			continue
		}
		var value []byte
		for _, p := range item.Pieces {
			value = append(value, p...)
		}
		b.values[item.Key] = value
	}
	return errs
}

func (b *backend) Get(_ context.Context, items []store.Item) []error {
	b.mu.Lock()
	defer b.mu.Unlock()
	errs := make([]error, len(items))
	for i, item := range items {
		value, ok := b.values[item.Key]
		if !ok || len(value) != item.Bytes {
			errs[i] = store.ErrAbsent
			continue
		}
		for _, p := range item.Pieces {
			value = value[copy(p, value):]
		}
	}
	return errs
}

func (b *backend) Close() error { return nil }

// The family's halves keep the contract over a store that has no network: what is left out here is what networks do.
func TestContract(t *testing.T) {
	connectortest.Run(t, connectortest.Rig{Local: true, Setup: func(*testing.T) connectortest.Environment {
		m := &memory{values: make(map[string][]byte), room: 1 << 40}
		f := new(connector.Factory)
		if err := f.Register("memory", m.transport()); err != nil {
			t.Fatal(err)
		}
		return connectortest.Environment{
			Factory: f,
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
						if key[len(key)-len(n.Hash.String()):] == n.Hash.String() {
							delete(m.values, key)
						}
					}
				}
			},
		}
	}})
}

