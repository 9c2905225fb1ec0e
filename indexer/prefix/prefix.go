// Package prefix answers which source holds the longest prefix of a prompt, exactly: every block of the answer is
// resident where it says, and no longer prefix is.
//
// Each source is a resident set that follows its judged stream; beside the sets, one table a block size maps a prefix
// hash to its owners. The index is fed by one goroutine and read by any number; a reader sees the state after some
// message of each source, never a part of one.
package prefix

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"iter"
	"slices"
	"sync"
	"time"

	"kvstrata/event"
	"kvstrata/event/enginehash"
	"kvstrata/event/resident"
)

// Config says how the index hashes prompts and when it stops trusting a silent source.
type Config struct {
	// HashKey is the subscriber's: empty for the public scheme.
	HashKey string
	// StaleAfter is how long a source may go without a word from its publisher.
	StaleAfter time.Duration
	// Clock tells the time.
	Clock func() time.Time
}

// DefaultConfig returns the configuration of an index of public hashes.
func DefaultConfig() Config { return Config{StaleAfter: time.Minute, Clock: time.Now} }

// Index is the prefix index. Safe for concurrent use, but for its feeding methods (Restore, Apply, Tell, Compared),
// which are one goroutine's.
type Index struct {
	cfg     Config
	hasher  event.Hasher
	metrics metrics

	mu      sync.RWMutex
	sources map[event.Source]*source
	byID    []*source
	models  map[string]*model
	tiers   []event.Tier
	hot     map[hotKey]*heat
	asked   asked
}

// source is what is known of one source.
type source struct {
	id      uint32
	name    event.Source
	set     *resident.Set
	model   *model
	epoch   event.Epoch
	fence   event.Fence
	started bool
	seq     event.Seq
	doubt   string // why the set may not be its publisher's; empty = it is
	named   uint64 // blocks in tiers that have a name; the set has those without one, too
	recipe  enginehash.Recipe

	status    event.Status
	spoken    bool      // status is its publisher's own word
	toldAt    time.Time // by our clock
	lag       time.Duration
	hasLag    bool
	appliedAt time.Time
	blocks    uint64 // block operations applied
	totals    Totals
	agreed    uint64 // digests
	differed  uint64
	lastAgree bool
}

// model is every block of one model, by how its prompts are cut.
type model struct {
	tables     map[variant]table
	connectors []*source // in order of appearance: their statuses name stores
}

// variant is one way of cutting a prompt into blocks.
type variant struct {
	blockSize uint32
	eagle     bool
}

// table maps a prefix to who holds it.
type table map[event.PrefixHash]holders

// holders are the owners of one prefix. Most prefixes have one, which needs no memory of its own.
type holders struct {
	first owner
	more  []owner
}

// owner is a source that holds a prefix in a tier of a group, under count engine hashes.
type owner struct {
	source uint32
	group  uint32
	count  uint32
	tier   uint16
}

// New returns an empty index.
func New(cfg Config) *Index {
	return &Index{
		cfg: cfg, hasher: event.NewHasher(cfg.HashKey), metrics: newMetrics(),
		sources: make(map[event.Source]*source), models: make(map[string]*model), hot: make(map[hotKey]*heat),
	}
}

// source returns a source's entry, made at its first appearance. The caller holds the write lock.
func (x *Index) source(name event.Source) *source {
	if s := x.sources[name]; s != nil {
		return s
	}
	m := x.models[name.Model]
	if m == nil {
		m = &model{tables: make(map[variant]table)}
		x.models[name.Model] = m
	}
	s := &source{
		id: uint32(len(x.byID)), name: name, model: m, toldAt: x.cfg.Clock(),
		status: event.Status{Source: name, State: event.StateRecovering, Reason: "nothing told yet"},
	}
	s.set = resident.New(resident.Config{}, func(c resident.Change) { x.change(s, c) })
	x.sources[name] = s
	x.byID = append(x.byID, s)
	if name.Origin == event.Connector {
		m.connectors = append(m.connectors, s)
	}
	return s
}

// change enters one step of what is visible.
func (x *Index) change(s *source, c resident.Change) {
	s.named += uint64(c.Delta) // −1 wraps
	v := variant{c.BlockSize, c.Eagle}
	t := s.model.tables[v]
	if t == nil {
		t = make(table)
		s.model.tables[v] = t
	}
	tier := x.tier(c.Tier)
	h, held := t[c.Prefix]
	o := h.find(owner{source: s.id, group: c.Group.Index(), tier: tier})
	switch {
	case c.Delta > 0 && o != nil:
		o.count++
	case c.Delta > 0:
		own := owner{source: s.id, group: c.Group.Index(), count: 1, tier: tier}
		if held {
			h.more = append(h.more, own)
		} else {
			h.first = own
		}
	case o == nil:
		panic(fmt.Sprintf("prefix: %v falls in %v, where it is not", c.Prefix, s.name))
	case o.count > 1:
		o.count--
	case len(h.more) > 0:
		*o = h.more[len(h.more)-1]
		h.more = h.more[:len(h.more)-1]
	default:
		delete(t, c.Prefix)
		if len(t) == 0 {
			delete(s.model.tables, v)
		}
		return
	}
	t[c.Prefix] = h
}

// find returns the entry of an owner, whatever its count; nil when it has none.
func (h *holders) find(want owner) *owner {
	want.count = h.first.count
	if h.first == want && want.count > 0 {
		return &h.first
	}
	for i := range h.more {
		if want.count = h.more[i].count; h.more[i] == want {
			return &h.more[i]
		}
	}
	return nil
}

// all yields the owners of a prefix.
func (h *holders) all(yield func(owner) bool) {
	if h.first.count == 0 || !yield(h.first) {
		return
	}
	for _, o := range h.more {
		if !yield(o) {
			return
		}
	}
}

// tier numbers a tier's name. A set names few, and so does an index of many sets.
func (x *Index) tier(name event.Tier) uint16 {
	if i := slices.Index(x.tiers, name); i >= 0 {
		return uint16(i)
	}
	x.tiers = append(x.tiers, name)
	return uint16(len(x.tiers) - 1)
}

// numberOf returns a tier's number, which it has.
func (x *Index) numberOf(name event.Tier) uint16 {
	i := slices.Index(x.tiers, name)
	if i < 0 {
		panic(fmt.Sprintf("prefix: tier %q has no number", name))
	}
	return uint16(i)
}

// Restore replaces all that is known of a source by a checkpoint object.
func (x *Index) Restore(_ context.Context, object io.Reader) (*event.Checkpoint, error) {
	data, err := io.ReadAll(object)
	if err != nil {
		return nil, fmt.Errorf("read checkpoint: %w", err)
	}
	// The header names the source; the set reads it again.
	head, err := event.ReadCheckpoint(bytes.NewReader(data), func(*event.Entry) {})
	if err != nil {
		return nil, err
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	s := x.source(head.Source)
	defer x.numberTiers(s)
	cp, err := s.set.Load(bytes.NewReader(data))
	if err != nil {
		s.set.Reset()
		s.doubt = err.Error()
		return nil, err
	}
	s.epoch, s.fence, s.started, s.seq, s.doubt = cp.Epoch, cp.Fence, cp.Ledger.Started, cp.Seq, ""
	s.assume(cp)
	return cp, nil
}

// assume takes a checkpoint for its publisher's word, unless that spoke of this life, or of a later one, itself. What
// the checkpoint counts is in doubt until then.
func (s *source) assume(cp *event.Checkpoint) {
	told := &s.status
	if told.Fence > cp.Fence || told.Epoch > cp.Epoch || s.spoken && told.Fence == cp.Fence && told.Epoch == cp.Epoch {
		return
	}
	state, reason := event.StateRecovering, "read from a checkpoint; its subscriber has not spoken yet"
	if cp.State == event.StateStale || cp.State == event.StateGone {
		state, reason = cp.State, cp.Reason
	}
	s.spoken = false
	s.status = event.Status{
		Source: cp.Source, Epoch: cp.Epoch, Fence: cp.Fence, Seq: cp.Seq, State: state, Reason: reason,
		Ledger: cp.Ledger, Digest: cp.Digest, PastLives: cp.PastLives,
	}
}

// Apply adds consecutive batches of one life of a source, and returns the resident set's digest afterwards. After a
// batch that does not fit the source is left out of lookups, until Restore or a new life.
func (x *Index) Apply(_ context.Context, m *event.Message) (event.Digest, error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	s := x.source(m.Source)
	if m.Epoch != s.epoch {
		s.set.Reset()
		s.epoch, s.started, s.seq, s.doubt = m.Epoch, false, 0, ""
	}
	s.fence = m.Fence
	defer x.numberTiers(s)
	for i := range m.Batches {
		if err := s.apply(&m.Batches[i]); err != nil {
			s.doubt = err.Error()
			return 0, err
		}
	}
	s.appliedAt = x.cfg.Clock()
	for i := range m.Batches {
		x.heatUp(s, &m.Batches[i], s.appliedAt)
		s.totals.add(&m.Batches[i])
	}
	if last := m.Batches[len(m.Batches)-1]; last.Received != 0 {
		s.lag, s.hasLag = s.appliedAt.Sub(last.Received.Std()), true
		x.metrics.lag.Observe(s.lag.Seconds())
	}
	return s.set.Digest(), nil
}

func (s *source) apply(b *event.Batch) error {
	if s.started && b.First != s.seq+1 {
		return fmt.Errorf("apply batch %d: it does not follow %d", b.First, s.seq)
	}
	if err := s.set.Apply(b); err != nil {
		return err
	}
	s.started, s.seq = true, b.Last
	s.blocks += uint64(b.Blocks())
	return nil
}

// Tell takes what a source's publisher says of it.
func (x *Index) Tell(st *event.Status) {
	x.mu.Lock()
	defer x.mu.Unlock()
	s := x.source(st.Source)
	if st.HashScheme != s.status.HashScheme || st.HashSeed != s.status.HashSeed || s.recipe.Scheme == 0 {
		s.recipe = recipeOf(st)
	}
	s.status, s.spoken, s.toldAt = *st, true, x.cfg.Clock()
	if st.Withdrawn && st.Epoch > s.epoch { // nothing may follow that would replace what the dead life held
		s.set.Reset()
		s.epoch, s.started, s.seq, s.doubt = st.Epoch, false, 0, ""
	}
}

// Compared notes whether a digest sent with the stream was this index's own. Where it was not, the source is left out
// of lookups, until Restore or a new life.
func (x *Index) Compared(name event.Source, agreed bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	s := x.source(name)
	s.lastAgree = agreed
	if agreed {
		s.agreed++
		s.doubt = ""
	} else {
		s.differed++
		s.doubt = "the digest differs from its publisher's"
	}
}

// state returns a source's state as it is now, and why it is not live.
func (x *Index) state(s *source, now time.Time) (event.State, string) {
	if !s.status.State.Answers() {
		return s.status.State, s.status.Reason
	}
	if s.doubt != "" {
		return event.StateStale, s.doubt + "; waiting for a checkpoint"
	}
	heard := s.toldAt
	if s.appliedAt.After(heard) {
		heard = s.appliedAt
	}
	if silent := now.Sub(heard); silent > x.cfg.StaleAfter {
		return event.StateStale, fmt.Sprintf("no word from its subscriber for %v", silent.Round(time.Second))
	}
	return s.status.State, s.status.Reason
}

// life returns the epoch that a source lives, and how far it was applied. Its publisher may tell of a new life before
// the first batch of it comes: what the set holds then is a dead one's.
func (s *source) life() (epoch event.Epoch, seq event.Seq, started bool) {
	if s.status.Epoch > s.epoch {
		return s.status.Epoch, 0, false
	}
	return s.epoch, s.seq, s.started
}

// Seq returns the last sequence applied in a source's present life.
func (x *Index) Seq(name event.Source) (event.Epoch, event.Seq, bool) {
	x.mu.RLock()
	defer x.mu.RUnlock()
	s := x.sources[name]
	if s == nil {
		return 0, 0, false
	}
	return s.life()
}

// Resident yields a source's resident blocks, in no order, while the index stands still: for comparisons and tests.
func (x *Index) Resident(name event.Source) iter.Seq[*event.Entry] {
	return func(yield func(*event.Entry) bool) {
		x.mu.RLock()
		defer x.mu.RUnlock()
		s := x.sources[name]
		if s == nil {
			return
		}
		for e := range s.set.Resident() {
			if !yield(e) {
				return
			}
		}
	}
}
