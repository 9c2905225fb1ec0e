package shared_test

import (
	"context"
	"encoding/hex"
	"os"
	"sync"
	"testing"

	"kvstrata/connector"
	"kvstrata/connector/encoder"
	"kvstrata/connector/encoder/encodertest"
	"kvstrata/connector/encoder/shared"
	"kvstrata/connector/store"
	"kvstrata/event"
	"kvstrata/leaktest"
)

func TestMain(m *testing.M) { os.Exit(leaktest.Run(m)) }

// memory is a store in this process.
type memory struct {
	mu     sync.Mutex
	values map[string][]byte
}

// backend is one engine's way to the memory.
type backend struct {
	*memory
	space string
}

var _ store.Backend = (*backend)(nil)

func (b *backend) Name() string { return "memory" }

func (b *backend) Key(g *store.Group) string { return b.space + ":" + g.Blocks[0].Hash.String() }

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
	for _, item := range items {
		var value []byte
		for _, p := range item.Pieces {
			value = append(value, p...)
		}
		b.values[item.Key] = value
	}
	return nil
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

func TestContract(t *testing.T) {
	encodertest.Run(t, encodertest.Rig{Local: true, Setup: func(t *testing.T) encodertest.Environment {
		m := &memory{values: make(map[string][]byte)}
		shelf := shared.Shelf{
			Store: store.Transport{Open: func(o store.Opening) (store.Backend, error) {
				return &backend{m, hex.EncodeToString(o.Compatibility[:])}, nil
			}},
			Check: func(connector.Extra) error { return nil }, MaxName: 255,
		}
		f := new(encoder.Factory)
		if err := f.Register("memory", shelf.Connector()); err != nil {
			t.Fatal(err)
		}
		key := func(model encoder.Model, i encoder.Item) string {
			space := model.Compatibility()
			return hex.EncodeToString(space[:]) + ":" + event.BytesHash(i.Hash).String()
		}
		return encodertest.Environment{
			Factory: f,
			Config: func(role encoder.Role, _ string) encoder.Config {
				c := encoder.DefaultConfig()
				c.Connector, c.Role = "memory", role
				return c
			},
			Remove: func(_ *testing.T, model encoder.Model, i encoder.Item) {
				m.mu.Lock()
				defer m.mu.Unlock()
				delete(m.values, key(model, i))
			},
			Spoil: func(_ *testing.T, model encoder.Model, i encoder.Item) {
				m.mu.Lock()
				defer m.mu.Unlock()
				m.values[key(model, i)] = []byte("something else")
			},
		}
	}})
}
