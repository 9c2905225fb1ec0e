package store_test

import (
	"context"
	"encoding/hex"
	"errors"
	"sync"

	"kvstrata/connector"
	"kvstrata/connector/store"
)

// memory is a store in this process.
type memory struct {
	mu     sync.Mutex
	values map[string][]byte
	room   int // bytes
}

var errFull = errors.New("the store is full")

// transport makes both halves of a connector over the memory.
func (m *memory) transport() connector.Transport {
	return store.Transport{Open: func(o store.Opening) (store.Backend, error) {
		// An engine whose cache is not like that of the one which saved finds nothing: its keys are others.
		return &backend{memory: m, space: hex.EncodeToString(o.Compatibility[:8])}, nil
	}}.Connector()
}

// backend is one engine's way to the memory.
type backend struct {
	*memory
	space string
}

var _ store.Backend = (*backend)(nil)

// Name is what events call the store.
func (b *backend) Name() string { return "memory" }

// Key is made of the last block's name, which says all that is before it.
func (b *backend) Key(g *store.Group) string {
	return b.space + ":" + g.Blocks[len(g.Blocks)-1].Hash.String()
}

// Prefix counts leading keys.
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

// Put copies the pieces of each value, one behind the other.
func (b *backend) Put(_ context.Context, items []store.Item) []error {
	b.mu.Lock()
	defer b.mu.Unlock()
	errs := make([]error, len(items))
	for i, item := range items {
		if b.room -= item.Bytes; b.room < 0 {
			errs[i] = errFull
			continue
		}
		value := make([]byte, 0, item.Bytes)
		for _, p := range item.Pieces {
			value = append(value, p...)
		}
		b.values[item.Key] = value
	}
	return errs
}

// Get copies each value to where its pieces are. One that has another size is none.
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

// Close has nothing to close.
func (b *backend) Close() error { return nil }
