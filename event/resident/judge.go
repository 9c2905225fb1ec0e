package resident

import (
	"fmt"
	"slices"

	"kvstrata/event"
)

// oddity is a way in which a source breaks the contract, or in which we cannot follow it.
type oddity int

const (
	evictedAbsent oddity = iota
	parentUnknown
	blockSizeDiffers
	tokensDiffer
	nameDiffers
	seedDiffers
	orphansFull
	tiersFull
	numOddities
)

var oddityNames = [numOddities]string{
	evictedAbsent:    "evicted_absent_block",
	parentUnknown:    "parent_unknown",
	blockSizeDiffers: "block_size_differs_from_parent",
	tokensDiffer:     "tokens_do_not_fill_blocks",
	nameDiffers:      "hash_names_two_prefixes",
	seedDiffers:      "parent_has_other_seed",
	orphansFull:      "orphans_over_bound",
	tiersFull:        "tiers_over_bound",
}

// OddityNames returns the names of everything that Oddities can count.
func OddityNames() []string { return slices.Clone(oddityNames[:]) }

// note counts an oddity, and keeps the block of the first one as the example.
func (s *Set) note(o oddity, b *event.Batch, h event.BlockHash) {
	c := &s.oddities[o]
	if c.Count++; c.Count == 1 {
		c.Example = fmt.Sprintf("block %v in batch %d", h, b.First)
	}
}

// Judge takes what an engine told and fills in, in place, what its publisher owes consumers: each block's effect and
// prefix hash, the run's seed, and for what was evicted the copies left and the age. Where the batch makes the parent
// of earlier blocks known, it appends STORED events of effect 0 that give those blocks their names; the memory of these
// is valid until the next call.
func (s *Set) Judge(b *event.Batch) {
	s.named, s.told = s.named[:0], s.told[:0]
	s.ahead.left = 0
	for i := 0; i < len(b.Events); i++ {
		if b.Events[i].Kind == event.Evicted && b.Events[i].Tier == event.AnyTier {
			s.placeEvicted(b, i)
		}
		switch b.Events[i].Kind {
		case event.Stored:
			s.judgeStored(b, i)
		case event.Evicted:
			s.judgeEvicted(b, i)
		case event.Loaded:
			s.nameLoaded(b, i)
		case event.Cleared:
			s.Clear()
		}
	}
	s.nameOrphans(b)
	if len(s.told) > 0 {
		s.appendNames(b)
	}
}

// chain is where a STORED run stands: how its blocks are to be hashed.
type chain struct {
	hashable bool // the run brings tokens that fill its blocks
	rooted   bool // parent is known, or the run is a root
	parent   event.PrefixHash
	seed     uint64 // of local hashes
	sealed   uint64 // the same, as records and streams have it
	size     int    // tokens a block
	window   int    // tokens a local hash covers
}

func (s *Set) chainOf(b *event.Batch, ev *event.Event) chain {
	c := chain{size: int(ev.BlockSize), window: int(ev.BlockSize)}
	if ev.Eagle {
		c.window++
	}
	told := len(ev.Locals) > 0 && len(ev.Locals) == len(ev.Blocks) && c.size > 0
	if len(ev.Blocks) == 0 || len(ev.Tokens) == 0 && !told {
		return c
	}
	// Of a group that does not keep whole prefixes, a run may be told with the tokens of blocks that it leaves out, and below
	// a parent that it never told.
	whole := ev.Spec.HoldsPrefix()
	if want := (len(ev.Blocks)-1)*c.size + c.window; !told && (c.size == 0 || len(ev.Tokens) != want) {
		if whole {
			s.note(tokensDiffer, b, ev.Blocks[0].Hash)
		}
		return c
	}
	c.hashable = true
	if !ev.HasParent {
		c.rooted = true
		c.seed = s.cfg.Hasher.Seed(ev.LoRA, ev.Salt)
		c.sealed = s.cfg.Hasher.Seal(c.seed)
		return c
	}
	if i := s.find(&ev.Parent, ev.Group.Index()); i >= 0 {
		r := s.slab.at(i)
		prefix := r.prefix()
		if prefix != 0 && !r.fits(ev) {
			s.note(blockSizeDiffers, b, ev.Blocks[0].Hash)
			c.hashable = false
			return c
		}
		if prefix != 0 {
			c.rooted, c.parent, c.sealed = true, prefix, r.seed
			c.seed = s.cfg.Hasher.Open(r.seed)
			return c
		}
	}
	// The salt is told with the root only: what is assumed here is checked when the parent is known.
	if whole {
		s.note(parentUnknown, b, ev.Blocks[0].Hash)
	}
	c.seed = s.cfg.Hasher.Seed(ev.LoRA, ev.Salt)
	c.sealed = s.cfg.Hasher.Seal(c.seed)
	return c
}

// fits reports whether a run can continue a record's chain.
func (r *record) fits(ev *event.Event) bool {
	return r.blockSize == ev.BlockSize && (r.flags&recEagle != 0) == ev.Eagle
}

func (s *Set) judgeStored(b *event.Batch, e int) {
	ev := &b.Events[e]
	s.noteGroup(ev)
	tier, ok := s.addTier(ev.Tier)
	if !ok && len(ev.Blocks) > 0 {
		s.note(tiersFull, b, ev.Blocks[0].Hash)
	}
	counts := ok && ev.Locality.Here() // blocks elsewhere are another source's
	c := s.chainOf(b, ev)
	if c.hashable {
		ev.Seed, ev.Unrooted = c.sealed, !c.rooted
	}
	group, m := ev.Group.Index(), s.mixer(tier, ev.Group)
	for i := range ev.Blocks {
		s.next(b, e, i)
		bl := &ev.Blocks[i]
		var at int32
		var r *record // nil for none
		if counts {
			at, r = s.record(&bl.Hash, group)
		} else if at = s.find(&bl.Hash, group); at >= 0 {
			r = s.slab.edit(at)
		}
		switch {
		case c.hashable:
			s.hashBlock(b, ev, &c, i, at, r)
		case bl.Prefix != 0 && r != nil && !ev.Unrooted:
			s.nameBlock(b, ev, i, at, r, ev.Seed) // a store's watcher reads the name with the block
		case r != nil && r.prefix() != 0:
			s.told = append(s.told, at) // a placeholder says nothing of the chain: a run of its own does
		}
		if counts && !(s.cfg.AsSet && s.slab.copies(at, r, tier) > 0) {
			bl.Effect = +1
			s.rise(at, r, bl.Hash, tier, m, b.Time)
		}
	}
}

// local returns the local hash of block i of a run.
func (c *chain) local(ev *event.Event, i int) uint64 {
	if len(ev.Locals) > 0 {
		return ev.Locals[i]
	}
	seed := c.seed
	if i < len(ev.Terms) {
		seed += ev.Terms[i]
	}
	return event.LocalHash(ev.Tokens[i*c.size:i*c.size+c.window], seed)
}

// hashBlock names block i of a run, or keeps its local hash until its parent is named. r is its record, nil for none.
func (s *Set) hashBlock(b *event.Batch, ev *event.Event, c *chain, i int, at int32, r *record) {
	bl := &ev.Blocks[i]
	local := c.local(ev, i)
	if c.rooted {
		c.parent = event.Chain(c.parent, local)
		bl.Prefix = c.parent
		if r != nil {
			s.nameBlock(b, ev, i, at, r, c.sealed)
		}
		return
	}
	bl.Prefix = event.PrefixHash(local)
	switch {
	case r == nil:
	case r.prefix() != 0:
		s.named = append(s.named, at) // known from before: its children can have their names
		s.told = append(s.told, at)
	case r.flags&recLocal == 0:
		s.describe(at, r, ev, i, c.sealed)
		if !s.wait(at, r, local) {
			s.note(orphansFull, b, bl.Hash)
		}
	}
}

// nameBlock enters the name that block i of a run has got.
func (s *Set) nameBlock(b *event.Batch, ev *event.Event, i int, at int32, r *record, seed uint64) {
	bl := &ev.Blocks[i]
	switch had := r.prefix(); {
	case had == 0:
		s.describe(at, r, ev, i, seed)
		r.name = uint64(bl.Prefix)
		if len(s.waiting) > 0 {
			s.named = append(s.named, at)
		}
	case had != bl.Prefix:
		// The first name stays, so that what rose under it falls under it.
		s.note(nameDiffers, b, bl.Hash)
		bl.Prefix = 0
		s.told = append(s.told, at)
	}
}

// describe enters in a record what a run tells of its block i.
func (s *Set) describe(at int32, r *record, ev *event.Event, i int, seed uint64) {
	if r.flags&recLocal != 0 { // told before by a run without a root; forget where it stood
		s.unwait(at, r)
	}
	r.seed, r.blockSize = seed, ev.BlockSize
	r.flags &^= recParent | recEagle
	if ev.Eagle {
		r.flags |= recEagle
	}
	switch {
	case i > 0:
		s.slab.setParent(at, r, &ev.Blocks[i-1].Hash)
	case ev.HasParent:
		s.slab.setParent(at, r, &ev.Parent)
	}
}

func (s *Set) judgeEvicted(b *event.Batch, e int) {
	ev := &b.Events[e]
	tier, known := s.tierNumber(ev.Tier)
	group, here := ev.Group.Index(), ev.Locality.Here()
	var m *event.Mixer
	if known {
		m = s.mixer(tier, ev.Group)
	}
	for i := range ev.Blocks {
		s.next(b, e, i)
		bl := &ev.Blocks[i]
		bl.Copies, bl.Age = -1, -1
		at := s.find(&bl.Hash, group)
		var r *record // nil for none
		if at >= 0 {
			r = s.slab.at(at)
			bl.Prefix = r.prefix()
		}
		if !here {
			continue
		}
		if r == nil || !known || s.slab.copies(at, r, tier) == 0 {
			s.note(evictedAbsent, b, bl.Hash)
			continue
		}
		bl.Effect = -1
		left, stored := s.fall(at, s.slab.edit(at), bl.Hash, tier, m)
		if !s.cfg.AsSet {
			bl.Copies = int32(min(left, 1<<31-1))
		}
		bl.Age = event.Age(stored, b.Time)
	}
}

// placeEvicted fills in the tier of an EVICTED that names none. A run that lies in several is cut: the rest follows it.
func (s *Set) placeEvicted(b *event.Batch, at int) {
	ev := &b.Events[at]
	for i := range ev.Blocks {
		tier := s.whereabouts(&ev.Blocks[i].Hash, ev.Group)
		switch {
		case i == 0:
			ev.Tier = tier
		case tier != ev.Tier:
			rest := *ev
			rest.Tier, rest.Blocks = event.AnyTier, ev.Blocks[i:]
			ev.Blocks = ev.Blocks[:i]
			b.Events = slices.Insert(b.Events, at+1, rest)
			return
		}
	}
	if len(ev.Blocks) == 0 {
		ev.Tier = event.GPU
	}
}

// whereabouts returns the tier in which a block has a copy, GPU when it has none.
func (s *Set) whereabouts(h *event.BlockHash, g event.Group) event.Tier {
	if at := s.find(h, g.Index()); at >= 0 && s.slab.at(at).resident() {
		return s.tiers[s.slab.at(at).first.tier].Tier
	}
	return event.GPU
}

// nameLoaded fills in the names that the blocks of a LOADED have.
func (s *Set) nameLoaded(b *event.Batch, e int) {
	ev := &b.Events[e]
	for i := range ev.Blocks {
		s.next(b, e, i)
		bl := &ev.Blocks[i]
		if at := s.find(&bl.Hash, ev.Group.Index()); at >= 0 && bl.Prefix == 0 {
			bl.Prefix = s.slab.at(at).prefix()
		}
	}
}

// nameOrphans gives the blocks that waited for the records in s.named, and their descendants, their names.
func (s *Set) nameOrphans(b *event.Batch) {
	for n := 0; n < len(s.named); n++ {
		parent := *s.slab.at(s.named[n])
		if parent.prefix() == 0 { // forgotten since, within this batch
			continue
		}
		k := key{s.slab.hash(s.named[n]), parent.group}
		list := s.waiting[k]
		delete(s.waiting, k)
		s.orphans -= len(list)
		for _, i := range list {
			r := s.slab.edit(i)
			local := r.name
			r.name, r.flags = 0, r.flags&^recLocal
			if r.seed != parent.seed || r.blockSize != parent.blockSize || (r.flags^parent.flags)&recEagle != 0 {
				s.note(seedDiffers, b, s.slab.hash(i))
				continue
			}
			r.name = uint64(event.Chain(parent.prefix(), local))
			s.named = append(s.named, i)
			s.told = append(s.told, i)
		}
	}
}

// appendNames appends STORED events of effect 0 that tell the names of the records in s.told, a run where they are a
// chain.
func (s *Set) appendNames(b *event.Batch) {
	s.room = slices.Grow(s.room[:0], len(s.told))
	seen := make(map[int32]bool, len(s.told))
	blocks := s.room
	var run *event.Event
	for _, i := range s.told {
		r := s.slab.at(i)
		if seen[i] || r.prefix() == 0 {
			continue
		}
		seen[i] = true
		tier := event.GPU
		if r.resident() {
			tier = s.tiers[r.first.tier].Tier
		}
		continues := run != nil && run.Tier == tier && run.Group.Index() == r.group && r.flags&recParent != 0 &&
			r.seed == run.Seed && run.Blocks[len(run.Blocks)-1].Hash == s.slab.parent(i)
		if !continues {
			b.Events = append(b.Events, event.Event{
				Kind: event.Stored, Tier: tier, Group: s.groupAsTold(r.group), LoRAID: event.NoLoRAID, Seed: r.seed,
				BlockSize: r.blockSize, Eagle: r.flags&recEagle != 0, HasParent: r.flags&recParent != 0, Parent: s.slab.parent(i),
			})
			run = &b.Events[len(b.Events)-1]
			s.describeGroup(run)
			s.noteGroup(run) // as its followers will
			run.Blocks = blocks[len(blocks):len(blocks):cap(blocks)]
		}
		blocks = append(blocks, event.Block{Hash: s.slab.hash(i), Prefix: r.prefix(), Copies: -1, Age: -1})
		run.Blocks = run.Blocks[:len(run.Blocks)+1]
	}
}

// groupAsTold returns a group as its source names it: with a number, or with none.
func (s *Set) groupAsTold(index uint32) event.Group {
	for i := range s.groups {
		if s.groups[i].Group.Index() == index {
			return s.groups[i].Group
		}
	}
	return event.Group(index)
}

func (s *Set) describeGroup(ev *event.Event) {
	for i := range s.groups {
		if s.groups[i].Group == ev.Group {
			ev.Spec, ev.Window = s.groups[i].Spec, s.groups[i].Window
		}
	}
}
