// Package store is the connector over a shared store: a producer saves groups of blocks under keys made of their names, and
// a consumer loads the longest prefix that is there. Both halves are here; what the store is, is a [Backend].
package store

import (
	"context"
	"errors"

	"kvstrata/connector"
)

// Group is a run of consecutive blocks of one request that is stored under one key.
type Group struct {
	Blocks    []connector.Name // in chain order; the last one names the group
	Parent    connector.Name   // the block before them, when HasParent
	HasParent bool
	LoRA      string
	Rank      int // tensor-parallel rank whose part it is
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
	GroupBlocks int    `json:"group_blocks"` // blocks under one key
	Parallel    int    `json:"parallel"`     // loads and saves under way at a time, each
	Name        string `json:"store_name"`   // of the shared store in events; empty = where it is
}
