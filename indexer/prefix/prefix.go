// Package prefix answers which source holds the longest prefix of a prompt, exactly: every block of the answer is
// resident where it says, and no longer prefix is.
//
// Each source is a resident set that follows its judged stream; beside the sets, one table a block size maps a prefix
// hash to its owners. The index is fed by one goroutine and read by any number; a reader sees the state after some
// message of each source, never a part of one.
package prefix

import (
	"bytes"
	"fmt"
	"io"
	"iter"
	"slices"
	"sync"
	"time"

	"kvstrata/event"
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

	status    event.Status
	toldAt    time.Time // by our clock
	lag       time.Duration
	hasLag    bool
	appliedAt time.Time
	blocks    uint64 // block operations applied
	agreed    uint64 // digests
	differed  uint64
	lastAgree bool
}

// model is every block of one model, by how its prompts are cut.
type model struct {
	tables map[variant]table
}

// variant is one way of cutting a prompt into blocks.
type variant struct {
	blockSize uint32
	eagle     bool
}

// table maps a prefix to who holds it.
type table map[event.PrefixHash][]owner

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
		sources: make(map[event.Source]*source), models: make(map[string]*model),
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
	return s
}

// change enters one step of what is visible.
func (x *Index) change(s *source, c resident.Change) {
	v := variant{c.BlockSize, c.Eagle}
	t := s.model.tables[v]
	if t == nil {
		t = make(table)
		s.model.tables[v] = t
	}
	tier := x.tier(c.Tier)
	owners := t[c.Prefix]
	for i := range owners {
		o := &owners[i]
		if o.source != s.id || o.group != c.Group.Index() || o.tier != tier {
			continue
		}
		o.count += uint32(int32(c.Delta))
		if o.count > 0 {
			return
		}
		owners[i] = owners[len(owners)-1]
		if owners = owners[:len(owners)-1]; len(owners) == 0 {
			delete(t, c.Prefix)
		} else {
			t[c.Prefix] = owners
		}
		if len(t) == 0 {
			delete(s.model.tables, v)
		}
		return
	}
	if c.Delta < 0 {
		panic(fmt.Sprintf("prefix: %v falls in %v, where it is not", c.Prefix, s.name))
	}
	t[c.Prefix] = append(owners, owner{source: s.id, group: c.Group.Index(), count: 1, tier: tier})
}

// tier numbers a tier's name. A set names few, and so does an index of many sets.
func (x *Index) tier(name event.Tier) uint16 {
	if i := slices.Index(x.tiers, name); i >= 0 {
		return uint16(i)
	}
	x.tiers = append(x.tiers, name)
	return uint16(len(x.tiers) - 1)
}

// Restore replaces all that is known of a source by a checkpoint object.
func (x *Index) Restore(object io.Reader) (*event.Checkpoint, error) {
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
	cp, err := s.set.Load(bytes.NewReader(data))
	if err != nil {
		s.set.Reset()
		return nil, err
	}
	s.epoch, s.fence, s.started, s.seq = cp.Epoch, cp.Fence, cp.Ledger.Started, cp.Seq
	if s.status.Fence <= cp.Fence && s.status.Epoch <= cp.Epoch {
		// Until its publisher speaks, the source is what the checkpoint says, in doubt.
		s.status = event.Status{
			Source: cp.Source, Epoch: cp.Epoch, Fence: cp.Fence, Seq: cp.Seq, State: event.StateRecovering,
			Reason: "read from a checkpoint; its subscriber has not spoken yet", Ledger: cp.Ledger, Digest: cp.Digest,
		}
	}
	return cp, nil
}

// Apply adds consecutive batches of one life of a source, and returns the resident set's digest afterwards.
func (x *Index) Apply(m *event.Message) (event.Digest, error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	s := x.source(m.Source)
	if m.Epoch != s.epoch {
		s.set.Reset()
		s.epoch, s.started = m.Epoch, false
	}
	s.fence = m.Fence
	for i := range m.Batches {
		b := &m.Batches[i]
		if err := s.set.Apply(b); err != nil {
			return 0, err
		}
		s.started, s.seq = true, b.Last
		s.blocks += uint64(b.Blocks())
	}
	s.appliedAt = x.cfg.Clock()
	if last := m.Batches[len(m.Batches)-1]; last.Received != 0 {
		s.lag, s.hasLag = s.appliedAt.Sub(last.Received.Std()), true
		x.metrics.lag.Observe(s.lag.Seconds())
	}
	return s.set.Digest(), nil
}

// Tell takes what a source's publisher says of it.
func (x *Index) Tell(st *event.Status) {
	x.mu.Lock()
	defer x.mu.Unlock()
	s := x.source(st.Source)
	s.status, s.toldAt = *st, x.cfg.Clock()
}

// Compared notes whether a digest sent with the stream was this index's own.
func (x *Index) Compared(name event.Source, agreed bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	s := x.source(name)
	s.lastAgree = agreed
	if agreed {
		s.agreed++
	} else {
		s.differed++
	}
}

// state returns a source's state as it is now, and why it is not live.
func (x *Index) state(s *source, now time.Time) (event.State, string) {
	if silent := now.Sub(s.toldAt); silent > x.cfg.StaleAfter && s.status.State.Answers() {
		return event.StateStale, fmt.Sprintf("no word from its subscriber for %v", silent.Round(time.Second))
	}
	return s.status.State, s.status.Reason
}

// Seq returns the last sequence applied in a source's present life.
func (x *Index) Seq(name event.Source) (event.Epoch, event.Seq, bool) {
	x.mu.RLock()
	defer x.mu.RUnlock()
	s := x.sources[name]
	if s == nil {
		return 0, 0, false
	}
	return s.epoch, s.seq, s.started
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
