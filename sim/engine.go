package sim

import (
	"errors"
	"fmt"
	"iter"
	"math"

	"kvstrata/event"
)

// EngineConfig says what an engine is like.
type EngineConfig struct {
	Name          string // for people and reports
	PoolBlocks    int    // physical blocks; one of them is vLLM's null block, which holds nothing
	BlockSize     int    // tokens a block
	MaxRunning    int    // requests that run at a time (vLLM's max_num_seqs)
	MaxWaiting    int    // requests that wait; a further one is refused
	TokensPerStep int    // tokens computed in a step (max_num_batched_tokens); 0 = each prompt whole in one step
	HashSeed      uint64 // stands for vLLM's NONE_HASH: engines with different seeds call the same prefix differently
	HashBytes     bool   // hashes are 32 bytes rather than 8-byte integers
	ReportGroup   bool   // events name KV cache group 0 and its kind of attention, as newer vLLMs do
}

// DefaultEngineConfig is a small vLLM without chunked prefill.
func DefaultEngineConfig() EngineConfig {
	return EngineConfig{Name: "engine", PoolBlocks: 65_536, BlockSize: 16, MaxRunning: 256, MaxWaiting: 1024}
}

// Validate returns every problem of the configuration, joined; nil when there is none.
func (c EngineConfig) Validate() error {
	var problems []error
	check := func(ok bool, format string, args ...any) {
		if !ok {
			problems = append(problems, fmt.Errorf(format, args...))
		}
	}
	check(c.Name != "", "engine name: is empty")
	check(c.PoolBlocks >= 2 && c.PoolBlocks <= math.MaxInt32, "pool-blocks %d: want 2 to %d", c.PoolBlocks, math.MaxInt32)
	check(c.BlockSize >= 1 && c.BlockSize <= 1<<16, "block-size %d: want 1 to %d tokens", c.BlockSize, 1<<16)
	check(c.MaxRunning >= 1, "max-running %d: want at least 1", c.MaxRunning)
	check(c.MaxWaiting >= 1, "max-waiting %d: want at least 1", c.MaxWaiting)
	check(c.TokensPerStep >= 0, "tokens-per-step %d: want 0 (no chunked prefill) or more", c.TokensPerStep)
	return errors.Join(problems...)
}

// EngineStats counts what an engine did since it was made.
type EngineStats struct {
	Submitted uint64 // requests taken
	Refused   uint64 // requests that Submit refused
	Finished  uint64
	Preempted uint64 // times that a running request lost its blocks

	PromptTokens    uint64 // of the requests admitted
	ComputedTokens  uint64 // by prefill and decode, those recomputed after a preemption included
	LoadedTokens    uint64 // that came by transfer
	GeneratedTokens uint64

	// Blocks looked up are the full blocks of each prompt when it is first admitted; hits are those of them that were
	// found, of which vLLM never counts the one that holds the prompt's last token.
	BlockLookups uint64
	BlockHits    uint64

	BlocksStored  uint64 // physical copies cached
	BlocksEvicted uint64
	BlocksLoaded  uint64 // full blocks that came by transfer

	// Of an engine with a connector.
	BlocksVerified uint64 // blocks that came and were compared byte for byte, full or not
	BlocksWrong    uint64 // those of them with a wrong byte
	BlocksFailed   uint64 // blocks that were to come and did not
	Failed         uint64 // requests that ended for that

	Batches uint64 // published
}

// Engine is one engine: it takes requests and runs them step by step. It is owned by one goroutine at a time, starts
// none and reads no clock.
type Engine struct {
	cfg    EngineConfig
	pub    Publisher
	pool   *BlockPool
	hasher hasher
	kv     *kv // nil without a connector

	waiting []*sequence // the next first; preempted ones stand before those that never ran
	running []*sequence // in the order of their admission
	live    map[string]struct{}

	events []event.Event // of the step so far
	noKeys [][]byte      // shared by all events of blocks without extra keys; never written
	stats  EngineStats
}

// NewEngine returns an idle engine with an empty cache.
func NewEngine(cfg EngineConfig, pub Publisher) (*Engine, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	e := &Engine{cfg: cfg, pub: pub, hasher: newHasher(cfg.HashSeed), live: make(map[string]struct{})}
	e.pool = NewBlockPool(cfg.PoolBlocks, e.evicted)
	return e, nil
}

// Name returns the engine's name.
func (e *Engine) Name() string { return e.cfg.Name }

// Config returns the engine's configuration.
func (e *Engine) Config() EngineConfig { return e.cfg }

// Stats returns the engine's counts.
func (e *Engine) Stats() EngineStats { return e.stats }

// Busy reports whether any request runs or waits. While it is so, every step makes progress, but where a connector's transfer
// or its blocks are waited for.
func (e *Engine) Busy() bool {
	n := len(e.running) + len(e.waiting)
	if e.kv != nil {
		n += len(e.kv.remote)
	}
	return n > 0
}

// Submit queues a request, or refuses it with one of [ErrEmptyPrompt], [ErrTooLong], [ErrQueueFull] and
// [ErrDuplicateID], and counts it. One that could not finish even with the pool to itself is too long.
func (e *Engine) Submit(r Request) error {
	if err := e.admissible(&r); err != nil {
		e.stats.Refused++
		return fmt.Errorf("submit request %q to %s: %w", r.ID, e.cfg.Name, err)
	}
	e.stats.Submitted++
	e.live[r.ID] = struct{}{}
	e.waiting = append(e.waiting, &sequence{
		Request: r, external: r.External, outputKey: outputKey(r.ID),
		firstExtra: appendExtraKeys(nil, r.LoRA, r.Salt), extra: appendExtraKeys(nil, r.LoRA, ""),
	})
	return nil
}

func (e *Engine) admissible(r *Request) error {
	if _, ok := e.live[r.ID]; ok || e.kv != nil && e.kv.delayed[r.ID] != nil {
		return ErrDuplicateID
	}
	if len(r.Prompt) == 0 {
		return ErrEmptyPrompt
	}
	// The last token generated is never computed, so it needs no room. Divided, lest a huge Output overflow.
	if room := e.pool.Usable() * e.cfg.BlockSize; len(r.Prompt) > room || r.Output-1 > room-len(r.Prompt) {
		return ErrTooLong
	}
	if len(e.waiting) >= e.cfg.MaxWaiting {
		return ErrQueueFull
	}
	return nil
}

// Reset forgets the whole prefix cache and publishes CLEARED, unless a running request holds blocks: then it does
// nothing and returns false. vLLM publishes it with the next step that has events; here it goes out at once, since an
// idle engine may have no next step.
func (e *Engine) Reset(now event.Time) (bool, error) {
	if !e.pool.Clear() {
		return false, nil
	}
	e.events = append(e.events, event.Event{
		Kind: event.Cleared, Cause: event.ByEngine, Group: event.NoGroup, LoRAID: event.NoLoRAID,
	})
	return true, e.publish(now)
}

// BlockKey is what a source's resident set counts copies of.
type BlockKey struct {
	Hash  event.BlockHash
	Tier  event.Tier
	Group event.Group
}

// Resident yields what is cached and in how many physical copies, in no order.
func (e *Engine) Resident() iter.Seq2[BlockKey, int] {
	return func(yield func(BlockKey, int) bool) {
		for hash, copies := range e.pool.Copies() {
			if !yield(BlockKey{Hash: e.name(hash), Tier: event.GPU, Group: e.group()}, copies) {
				return
			}
		}
	}
}

// ResidentBlocks returns how many physical blocks are cached: the sum over [Engine.Resident].
func (e *Engine) ResidentBlocks() int { return e.pool.Cached() }

// name returns what the engine calls a hash in its events.
func (e *Engine) name(hash uint64) event.BlockHash {
	if e.cfg.HashBytes {
		return digestBytes(hash)
	}
	return event.IntHash(hash)
}

func (e *Engine) group() event.Group {
	if e.cfg.ReportGroup {
		return 0
	}
	return event.NoGroup
}
