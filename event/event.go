// Package event is the vocabulary of kvstrata: what an engine, a connector or a shared store tells of its KV cache,
// in one canonical form, whatever dialect it was spoken in.
//
// A [Source] tells its story in lives ([Epoch]); a life is a sequence of batches ([Batch], numbered by [Seq]); a batch
// is a list of events ([Event]), each over a run of blocks ([Block]) in chain order. STORED, EVICTED and CLEARED change
// the source's resident set; LOADED is a fact about a transfer and never does.
//
// The package is pure: no I/O, no clock, no logger. The wire form is normative in docs/format/event.md.
package event

import "time"

// Seq numbers the batches of one life of a source, as its publisher counted them: most start at 0, Mooncake at 1.
type Seq uint64

// Epoch names one life of a source's publisher. It only grows: max(last known + 1, Unix milliseconds).
type Epoch uint64

// Fence numbers the holders of a source's lease. It only grows, as [Epoch] does; consumers drop what a lower one sent.
type Fence uint64

// Time is a moment in nanoseconds of Unix time by the clock of whoever stamped it; 0 means unknown.
type Time int64

// UnixTime returns t as nanoseconds of Unix time.
func UnixTime(t time.Time) Time { return Time(t.UnixNano()) }

// Std returns t as a [time.Time]; the zero time when t is unknown.
func (t Time) Std() time.Time {
	if t == 0 {
		return time.Time{}
	}
	return time.Unix(0, int64(t))
}

// Seconds returns the time given in seconds of Unix time, as engines send it.
func Seconds(s float64) Time {
	const limit = 9e9 // the year 2255; beyond it nanoseconds no longer fit an int64
	if !(s > 0 && s < limit) {
		return 0
	}
	whole := int64(s)
	return Time(whole*1e9 + int64((s-float64(whole))*1e9))
}

// Block is one block of a run.
type Block struct {
	Hash   BlockHash  // what the engine calls the block
	Prefix PrefixHash // what we call the prefix that ends with it; 0 = unknown

	// Effect is what the operation did to the number of copies: +1, −1 or 0. Only the source's publisher judges it;
	// consumers add.
	Effect int8
	// Copies is what an EVICTED left of the block in its tier and group; −1 = unknown.
	Copies int32
	// Age is, for an EVICTED, the batch's engine time minus the engine time at which copies rose from 0; −1 = unknown.
	Age time.Duration
}

// Event is one operation over a run of blocks.
type Event struct {
	Kind   Kind
	Blocks []Block // in chain order: each block's parent is the one before it
	Tier   Tier    // where the blocks are; what the engine calls medium
	Group  Group   // KV cache group; NoGroup when the engine named none

	// Of a STORED run.
	HasParent bool       // whether the run continues a block; without it block 0 is a root
	Parent    BlockHash  // the block before the run
	Seed      uint64     // the seed of the run's local hashes, LoRA and salt terms included, sealed (Hasher.Seal); 0 = unknown
	BlockSize uint32     // tokens a block; 0 = not told
	Eagle     bool       // each local hash covers a window of BlockSize+1 tokens
	Unrooted  bool       // the parent is unknown: Blocks carry local hashes where prefix hashes would stand
	Spec      SpecKind   // the group's kind of attention
	Window    uint32     // sliding window in tokens; 0 = none
	LoRA      string     // adapter name
	LoRAID    int64      // adapter id, deprecated upstream; NoLoRAID when absent
	Session   string     // request context that caused the store
	Locality  Locality   // where the blocks are relative to the publisher
	Ownership string     // id of the secondary offload tier
	Tokens    []uint32   // prompt text: dropped after hashing unless kept by --tokens=keep
	ExtraKeys [][]byte   // one msgpack value a block (nil = none); leaves the edge only with the tokens
	Salt      string     // cache salt of a root run; never leaves the edge
	Locals    []uint64   // each block's local hash, of a source that tells it instead of tokens; never leaves the edge
	Terms     []uint64   // what each block's extra keys add to its local seed (ExtraTerm); nil = nothing
	Cause     ClearCause // of a CLEARED
	Load      Load       // of a LOADED
}

// Load is what a LOADED tells of the transfer that brought its blocks. The event's Tier is the destination.
type Load struct {
	From     Tier          // source tier
	Peer     string        // where the bytes came from
	Request  string        // the request that waited for them
	Bytes    uint64        // moved
	Duration time.Duration // from post to completion
}

// Batch is what a source published under one sequence number, or, with Way Lost or Dropped, a range of numbers whose
// batches never came.
type Batch struct {
	First, Last Seq
	Way         Way
	Time        Time   // by the engine's clock
	Received    Time   // by the subscriber's clock
	Payload     uint64 // XXH3-64 of the engine's payload; 0 = unknown
	Reason      string // of a Lost or Dropped one
	Rank        int32  // data-parallel rank told in the payload, −1 when none; the source's own rank rules
	Events      []Event
}

// Blocks returns how many block operations the batch holds.
func (b *Batch) Blocks() int {
	n := 0
	for i := range b.Events {
		n += len(b.Events[i].Blocks)
	}
	return n
}

// Message is what travels as one bus message: consecutive batches of one life of one source.
type Message struct {
	Source   Source
	Epoch    Epoch
	Fence    Fence
	Batches  []Batch
	Digest   Digest // the resident set's digest after the last batch, if HasDigest
	Position Position
	Stored   Time // when the bus's stream took the message; history goes by it ("committed")

	HasDigest bool
}

// Position is a place in a bus stream. A stream that was lost and made anew has another identity.
type Position struct {
	Stream   string // name
	Created  Time   // creation time: with the name, the stream's identity
	Sequence uint64 // the stream's own sequence; 0 = before the first message
}

// SameStream reports whether p and q lie in the same life of the same stream.
func (p Position) SameStream(q Position) bool { return p.Stream == q.Stream && p.Created == q.Created }

// Mark is where a consumer stands with a source: it has everything up to Seq, and drops what a lower fence or epoch sent.
type Mark struct {
	Fence   Fence
	Epoch   Epoch
	Started bool // Seq means something
	Seq     Seq
}
