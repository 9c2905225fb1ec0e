// Package capacity says what a prefix cache of another size would have hit: curves of hits over sizes, from one pass over
// what was asked for ([Stack]) or over what engines told ([Victims]), and what the best possible policy would have hit
// ([Optimum]). It is pure: it knows no clock, does no I/O, and the same input gives the same curve.
//
// # The model
//
// A cache holds so many blocks, whatever their length in tokens. A request names the blocks of its prompt in order; it hits
// a block if the cache holds that one and all before it. What is hit is decided before the request changes anything, as an
// engine pins what it found before it allocates the rest; afterwards all its blocks are the newest, the first of them
// newest of all: engines free a request's blocks from its tail on, so that of a prefix that nobody uses the head stays
// longest. Hence a block is never newer than the one before it, and whatever the size, the cache holds whole prefixes: a
// block's place in the order of recency, counted from the newest, is the smallest cache in which it is hit (Mattson's stack
// distance). [PromptOrder] is the other way round, to see what the order is worth.
//
// # Sampling
//
// Block hashes are uniform already, so that a share of the blocks is those with small hashes (SHARDS: Waldspurger et al.,
// FAST 2015): of 2^Shift blocks one is looked at, and what is between two touches of it stands for 2^Shift times as many.
// Where more blocks than Config.MaxBlocks are tracked, half of them are given up and Shift grows by one. With a Shift of 0
// everything is exact.
package capacity

import (
	"errors"
	"fmt"
)

// Block is one block of a prompt, or of what an engine told. The hash names the prefix that the block ends, and is uniform
// in its 64 bits. Tokens is how many of its tokens are used.
type Block struct {
	Hash   uint64
	Tokens uint32
}

// Count is a number of blocks and of the tokens in them.
type Count struct{ Blocks, Tokens uint64 }

func (c *Count) add(tokens uint32) {
	c.Blocks++
	c.Tokens += uint64(tokens)
}

// Order is in which order a request's blocks become the newest.
type Order uint8

// The orders.
const (
	TailFirst   Order = iota // the first block is newest of all, as in engines
	PromptOrder              // the last one is
)

func (o Order) String() string {
	if o == PromptOrder {
		return "prompt order"
	}
	return "tail first"
}

// Config bounds what is looked at.
type Config struct {
	Shift     uint8 // to begin with, one of 2^Shift blocks is looked at: those whose hashes have so many leading zeros
	MaxBlocks int   // tracked at a time, 42 to 75 bytes each
	Order     Order
}

// DefaultConfig looks at everything up to a million blocks.
func DefaultConfig() Config { return Config{MaxBlocks: 1 << 20} }

// Bounds of Config.
const (
	maxShift  = 40
	minBlocks = 1 << 10
	maxBlocks = 1 << 28
)

// Validate returns every problem at once.
func (c Config) Validate() error {
	var errs []error
	if c.Shift > maxShift {
		errs = append(errs, fmt.Errorf("shift %d: want 0 to %d", c.Shift, maxShift))
	}
	if c.MaxBlocks < minBlocks || c.MaxBlocks > maxBlocks {
		errs = append(errs, fmt.Errorf("blocks %d: want %d to %d", c.MaxBlocks, minBlocks, maxBlocks))
	}
	if c.Order > PromptOrder {
		errs = append(errs, fmt.Errorf("order %d: want 0 or 1", c.Order))
	}
	return errors.Join(errs...)
}

// sampler says which blocks are looked at. The zero value looks at all.
type sampler struct {
	shift uint8
	mask  uint64 // bits that are zero in the hashes that are looked at
}

func (s *sampler) set(shift uint8) {
	s.shift, s.mask = shift, ^(^uint64(0) >> shift)
}

func (s *sampler) looksAt(hash uint64) bool { return hash&s.mask == 0 }
