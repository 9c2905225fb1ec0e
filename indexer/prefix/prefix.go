// Package prefix answers which source holds the longest prefix of a prompt, exactly: every block of the answer is
// resident where it says, and no longer prefix is.
//
// A forest is all prefixes of a model under one block size, each with the set of its owners. An owner is a shelf: the blocks of one
// source in one tier of one cache group, by what the engine calls them; it follows its publisher's judged stream. The
// index is fed by one goroutine and read by any number; a reader sees the state after some batch of each source, never a part of one.
package prefix

import (
	"fmt"
	"iter"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"kvstrata/event"
	"kvstrata/event/enginehash"
	"kvstrata/event/flat"
)

// Config says how the index hashes prompts and when it stops trusting a silent source.
type Config struct {
	// HashKey is the subscriber's: empty for the public scheme.
	HashKey string
	// MaxBytes bounds what blocks take, in bytes; 0 is no bound. Beyond it the index leaves out the blocks that were neither stored
	// nor matched for longest, about: their sources are partial until they are evicted.
	MaxBytes int64
	// StaleAfter is how long a source may go without a word from its publisher.
	StaleAfter time.Duration
	// Clock tells the time.
	Clock func() time.Time
	// Shard is the part of the range of prefix hashes that the index keeps; the zero value is all of it.
	Shard Shard
	// Models are those that it is asked for; none = all. The index keeps whatever it is fed with: who feeds it leaves others out.
	Models []string
	// Lookups tells what was asked; nil = nobody.
	Lookups *Teller
}

// DefaultConfig returns the configuration of an index of public hashes.
func DefaultConfig() Config { return Config{StaleAfter: time.Minute, Clock: time.Now} }

// Index is the prefix index. Safe for concurrent use, but for its feeding methods: Apply, Tell and Compared are one goroutine's;
// Restore may run beside them, and beside itself, for another source.
type Index struct {
	cfg     Config
	hasher  event.Hasher
	metrics metrics

	// mu is held while something changes. version is odd while Readers could see a part of it: a Reader does not wait for mu, and reads
	// again if version moved.
	mu      sync.RWMutex
	version atomic.Uint64

	memory  *memory
	pool    *flat.Pool
	owners  *ownerSets
	shelves atomic.Pointer[[]*shelf] // by id; number 0 is none
	models  atomic.Pointer[map[string]*model]

	sources     map[event.Source]*source
	byID        []*source
	lanes       uint32
	freeShelves []uint32
	seed        uint64
	hand        hand
	calls       uint64      // of wake
	farOver     atomic.Bool // the bound of memory is far behind
	swept       []*shelf    // no longer shown: their blocks are taken out piece by piece
	unswept     atomic.Bool // there are any
	tiers       []event.Tier
	hot         map[hotKey]*heat
	passed      uint64    // prefixes that were not admitted to hot, or were
	parents     []parent  // of the batch that is being applied
	touched     []*forest // that publish has something to do with
	disturbed   bool      // version is odd
	moving      bool      // some forest's chunks are leaving
	fetch       fetch
	mixing      mixing
	asked       asked
	service     service
}

// source is what is known of one source.
type source struct {
	id      uint32
	name    event.Source
	model   *model
	groups  []*group
	told    []event.GroupInfo // what each cache group was last seen to be
	tiers   []uint16          // that it named, in order of appearance
	digest  event.Digest
	epoch   event.Epoch
	fence   event.Fence
	started bool
	seq     event.Seq
	doubt   string // why the blocks may not be its publisher's; empty = they are
	recipe  enginehash.Recipe

	status    event.Status
	spoken    bool      // status is its publisher's own word
	toldAt    time.Time // by our clock
	lag       time.Duration
	hasLag    bool
	appliedAt time.Time
	blocks    uint64 // block operations applied
	leftOut   uint64 // copies that had no room
	totals    Totals
	agreed    uint64 // digests
	differed  uint64
	lastAgree bool
	reshaped  bool  // groups or shelves came or changed since crooked was found out
	crooked   bool  // left to Lookup by Readers
	story     story // for the service

	// What Readers look at.
	answers atomic.Bool  // but for silence
	heard   atomic.Int64 // Unix ns of the last word of its publisher
}

// group is a cache group of a source: its blocks, by tier and by how they are cut.
type group struct {
	group   event.Group
	index   uint32
	lane    uint32 // its number among all groups of all sources
	shelves []*shelf

	incoming bool // a checkpoint's that is being read: its shelves are not shown yet
}

// model is every block of one model, by how its prompts are cut.
type model struct {
	name       string
	forests    atomic.Pointer[[]*forest]
	sources    []*source
	connectors []*source    // in order of appearance: their statuses name stores
	crooked    atomic.Int32 // sources that a Reader leaves to Lookup
}

// variant is one way of cutting a prompt into blocks.
type variant struct {
	blockSize uint32
	eagle     bool
}

// New returns an empty index.
func New(cfg Config) *Index {
	x := &Index{
		cfg: cfg, hasher: event.NewHasher(cfg.HashKey), metrics: newMetrics(), owners: newOwnerSets(), seed: rand.Uint64(),
		mixing:  mixing{mixer: event.NewMixer(0, "")},
		sources: make(map[event.Source]*source), hot: make(map[hotKey]*heat),
	}
	x.memory = newMemory(x)
	x.hand.oldest = maxAge + 1
	x.pool = flat.NewPool(x.memory.take)
	x.shelves.Store(&[]*shelf{nil})
	x.models.Store(&map[string]*model{})
	return x
}

// begin begins a change, and end ends it. Readers see all of it or nothing. Who holds which block is prepared apart, and shown at the
// end; what changes anything else that Readers look at calls disturb before.
func (x *Index) begin() {
	x.mu.Lock()
	if x.moving {
		x.disturb()
	}
}

func (x *Index) end() {
	x.publish()
	x.mu.Unlock()
}

// disturb keeps Readers away until the change ends.
func (x *Index) disturb() {
	if !x.disturbed {
		x.disturbed = true
		x.version.Add(1)
	}
}

// publish shows Readers what changed.
func (x *Index) publish() {
	if len(x.touched) == 0 && !x.disturbed {
		return
	}
	x.disturb()
	for _, f := range x.touched {
		f.commit()
	}
	x.disturbed = false
	x.version.Add(1)
	for _, f := range x.touched {
		f.reap()
	}
	x.touched = x.touched[:0]
	x.owners.reap()
}

// touch notes that something in a forest is to be published.
func (x *Index) touch(f *forest) {
	if n := len(x.touched); n > 0 && x.touched[n-1] == f || slices.Contains(x.touched, f) {
		return
	}
	x.touched = append(x.touched, f)
}

// source returns a source's entry, made at its first appearance. The caller holds the write lock.
func (x *Index) source(name event.Source) *source {
	if s := x.sources[name]; s != nil {
		return s
	}
	m := x.model(name.Model)
	s := &source{
		id: uint32(len(x.byID)), name: name, model: m, toldAt: x.cfg.Clock(),
		status: event.Status{Source: name, State: event.StateRecovering, Reason: "nothing told yet"},
	}
	x.sources[name] = s
	x.byID = append(x.byID, s)
	m.sources = append(m.sources, s)
	if name.Origin == event.Connector {
		m.connectors = append(m.connectors, s)
	}
	x.refresh(s)
	return s
}

// model returns a model's entry, made at its first appearance.
func (x *Index) model(name string) *model {
	all := *x.models.Load()
	if m := all[name]; m != nil {
		return m
	}
	m := &model{name: name}
	m.forests.Store(new([]*forest))
	more := maps.Clone(all)
	more[name] = m
	x.models.Store(&more)
	return m
}

// forest returns the blocks that are cut in one way, nil when there are none.
func (m *model) forest(cut variant) *forest {
	for _, f := range *m.forests.Load() {
		if f.cut == cut {
			return f
		}
	}
	return nil
}

// forest returns the blocks of a model that are cut in one way.
func (x *Index) forest(m *model, cut variant) *forest {
	if f := m.forest(cut); f != nil {
		return f
	}
	f := newForest(cut, x.memory, x.seed, x.renumber)
	f.dense, f.always = !x.cfg.Shard.Whole(), !x.cfg.Shard.Whole() // a shard is not asked along whole prompts
	more := append(slices.Clone(*m.forests.Load()), f)
	m.forests.Store(&more)
	return f
}

// group returns a source's entry of a cache group, made at its first appearance; nil for one too many.
func (x *Index) group(s *source, told event.Group) *group {
	if g := s.group(told); g != nil {
		return g
	}
	if len(s.groups) == maxGroups {
		return nil
	}
	g := &group{group: told, index: told.Index(), lane: x.lanes}
	x.lanes++
	s.groups = append(s.groups, g)
	return g
}

// group returns a cache group that some block was told of, nil when there was none.
func (s *source) group(told event.Group) *group {
	for _, g := range s.groups {
		if g.index == told.Index() {
			return g
		}
	}
	return nil
}

// holders returns the shelves that have a block, which has to be in the table.
func (x *Index) holders(f *forest, p event.PrefixHash) []*shelf {
	if f == nil {
		return nil
	}
	return x.holdersOf(f, f.table.find(p, f))
}

// holdersOf returns the shelves that have the block of a number; none for 0.
func (x *Index) holdersOf(f *forest, id uint32) []*shelf {
	if id == 0 {
		return nil
	}
	shelves := *x.shelves.Load()
	var holders []*shelf
	for _, n := range x.owners.at(f.owners(id)).shelves {
		if h := shelves[n]; h.shown.Load() {
			holders = append(holders, h)
		}
	}
	return holders
}

// shelf returns the shelf of a group's blocks in a tier, made at its first block.
func (x *Index) shelf(s *source, g *group, tier uint16, f *forest) *shelf {
	for _, h := range g.shelves {
		if h.tier == tier && h.forest == f {
			return h
		}
	}
	h := x.newShelf(s, g, tier, f)
	h.shown.Store(!g.incoming)
	g.shelves = append(g.shelves, h)
	s.reshaped = true
	return h
}

// tier numbers a tier's name. A source names few, and so does an index of many sources.
func (x *Index) tier(name event.Tier) uint16 {
	if i := slices.Index(x.tiers, name); i >= 0 {
		return uint16(i)
	}
	x.tiers = append(x.tiers, name)
	return uint16(len(x.tiers) - 1)
}

// Tell takes what a source's publisher says of it.
func (x *Index) Tell(st *event.Status) {
	x.begin()
	s := x.source(st.Source)
	if st.HashScheme != s.status.HashScheme || st.HashSeed != s.status.HashSeed || s.recipe.Scheme == 0 {
		s.recipe = recipeOf(st)
		s.reshaped = true
	}
	s.status, s.spoken, s.toldAt = *st, true, x.cfg.Clock()
	if st.Withdrawn && st.Epoch > s.epoch { // nothing may follow that would replace what the dead life held
		x.reset(s)
		s.epoch, s.started, s.seq, s.doubt = st.Epoch, false, 0, ""
	}
	x.refresh(s)
	x.told(s)
	x.end()
	x.tidy(0)
}

// Compared notes whether a digest sent with the stream was this index's own. Where it was not, the source is left out
// of lookups, until Restore or a new life.
func (x *Index) Compared(name event.Source, agreed bool) {
	x.begin()
	defer x.end()
	s := x.source(name)
	defer x.told(s)
	s.lastAgree = agreed
	if agreed {
		s.agreed++
		s.doubt = ""
	} else {
		s.differed++
		s.doubt = "the digest differs from its publisher's"
	}
	x.refresh(s)
}

// refresh brings what Readers look at up to date. The caller holds the write lock.
func (x *Index) refresh(s *source) {
	if answers := s.status.State.Answers() && s.doubt == "" && !s.isDead(); answers != s.answers.Load() {
		x.disturb()
		s.answers.Store(answers)
	}
	s.heard.Store(max(s.toldAt.UnixNano(), s.appliedAt.UnixNano()))
	if !s.reshaped {
		return
	}
	s.reshaped = false
	if crooked := s.isCrooked(); crooked != s.crooked {
		x.disturb()
		s.crooked = crooked
		if crooked {
			s.model.crooked.Add(1)
		} else {
			s.model.crooked.Add(-1)
		}
	}
}

// isCrooked reports whether more decides how much of a prompt a source holds than one cache group's blocks with names.
func (s *source) isCrooked() bool {
	holding := 0
	for _, g := range s.told {
		if g.Spec.HoldsPrefix() && g.BlockSize > 0 {
			holding++
		}
	}
	if holding > 1 || len(s.told) > 1 {
		return true
	}
	for _, g := range s.groups {
		for _, h := range g.shelves {
			if h.forest == nil {
				if s.recipe.Scheme != 0 {
					return true
				}
				continue
			}
			if holding == 0 || s.told[0].Group.Index() != g.index || h.forest.cut != (variant{s.told[0].BlockSize, s.told[0].Eagle}) {
				return true
			}
		}
	}
	return false
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
	if s.leftOut > 0 && s.status.State == event.StateLive {
		return event.StatePartial, fmt.Sprintf("%d copies had no room within the index's bound of memory", s.leftOut)
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
		for e := range s.entries(x) {
			if !yield(&e) {
				return
			}
		}
	}
}

// entries yields a source's blocks.
func (s *source) entries(x *Index) iter.Seq[event.Entry] {
	return func(yield func(event.Entry) bool) {
		for _, g := range s.groups {
			for _, h := range g.shelves {
				for hash, id := range h.each {
					if !yield(x.entry(h, hash, id)) {
						return
					}
				}
			}
		}
	}
}

// entry returns what is known of a block on a shelf.
func (x *Index) entry(h *shelf, hash event.BlockHash, id uint32) event.Entry {
	e := event.Entry{Hash: hash, Group: h.group, Tier: x.tiers[h.tier], Copies: 1 + h.extra[hash]}
	if h.forest != nil {
		e.Prefix, e.BlockSize, e.Eagle = h.forest.prefix(id), h.forest.cut.blockSize, h.forest.cut.eagle
	}
	return e
}

// named returns where a group has a block under a name.
func (g *group) named(hash event.BlockHash) (h *shelf, id uint32) {
	for _, h := range g.shelves {
		if h.forest == nil {
			continue
		}
		if id := h.get(hash); id != 0 {
			return h, id
		}
	}
	return nil, 0
}
