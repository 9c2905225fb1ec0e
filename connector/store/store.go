// Package store is the connector over a shared store: a producer saves groups of blocks under keys made of their names, and
// a consumer loads the longest prefix that is there. Both halves are here; what the store is, is a [Backend].
package store

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"

	"kvstrata/connector"
	"kvstrata/event"
)

// Group is a run of consecutive blocks of one request that is stored under one key.
type Group struct {
	Blocks    []connector.Name // in chain order; the last one names the group
	Parent    connector.Name   // the block before them, when HasParent
	HasParent bool
	LoRA      string
	Rank      int             // tensor-parallel rank whose part it is
	Chunk     event.BlockHash // what the store's own scheme calls the group, where there is one (Transport.Chunks)
}

// Item is one group on its way to a store or from it.
type Item struct {
	Key    string
	Group  *Group   // of a Put: what is stored; nil in a Get
	Pieces [][]byte // the value's bytes, in order; of a Get, where they go
	Bytes  int      // of all pieces
}

// ErrAbsent says that a store does not have a key, or not with this content's size.
var ErrAbsent = errors.New("not in the store")

// Backend is a store's data path. It is safe for concurrent use. Every call ends when ctx does, and within the backend's own
// time limits; then no piece is touched any more.
type Backend interface {
	// Name says where the store is, for people and events, without secrets.
	Name() string
	// Key returns the key of a group; it may be at most as long as the store allows.
	Key(g *Group) string
	// Prefix returns how many of the keys, from the first on, are there.
	Prefix(ctx context.Context, keys []string) (int, error)
	// Put stores items and returns one error an item, nil for each that the store has confirmed; a nil slice says that all
	// are stored.
	Put(ctx context.Context, items []Item) []error
	// Get reads items into their pieces and returns one error an item; a nil slice says that all have come. Where the error is
	// not nil, the pieces' content is undefined.
	Get(ctx context.Context, items []Item) []error
	// Close frees connections; no call may be under way.
	Close() error
}

// Config is what the halves take of kv_connector_extra_config, beside the backend's own.
type Config struct {
	GroupBlocks   int     `json:"group_blocks"`     // blocks under one key
	Parallel      int     `json:"parallel"`         // loads under way at a time, and saves
	LookupTimeout float64 `json:"lookup_timeout"`   // s; then a prompt counts as not there
	Timeout       float64 `json:"transfer_timeout"` // s of a load or a save, from its order on: blocks wait for no store longer
	Name          string  `json:"store_name"`       // of the shared store in events; empty = where it is
}

// Keys are the names of Config in kv_connector_extra_config.
func Keys() []string {
	return []string{"group_blocks", "parallel", "lookup_timeout", "transfer_timeout", "store_name"}
}

// DefaultConfig returns groups of 16 blocks.
func DefaultConfig() Config {
	return Config{GroupBlocks: 16, Parallel: 4, LookupTimeout: 1, Timeout: 10}
}

// Validate returns every problem at once.
func (c *Config) Validate() error {
	var errs []error
	if c.GroupBlocks < 1 || c.GroupBlocks > 1<<12 {
		errs = append(errs, fmt.Errorf("group_blocks %d: want 1 to %d", c.GroupBlocks, 1<<12))
	}
	if c.Parallel < 1 || c.Parallel > 256 {
		errs = append(errs, fmt.Errorf("parallel %d: want 1 to 256", c.Parallel))
	}
	if !(c.LookupTimeout > 0 && c.LookupTimeout <= 60) {
		errs = append(errs, fmt.Errorf("lookup_timeout %v: want seconds, more than 0 and up to 60", c.LookupTimeout))
	}
	if !(c.Timeout > 0 && c.Timeout <= 600) {
		errs = append(errs, fmt.Errorf("transfer_timeout %v: want seconds, more than 0 and up to 600", c.Timeout))
	}
	return errors.Join(errs...)
}

// Opening is what a backend is opened with. A scheduler's half has no cache.
type Opening struct {
	Setup         connector.Setup
	Cache         *connector.Cache  // nil in the scheduler's half
	Compatibility [sha256.Size]byte // of the cache
	BlockBytes    int               // of one rank
	Describe      []byte            // what the worker's Arrange had to say, for the scheduler's half
}

// Transport is a connector over one kind of store.
type Transport struct {
	// Arrange puts registered caches into the order in which the store wants bytes, and says what the backend must know of it;
	// nil = as they are registered.
	Arrange func(connector.Caches) (c connector.Caches, describe []byte, err error)
	// Check tells what is wrong with a setup before anything is opened; nil = nothing can be.
	Check func(connector.Setup) error
	// Chunks returns how the store names groups by the tokens of a prompt, from its start on; nil, or a nil function = by their
	// last blocks' names.
	Chunks func(connector.Setup) (func(tokens []uint32) ([]event.BlockHash, error), error)
	// Open returns the backend. It does not wait for the store.
	Open func(Opening) (Backend, error)
}

// check returns the family's part of a setup's configuration, once all of it is right.
func (t Transport) check(s *connector.Setup) (Config, error) {
	cfg, err := configOf(s)
	if err == nil && t.Check != nil {
		err = t.Check(*s)
	}
	return cfg, err
}

// Connector returns both halves for a factory.
func (t Transport) Connector() connector.Transport {
	return connector.Transport{
		NewScheduler: func(s connector.Setup) (connector.Scheduler, error) { return NewScheduler(s, t) },
		NewWorker:    func(s connector.Setup) (connector.Worker, error) { return NewWorker(s, t) },
	}
}

// handshake is what a worker tells its scheduler's half.
type handshake struct {
	Compatibility []byte `json:"compatibility"`
	BlockBytes    int    `json:"block_bytes"`
	Describe      []byte `json:"describe,omitempty"`
}

// configOf reads the family's part of the extra configuration, and leaves the rest to the backend.
func configOf(s *connector.Setup) (Config, error) {
	cfg := DefaultConfig()
	own := connector.Extra{}
	for _, key := range Keys() {
		if v, ok := s.Config.Extra[key]; ok {
			own[key] = v
		}
	}
	if err := own.Into(&cfg, Keys()...); err != nil {
		return cfg, err
	}
	return cfg, cfg.Validate()
}

// metadata is what the scheduler's half tells its workers in a step.
type metadata struct {
	loads    []order
	saves    []order
	cancels  []string
	finished []string // requests that end once their saves have
}

// Empty reports whether there is nothing to do.
func (m *metadata) Empty() bool {
	return len(m.loads)+len(m.saves)+len(m.cancels)+len(m.finished) == 0
}

// order is a run of one request's groups to be loaded or saved.
type order struct {
	request string
	first   int // of the request's blocks
	groups  []Group
	blocks  []int // of the engine, for all groups in order; [connector.Discard] for those that are there
}
