// Package shared carries encoder outputs through a shared store, any [store.Backend]: an item is a group of one pseudo-block
// under a key made of its multimodal hash.
package shared

import (
	"context"
	"crypto/sha256"
	"fmt"

	"kvstrata/connector"
	"kvstrata/connector/encoder"
	"kvstrata/connector/encoder/carry"
	"kvstrata/connector/store"
	"kvstrata/event"
)

// Shelf is how a kind of store is used for items.
type Shelf struct {
	// Store is the store's transport, whose Open is used.
	Store store.Transport
	// Keys are the store's names in ec_connector_extra_config, and Check validates what stands under them.
	Keys  []string
	Check func(connector.Extra) error
	// Prepare changes what the store is opened with: what sets these keys apart from those of KV blocks, and what tells the
	// store of values that have no layout. Nil = nothing.
	Prepare func(*store.Opening) error
	// MaxName bounds the bytes of a hash in a key: a longer one is stored under its SHA-256.
	MaxName int
	// Nameless says that the store is not to compare a value's size with its group's blocks: it is not told of the group.
	Nameless bool
}

// Connector returns both halves for a factory.
func (s Shelf) Connector() encoder.Transport {
	return carry.Transport{
		Keys: s.Keys, Away: event.Storage,
		Check: func(setup encoder.Setup) error { return s.Check(setup.Config.Extra) },
		Open: func(o carry.Opening) (carry.Carrier, error) {
			c, err := s.open(o)
			if err != nil {
				return nil, err
			}
			return c, nil
		},
	}.Connector()
}

// backend is the carrier.
type backend struct {
	store.Backend
	shelf Shelf
}

// exister is a store that tells of each key by itself whether it is there.
type exister interface {
	Exist(ctx context.Context, keys []string) ([]bool, error)
}

var _ carry.Carrier = (*backend)(nil)

func (s Shelf) open(o carry.Opening) (*backend, error) {
	c := connector.DefaultConfig()
	c.Connector, c.EngineID, c.Extra = o.Setup.Config.Connector, o.Setup.Config.EngineID, connector.Extra{}
	for key, value := range o.Setup.Config.Extra {
		c.Extra[key] = value
	}
	opening := store.Opening{
		Setup: connector.Setup{
			Config: c, Ranks: 1, Tier: o.Setup.Tier, Now: o.Setup.Now, Log: o.Setup.Log,
			Model: connector.Model{Name: o.Setup.Model.Name, DType: o.Setup.Model.DType, BlockTokens: 1, Ranks: 1},
		},
		Compatibility: o.Compatibility,
	}
	if s.Prepare != nil {
		if err := s.Prepare(&opening); err != nil {
			return nil, err
		}
	}
	b, err := s.Store.Open(opening)
	if err != nil {
		return nil, fmt.Errorf("open store of encoder outputs: %w", err)
	}
	return &backend{b, s}, nil
}

// Run closes the store at the end.
func (b *backend) Run(ctx context.Context) error {
	<-ctx.Done()
	return b.Close()
}

// Address is empty: peers come to the store.
func (b *backend) Address() string { return "" }

// Drop does nothing: what is stored stays.
func (b *backend) Drop(string) {}

// group is an item's: the bytes of its hash stand where a block's do.
func (b *backend) group(i encoder.Item) *store.Group {
	name := i.Hash
	if len(name) > b.shelf.MaxName {
		sum := sha256.Sum256([]byte(name))
		name = string(sum[:])
	}
	return &store.Group{Blocks: []connector.Name{{Hash: event.BytesHash(name)}}}
}

// Find asks for every item. A store counts leading keys: behind one that is not there it is asked anew.
func (b *backend) Find(ctx context.Context, wants []carry.Want) error {
	keys := make([]string, len(wants))
	for i := range wants {
		keys[i] = b.Key(b.group(wants[i].Item))
	}
	if e, ok := b.Backend.(exister); ok {
		there, err := e.Exist(ctx, keys)
		for i, ok := range there {
			wants[i].Found = ok
		}
		return err
	}
	for first := 0; first < len(keys); first++ {
		n, err := b.Prefix(ctx, keys[first:])
		for range n {
			wants[first].Found = true
			first++
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// Get reads an item. One of another size is absent: every store compares.
func (b *backend) Get(ctx context.Context, w *carry.Want, into []byte) (string, error) {
	item := store.Item{Key: b.Key(b.group(w.Item)), Pieces: [][]byte{into}, Bytes: len(into)}
	return b.Name(), first(b.Backend.Get(ctx, []store.Item{item}))
}

// Put stores an item, unless it is there.
func (b *backend) Put(ctx context.Context, i encoder.Item, from []byte, overwrite bool) (int, error) {
	item := store.Item{Group: b.group(i), Pieces: [][]byte{from}, Bytes: len(from)}
	item.Key = b.Key(item.Group)
	if b.shelf.Nameless {
		item.Group = nil
	}
	if !overwrite {
		if n, err := b.Prefix(ctx, []string{item.Key}); err != nil || n == 1 {
			return 0, err
		}
	}
	if err := first(b.Backend.Put(ctx, []store.Item{item})); err != nil {
		return 0, err
	}
	return len(from), nil
}

// first returns the error of the only item: a store that did all says nothing.
func first(errs []error) error {
	if len(errs) == 0 {
		return nil
	}
	return errs[0]
}
