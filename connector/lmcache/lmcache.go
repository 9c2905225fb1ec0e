// Package lmcache speaks LMCache's remote formats, so that ours and LMCache's own engines share chunks of KV cache: the
// lm:// protocol of its cache server, as client ([Backend]) and as server ([Server]), and its layout in Redis.
//
// A value is a chunk in the order of KV_2LTD, or KV_MLA_FMT ([Arrange]); its key names model, rank and chunk hash ([Key]),
// which [Hashing] computes from the tokens as LMCache does. A store that speaks lm:// tells nobody what it
// evicts: [Sweeper] asks it.
//
// Facts are from LMCache 0.5.6 (lmcache/v1/protocol.py, v1/server, v1/storage_backend/connector, v1/token_database.py,
// utils.py), against whose own code interop/ checks.
package lmcache

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"kvstrata/connector"
	"kvstrata/connector/store"
)

// ErrRefused says that a server did not keep what it was sent: it had no room, or evicted it at once.
var ErrRefused = errors.New("the server did not keep it")

// Backend stores groups of blocks as LMCache stores chunks. It is safe for concurrent use.
//
// A PUT over lm:// that ends half-way (cancelled, timed out) closes its connection. LMCache's own server then keeps the
// key without bytes, and says that it is there; ours forgets it.
type Backend struct {
	cfg    Config
	remote client
	key    Key // of this model; hash and worker are a group's
	tokens int // of a block
	shape  Shape
}

var _ store.Backend = (*Backend)(nil)

// chunk is a value on its way, with what LMCache is told of it.
type chunk struct {
	key     string
	content Content
	pieces  [][]byte
	bytes   int // of all pieces
}

// client is a remote store, lm:// or redis://.
type client interface {
	name() string
	maxKey() int
	// exist returns of each key whether it is there; after an error, of those only that came before.
	exist(ctx context.Context, keys []string) ([]bool, error)
	// put and get set the error of each chunk that failed.
	put(ctx context.Context, chunks []chunk, errs []error)
	get(ctx context.Context, chunks []chunk, errs []error)
	close() error
}

// New returns a backend for caches of a shape, as [Arrange] tells it. It connects when it is used.
func New(cfg Config, model connector.Model, shape Shape) (*Backend, error) {
	b := &Backend{cfg: cfg, tokens: model.BlockTokens, shape: shape}
	errs := []error{cfg.Validate()}
	if model.Name == "" || strings.ContainsAny(model.Name, "@ \t\n") {
		errs = append(errs, fmt.Errorf("model %q: want a name without @ and white space, which LMCache's keys cannot hold", model.Name))
	}
	if _, err := cfg.GroupBlocks(model.BlockTokens); err != nil {
		errs = append(errs, err)
	}
	if shape.TokenBytes() < 1 || shape.Format != KV2LTD && shape.Format != KVMLA {
		errs = append(errs, fmt.Errorf("shape %+v: want that of arranged caches", shape))
	}
	b.key = Key{Model: model.Name, World: max(model.Ranks, 1), DType: shape.DType, Signed: cfg.ChunkHashes == ofLMCache && cfg.HashAlgorithm == "builtin"}
	if shape.Format == KVMLA {
		b.key.World = 1 // every rank holds the same; LMCache saves the first one's
	}
	if err := errors.Join(errs...); err != nil {
		return nil, fmt.Errorf("lmcache: %w", err)
	}
	var err error
	if b.remote, err = dial(&cfg); err != nil {
		return nil, fmt.Errorf("lmcache: %w", err)
	}
	if longest := len(b.key.String()) + 16; longest > b.remote.maxKey() {
		return nil, fmt.Errorf("lmcache: model %q: keys have up to %d bytes, and the store takes %d; serve it under a shorter name", model.Name, longest, b.remote.maxKey())
	}
	return b, nil
}

// dial returns the client of an address that was checked. It does not connect yet.
func dial(cfg *Config) (client, error) {
	u, err := cfg.remote()
	if err != nil {
		return nil, err
	}
	if u.Scheme == "redis" {
		return newRedis(u, cfg)
	}
	protocol, err := ParseProtocol(cfg.Protocol)
	if err != nil {
		return nil, err
	}
	return &remote{pool: newPool(u.Host, cfg), protocol: protocol, pipeline: cfg.Pipeline}, nil
}

// Name returns the address, without a password.
func (b *Backend) Name() string { return b.remote.name() }

// Key returns LMCache's key of a group, with the chunk hash that chunk_hashes chooses.
func (b *Backend) Key(g *store.Group) string {
	k := b.key
	k.Hash = g.Chunk
	if b.cfg.ChunkHashes == ofEngine {
		k.Hash = g.Blocks[len(g.Blocks)-1].Hash
	}
	if b.shape.Format != KVMLA {
		k.Worker = g.Rank
	}
	return k.String()
}

// Exist returns of each key whether it is there. After an error the answer holds those that came before it.
func (b *Backend) Exist(ctx context.Context, keys []string) ([]bool, error) {
	return b.remote.exist(ctx, keys)
}

// Prefix returns how many of the keys, from the first on, are there.
func (b *Backend) Prefix(ctx context.Context, keys []string) (int, error) {
	found := 0
	for window := b.cfg.Pipeline; found < len(keys); window = maxPipeline {
		there, err := b.remote.exist(ctx, keys[found:min(found+window, len(keys))])
		for _, ok := range there {
			if !ok {
				return found, nil
			}
			found++
		}
		if err != nil {
			return found, err
		}
	}
	return found, nil
}

// Put stores items.
func (b *Backend) Put(ctx context.Context, items []store.Item) []error {
	return b.move(ctx, items, b.remote.put)
}

// Get reads items into their pieces.
func (b *Backend) Get(ctx context.Context, items []store.Item) []error {
	return b.move(ctx, items, b.remote.get)
}

// move hands over those items that can be told to LMCache.
func (b *Backend) move(ctx context.Context, items []store.Item, move func(context.Context, []chunk, []error)) []error {
	errs := make([]error, len(items))
	chunks := make([]chunk, 0, len(items))
	at := make([]int, 0, len(items)) // of each chunk among the items
	for i := range items {
		c, err := b.chunk(&items[i])
		if err != nil {
			errs[i] = err
			continue
		}
		chunks, at = append(chunks, c), append(at, i)
	}
	moved := make([]error, len(chunks))
	move(ctx, chunks, moved)
	failed := len(chunks) < len(items)
	for i, err := range moved {
		if err != nil {
			errs[at[i]], failed = err, true
		}
	}
	if !failed {
		return nil
	}
	return errs
}

func (b *Backend) chunk(item *store.Item) (chunk, error) {
	c := chunk{key: item.Key, pieces: item.Pieces, bytes: item.Bytes}
	if err := checkKey(item.Key); err != nil && (!errors.Is(err, errKeyLong) || len(item.Key) > b.remote.maxKey()) {
		return c, err
	}
	var err error
	c.content, err = b.shape.Content(item.Bytes)
	if err == nil && item.Group != nil {
		if tokens := len(item.Group.Blocks) * b.tokens; int(c.content.Shape[2]) != tokens {
			err = fmt.Errorf("%d bytes are %d tokens, and the group has %d", item.Bytes, c.content.Shape[2], tokens)
		}
	}
	if err != nil {
		return c, fmt.Errorf("chunk %s: %w", item.Key, err)
	}
	return c, nil
}

// Close closes the connections.
func (b *Backend) Close() error { return b.remote.close() }
