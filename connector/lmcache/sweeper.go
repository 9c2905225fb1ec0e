package lmcache

import (
	"cmp"
	"container/list"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"kvstrata/connector"
	"kvstrata/connector/store"
	"kvstrata/event"
)

// Publisher takes event batches; it never waits.
type Publisher interface {
	Publish(b *event.Batch) error
}

// Prober asks a store which of some keys are there; [Backend] is one.
type Prober interface {
	Key(g *store.Group) string
	Exist(ctx context.Context, keys []string) ([]bool, error)
}

// SweepConfig says how a store is watched that does not tell what it evicts.
type SweepConfig struct {
	Interval time.Duration // between sweeps
	MaxKeys  int           // watched; the oldest are forgotten
	Silence  int           // sweeps in a row without an answer, after which keys count as gone
	Ranks    int           // under how many keys a group lies: tensor-parallel ranks, or 1 for MLA
	Block    int           // tokens a block
}

// DefaultSweepConfig returns 10 seconds, a million keys and 3 silent sweeps, for one rank and blocks of 16 tokens.
func DefaultSweepConfig() SweepConfig {
	return SweepConfig{Interval: 10 * time.Second, MaxKeys: 1 << 20, Silence: 3, Ranks: 1, Block: 16}
}

// Validate returns every problem at once.
func (c *SweepConfig) Validate() error {
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	if c.Interval <= 0 {
		bad("sweep interval %v: want more than 0", c.Interval)
	}
	if c.MaxKeys < c.Ranks {
		bad("sweep max keys %d: want those of one group, %d, or more", c.MaxKeys, c.Ranks)
	}
	if c.Silence < 1 {
		bad("sweep silence %d: want 1 sweep or more", c.Silence)
	}
	if c.Ranks < 1 {
		bad("sweep ranks %d: want 1 or more", c.Ranks)
	}
	if c.Block < 1 {
		bad("sweep block size %d: want 1 token or more", c.Block)
	}
	return errors.Join(errs...)
}

// SweepStats counts.
type SweepStats struct {
	Watched   int    // groups
	Resident  int    // of these, those whose STORED was published
	Sweeps    uint64 // that ended
	Silent    uint64 // that the store did not answer in full
	Forgotten uint64 // groups for which there was no room
	Dropped   uint64 // batches that the publisher did not take; they are tried again
}

// Sweeper turns what connectors tell of a shared store, and what the store answers, into the store's events: STORED when
// every rank's part of a group was told and is there, EVICTED when a sweep does not find one any more. A store that does not
// answer says nothing at first; after a few sweeps its groups count as gone, and are STORED again when it answers.
//
// Told may be called by any goroutine; one runs Run, or calls Sweep.
type Sweeper struct {
	cfg   SweepConfig
	store Prober
	pub   Publisher
	log   *slog.Logger
	wake  chan struct{}

	mu     sync.Mutex
	groups map[string]*list.Element // by the key of rank 0
	order  *list.List               // of *watched; the front was told first
	fresh  []*watched               // told since they were last asked for
	leave  map[string]*watched      // forgotten for want of room, and their EVICTED not published yet
	stats  SweepStats
}

// watched is one group.
type watched struct {
	group    store.Group
	keys     []string // of each rank
	told     []bool   // of each rank
	missing  int      // ranks that have not told
	resident bool     // its STORED was published, and no EVICTED since
	silent   int      // sweeps in a row that had no answer
	fresh    bool     // is in the sweeper's fresh
	left     uint64   // orders what was forgotten
}

// NewSweeper returns a sweeper that watches nothing.
func NewSweeper(cfg SweepConfig, prober Prober, pub Publisher, log *slog.Logger) (*Sweeper, error) {
	if err := cfg.Validate(); err != nil {
		return nil, fmt.Errorf("lmcache sweeper: %w", err)
	}
	return &Sweeper{
		cfg: cfg, store: prober, pub: pub, log: log, wake: make(chan struct{}, 1),
		groups: make(map[string]*list.Element), order: list.New(), leave: make(map[string]*watched),
	}, nil
}

// Stats returns the counts.
func (s *Sweeper) Stats() SweepStats {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stats.Watched = s.order.Len()
	return s.stats
}

// Told notes that a connector has stored a rank's part of a group. It never waits.
func (s *Sweeper) Told(g *store.Group) error {
	if len(g.Blocks) == 0 || g.Rank < 0 || g.Rank >= s.cfg.Ranks {
		return fmt.Errorf("watch a group of %d blocks of rank %d: want 1 or more, and a rank below %d", len(g.Blocks), g.Rank, s.cfg.Ranks)
	}
	first := *g
	first.Rank = 0
	id := s.store.Key(&first)
	s.mu.Lock()
	e, ok := s.groups[id]
	if !ok {
		for (s.order.Len()+1)*s.cfg.Ranks > s.cfg.MaxKeys {
			s.stats.Forgotten++
			if len(s.leave) == maxLeave { // the publisher takes nothing: no room can be made without a lie
				s.mu.Unlock()
				return nil
			}
			s.forget(s.order.Front())
		}
		w := &watched{group: cloned(&first), keys: []string{id}, told: make([]bool, s.cfg.Ranks), missing: s.cfg.Ranks}
		for first.Rank = 1; first.Rank < s.cfg.Ranks; first.Rank++ {
			w.keys = append(w.keys, s.store.Key(&first))
		}
		if _, w.resident = s.leave[id]; w.resident {
			delete(s.leave, id)
		}
		e = s.order.PushBack(w)
		s.groups[id] = e
	}
	w := e.Value.(*watched)
	if !w.told[g.Rank] {
		w.told[g.Rank] = true
		w.missing--
	}
	news := w.missing == 0 && !w.resident
	if news && !w.fresh {
		w.fresh = true
		if s.fresh = append(s.fresh, w); len(s.fresh) > 2*s.order.Len()+sweepGroups { // nobody sweeps
			s.fresh = slices.DeleteFunc(s.fresh, func(w *watched) bool { e, ok := s.groups[w.keys[0]]; return !ok || e.Value != w })
		}
	}
	s.mu.Unlock()
	if news {
		select {
		case s.wake <- struct{}{}:
		default: // Run will look anyway
		}
	}
	return nil
}

// cloned copies a group with memory of its own: the teller's may be part of a large request.
func cloned(g *store.Group) store.Group {
	c := *g
	c.Blocks = make([]connector.Name, len(g.Blocks))
	for i, b := range g.Blocks {
		c.Blocks[i] = connector.Name{Hash: b.Hash.Clone(), Prefix: b.Prefix}
	}
	c.Parent.Hash = g.Parent.Hash.Clone()
	return c
}

// maxLeave bounds what was forgotten and cannot be published.
const maxLeave = 4096

// forget stops watching; what was resident is yet to be EVICTED.
func (s *Sweeper) forget(e *list.Element) {
	w := s.order.Remove(e).(*watched)
	delete(s.groups, w.keys[0])
	if w.resident {
		w.left = s.stats.Forgotten
		s.leave[w.keys[0]] = w
	}
}

// Run sweeps at every interval, and asks at once for what is told, until ctx ends.
func (s *Sweeper) Run(ctx context.Context) error {
	tick := time.NewTicker(s.cfg.Interval)
	defer tick.Stop()
	for {
		var all bool
		select {
		case <-ctx.Done():
			return nil
		case <-s.wake:
		case <-tick.C:
			all = true
		}
		if err := s.sweep(ctx, all); err != nil && ctx.Err() == nil {
			s.log.Warn("the store did not answer a sweep: what it holds is uncertain", "err", err)
		}
	}
}

// Sweep asks for every group once, and publishes what has changed.
func (s *Sweeper) Sweep(ctx context.Context) error { return s.sweep(ctx, true) }

// sweepGroups is how many groups are asked for at a time, and told of in one batch.
const sweepGroups = 256

func (s *Sweeper) sweep(ctx context.Context, all bool) error {
	defer s.publishLeft()
	s.mu.Lock()
	due := s.fresh
	for _, w := range due {
		w.fresh = false
	}
	s.fresh = nil
	if all {
		due = make([]*watched, 0, s.order.Len())
		for e := s.order.Front(); e != nil; e = e.Next() {
			if w := e.Value.(*watched); w.missing == 0 || w.resident {
				due = append(due, w)
			}
		}
	}
	s.mu.Unlock()
	var failed error
	for first := 0; first < len(due) && ctx.Err() == nil; first += sweepGroups {
		part := due[first:min(first+sweepGroups, len(due))]
		var keys []string
		for _, w := range part {
			keys = append(keys, w.keys...)
		}
		there, err := s.store.Exist(ctx, keys)
		if ctx.Err() != nil {
			return ctx.Err() // that the sweep was stopped says nothing of the store
		}
		if err != nil {
			failed = err
		}
		s.apply(part, there, all)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if all {
		s.stats.Sweeps++
	}
	if failed != nil {
		s.stats.Silent++
	}
	return failed
}

// apply publishes what the answers have changed. There may be fewer answers than keys.
func (s *Sweeper) apply(part []*watched, there []bool, all bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var stored, gone, absent []*watched
	for _, w := range part {
		n := min(len(w.keys), len(there))
		answers := there[:n]
		there = there[n:]
		e, ok := s.groups[w.keys[0]]
		if !ok || e.Value != w {
			continue // was forgotten meanwhile
		}
		lost := w.answered(answers)
		switch {
		case lost:
			absent = append(absent, w)
		case n < len(w.keys):
			if w.silent++; !all {
				w.silent-- // only sweeps count
			}
			if w.silent >= s.cfg.Silence && w.resident {
				gone = append(gone, w)
			}
		case w.missing > 0: // is resident, and was told anew by some: all are there
			w.silent, w.missing = 0, 0
			for rank := range w.told {
				w.told[rank] = true
			}
		default:
			if w.silent = 0; !w.resident {
				stored = append(stored, w)
			}
		}
	}
	s.emit(event.Stored, stored)
	s.emit(event.Evicted, gone)
	s.emit(event.Evicted, slices.DeleteFunc(slices.Clone(absent), func(w *watched) bool { return !w.resident }))
	for _, w := range absent {
		if w.missing == len(w.keys) && !w.resident {
			s.forget(s.groups[w.keys[0]])
		}
	}
}

// answered notes which ranks' parts are gone, of as many keys as were answered for: those ranks tell anew. It reports
// whether there are any.
func (w *watched) answered(there []bool) (lost bool) {
	for rank, ok := range there {
		if ok {
			continue
		}
		if lost = true; w.told[rank] {
			w.told[rank] = false
			w.missing++
		}
	}
	return lost
}

// publishLeft publishes the EVICTED of groups that are no longer watched.
func (s *Sweeper) publishLeft() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.emit(event.Evicted, slices.SortedFunc(maps.Values(s.leave), func(a, b *watched) int { return cmp.Compare(a.left, b.left) }))
	maps.DeleteFunc(s.leave, func(_ string, w *watched) bool { return !w.resident })
}

// emit publishes one batch, and notes what became resident or not.
func (s *Sweeper) emit(kind event.Kind, groups []*watched) {
	if len(groups) == 0 {
		return
	}
	b := event.Batch{Way: event.Live, Time: event.UnixTime(time.Now()), Rank: -1}
	for _, w := range groups {
		b.Events = append(b.Events, s.event(kind, &w.group))
	}
	if err := s.pub.Publish(&b); err != nil {
		s.stats.Dropped++
		return
	}
	for _, w := range groups {
		if w.resident == (kind == event.Stored) {
			continue
		}
		if w.resident = kind == event.Stored; w.resident {
			s.stats.Resident++
		} else {
			s.stats.Resident--
		}
	}
}

func (s *Sweeper) event(kind event.Kind, g *store.Group) event.Event {
	ev := event.Event{Kind: kind, Tier: event.Storage, Group: event.NoGroup, LoRAID: event.NoLoRAID, Blocks: make([]event.Block, len(g.Blocks))}
	for i, b := range g.Blocks {
		ev.Blocks[i] = event.Block{Hash: b.Hash, Prefix: b.Prefix, Copies: -1, Age: -1}
	}
	if kind == event.Stored {
		ev.HasParent, ev.Parent, ev.LoRA, ev.BlockSize = g.HasParent, g.Parent.Hash, g.LoRA, uint32(s.cfg.Block)
	}
	return ev
}
