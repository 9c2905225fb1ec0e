package prefix

import (
	"context"
	"fmt"
	"slices"
	"time"
	"unsafe"

	"kvstrata/event"
	"kvstrata/event/flat"
	"kvstrata/event/resident"
)

// What one source may bring, as its judge's bounds are, and how many ways of cutting a model may have.
const (
	maxTiers   = 64
	maxGroups  = 64
	maxForests = 256
)

// Apply adds consecutive batches of one life of a source, and returns its digest afterwards. After a batch that does not fit the
// source is left out of lookups, until Restore or a new life.
func (x *Index) Apply(_ context.Context, m *event.Message) (event.Digest, error) {
	s := x.enter(m)
	for i := range m.Batches {
		b := &m.Batches[i]
		x.begin()
		x.reading(s, b)
		err := x.applyBatch(s, b)
		if err != nil {
			s.doubt = err.Error()
		}
		if i == len(m.Batches)-1 || err != nil {
			x.refresh(s)
		}
		x.publish()
		if i == len(m.Batches)-1 || err != nil {
			x.told(s)
		}
		if err == nil {
			x.heatUp(s.appliedAt)
			s.totals.add(b)
		}
		x.mu.Unlock()
		if err != nil {
			return 0, err
		}
		x.tidy(2 * b.Blocks())
	}
	if last := m.Batches[len(m.Batches)-1]; last.Received != 0 {
		x.metrics.lag.Observe(x.late(s, last.Received).Seconds())
	}
	return s.digest, nil
}

// enter returns the source of a message, in the life that the message belongs to.
func (x *Index) enter(m *event.Message) *source {
	x.begin()
	defer x.end()
	s := x.source(m.Source)
	if m.Epoch != s.epoch {
		x.reset(s)
		s.epoch, s.started, s.seq, s.doubt = m.Epoch, false, 0, ""
	}
	s.fence = m.Fence
	x.told(s)
	s.appliedAt = x.cfg.Clock()
	return s
}

func (x *Index) applyBatch(s *source, b *event.Batch) error {
	if s.started && b.First != s.seq+1 {
		return fmt.Errorf("apply batch %d: it does not follow %d", b.First, s.seq)
	}
	x.fetch = fetch{lines: x.fetch.lines}
	x.parents = x.parents[:0]
	for i := range b.Events {
		ev := &b.Events[i]
		var err error
		switch ev.Kind {
		case event.Stored:
			err = x.applyStored(s, b, ev)
		case event.Evicted:
			err = x.applyEvicted(s, b, ev)
		case event.Cleared:
			x.clear(s)
		}
		if err != nil {
			return err
		}
	}
	s.started, s.seq = true, b.Last
	s.blocks += uint64(b.Blocks())
	return nil
}

// late notes how long after its reception by the subscriber a batch was applied.
func (x *Index) late(s *source, received event.Time) time.Duration {
	x.mu.Lock()
	defer x.mu.Unlock()
	s.lag, s.hasLag = s.appliedAt.Sub(received.Std()), true
	return s.lag
}

// ahead is how many blocks' misses overlap at a time: what is fetched has to stay in the nearest cache until it is used.
const ahead = 64

// fetch goes before the blocks of a batch, event after event, and has fetched what applying the next ones will look at first.
type fetch struct {
	lines []unsafe.Pointer
	event int // from which on nothing is fetched yet
	block int // of that event
	left  int // blocks that are fetched and not applied yet
}

// next is called before each block of a STORED or EVICTED is applied.
func (f *fetch) next(s *source, b *event.Batch) {
	if f.left--; f.left >= 0 {
		return
	}
	f.lines, f.left = f.lines[:0], 0
	for ; f.left < ahead && f.event < len(b.Events); f.event, f.block = f.event+1, 0 {
		ev := &b.Events[f.event]
		if ev.Kind != event.Stored && ev.Kind != event.Evicted {
			continue
		}
		n := min(ahead-f.left, len(ev.Blocks)-f.block)
		if g := s.group(ev.Group); g != nil && len(g.shelves) > 0 {
			f.lines = g.shelves[0].appendLines(f.lines, ev, f.block, n)
		}
		f.left += n
		if f.block += n; f.block < len(ev.Blocks) {
			break
		}
	}
	flat.Prefetch(f.lines)
	f.left--
}

// appendLines appends what applying n blocks of a run, and its beginning, will look at first.
func (h *shelf) appendLines(lines []unsafe.Pointer, ev *event.Event, from, n int) []unsafe.Pointer {
	if hash, ok := ev.Parent.Int(); ok && from == 0 && ev.HasParent {
		lines = h.blocks.AppendLines(lines, hash)
	}
	for i := range ev.Blocks[from : from+n] {
		b := &ev.Blocks[from+i]
		if hash, ok := b.Hash.Int(); ok {
			lines = h.blocks.AppendLines(lines, hash)
		}
		if h.forest != nil && (h.forest.dense || ev.Kind == event.Stored) {
			lines = h.forest.table.appendLine(lines, b.Prefix)
		}
	}
	return lines
}

func (x *Index) applyStored(s *source, b *event.Batch, ev *event.Event) error {
	news := resident.NoteGroup(&s.told, ev)
	s.reshaped = s.reshaped || news
	r := run{index: x, source: s, group: x.group(s, ev.Group), cut: variant{ev.BlockSize, ev.Eagle}, before: unknownBefore}
	if reason := r.overBound(); reason != "" {
		return &resident.InvariantError{Seq: b.First, Hash: ev.Parent, Reason: reason}
	}
	r.told, r.groups = s.told, s.groups
	r.describe()
	if news {
		r.adopt()
	}
	if !ev.HasParent {
		r.begins()
	} else if h, id := r.group.named(ev.Parent); h != nil {
		r.goesOn(h.forest, id)
		if len(ev.Blocks) > 0 && ev.Blocks[0].Effect != 0 {
			key := hotKey{s.model, h.forest.prefix(id), h.forest.cut}
			x.parents = append(x.parents, parent{key, uint32(h.forest.depth(id)), h.forest, id})
		}
	}
	r.mixer = x.mixer(ev.Group, ev.Tier)
	for i := range ev.Blocks {
		bl := &ev.Blocks[i]
		x.fetch.next(s, b)
		prefix := bl.Prefix
		if ev.Unrooted {
			prefix = 0
		}
		depth, isTold := r.depth, prefix != 0
		if !isTold {
			if prefix = r.borrowed(bl.Hash); prefix != 0 {
				r.depth = 0 // a run without a name tells no depth
			}
		}
		r.id = 0
		if prefix != 0 && !x.cfg.Shard.Holds(prefix) { // another index's, of which only the digest is this one's, too
			r.drop(bl.Hash)
			if bl.Effect > 0 {
				s.digest += r.mixer.Mix64(bl.Hash)
			}
		} else if bl.Effect > 0 {
			if err := r.rise(b, ev, bl.Hash, prefix); err != nil {
				return err
			}
		} else if prefix != 0 {
			r.name(bl.Hash, prefix)
		}
		r.lend(bl.Hash)
		r.depth, r.before, r.known = deeper(depth), unknownBefore, 0
		if isTold && i+1 < len(ev.Blocks) {
			r.passed(bl.Hash, prefix)
		}
	}
	return nil
}

// deeper returns the depth of a block whose parent has one; 0 is unknown.
func deeper(depth uint16) uint16 {
	if depth == 0 || depth == 1<<16-1 {
		return 0
	}
	return depth + 1
}

// run is where a STORED run, or a row of a checkpoint, stands.
type run struct {
	index  *Index
	source *source
	group  *group
	cut    variant
	depth  uint16  // of the next block; 0 = unknown
	before uint32  // number of the block that the next one continues, or what else is known of that
	known  uint32  // number of the next block, where that is known; 0 = unknown
	id     uint32  // number of the block that was entered last
	forest *forest // of the cut

	tier    uint16 // that it is stored in
	hasTier bool
	mixer   *event.Mixer      // of the group and the tier
	told    []event.GroupInfo // of the source
	groups  []*group          // of the source, as they are filled
	borrows bool              // blocks without a name take the one that another group has for them
	lends   bool              // another group takes names over
}

// overBound says what there is too much of for the run, if anything.
func (r *run) overBound() string {
	if r.group == nil {
		return "more cache groups than a source may have"
	}
	if m := r.source.model; len(*m.forests.Load()) >= maxForests && m.forest(r.cut) == nil {
		return "more ways of cutting prompts than a model may have"
	}
	return ""
}

// begins notes that the next block has no parent. A store's blocks are told one by one, without the parents that they have.
func (r *run) begins() {
	r.depth, r.before = 1, nothingBefore
	if r.source.name.Origin != event.Engine {
		r.before = unknownBefore
	}
}

// goesOn notes what the next block continues.
func (r *run) goesOn(f *forest, id uint32) {
	r.depth = deeper(f.depth(id))
	if f.cut == r.cut {
		r.before = id
	}
}

// passed notes that a block of the run was applied, which the next one continues.
func (r *run) passed(hash event.BlockHash, prefix event.PrefixHash) {
	f, id := r.forest, r.id
	if id == 0 {
		var h *shelf
		if h, id = r.group.named(hash); h == nil {
			return
		}
		f = h.forest
	}
	if f.cut == r.cut && f.prefix(id) == prefix {
		r.before = id
	}
}

// here returns the forest of the run's own cut.
func (r *run) here() *forest {
	if r.forest == nil {
		r.forest = r.index.forest(r.source.model, r.cut)
	}
	return r.forest
}

// enter returns the number of the next block.
func (r *run) enter(prefix event.PrefixHash) uint32 {
	f := r.here()
	if r.known != 0 {
		r.id = f.again(f.resolve(r.known))
	} else {
		r.id = f.enter(prefix, r.before, r.depth)
	}
	return r.id
}

// rise adds a copy of a block to a tier, with a name unless that is 0.
func (r *run) rise(b *event.Batch, ev *event.Event, hash event.BlockHash, prefix event.PrefixHash) error {
	if !r.hasTier {
		if r.tier, r.hasTier = r.index.tierOf(r.source, ev.Tier); !r.hasTier {
			return &resident.InvariantError{Seq: b.First, Hash: hash, Reason: "more tiers than a source may have"}
		}
	}
	r.source.digest += r.mixer.Mix64(hash)
	r.add(r.tier, hash, prefix)
	return nil
}

// add adds a copy of a block to a tier.
func (r *run) add(tier uint16, hash event.BlockHash, prefix event.PrefixHash) {
	g := r.group
	if len(g.shelves) == 1 && prefix != 0 {
		h := g.shelves[0]
		if n, isInt := hash.Int(); isInt && h.tier == tier && h.forest == r.here() {
			id := h.blocks.Entry(n)
			if *id != 0 {
				r.id = h.forest.resolve(*id)
				h.again(hash, 1)
				return
			}
			*id = r.enter(prefix)
			h.copies++
			r.index.join(h, *id)
			r.index.went(rose, h, hash, *id)
			return
		}
	}
	if prefix != 0 {
		r.name(hash, prefix)
	}
	var f *forest
	id := uint32(unnamedBlock)
	for _, h := range g.shelves { // the first name stays
		if at := h.get(hash); at == 0 {
			continue
		} else if h.tier == tier {
			h.again(hash, 1)
			return
		} else {
			f, id = h.forest, at
			prefix = 0
		}
	}
	if prefix != 0 {
		f, id = r.here(), r.enter(prefix)
	}
	if f != nil && f.moving && f.chunk(id).leaving { // the hand may have passed the shelf that it is put on
		id = f.move(id)
	}
	h := r.index.shelf(r.source, g, tier, f)
	h.put(hash, id)
	if f != nil {
		r.index.join(h, id)
	}
	r.index.went(rose, h, hash, id)
}

// name gives a block that has none a name, in every tier that it lies in.
func (r *run) name(hash event.BlockHash, prefix event.PrefixHash) {
	for _, h := range r.group.shelves {
		if h.forest != nil || h.get(hash) == 0 {
			continue
		}
		more := h.extra[hash]
		delete(h.extra, hash)
		h.copies -= uint64(more)
		h.take(hash)
		to := r.index.shelf(r.source, r.group, h.tier, r.here())
		id := r.enter(prefix)
		to.put(hash, id)
		to.again(hash, more)
		r.index.join(to, id)
		r.index.went(named, to, hash, id)
	}
}

// drop takes a block away that turns out to be another index's.
func (r *run) drop(hash event.BlockHash) {
	for _, h := range r.group.shelves {
		if h.forest == nil {
			for h.fewer(hash) {
			}
			if h.take(hash) != 0 {
				r.index.went(fell, h, hash, unnamedBlock)
			}
		}
	}
}

func (x *Index) applyEvicted(s *source, b *event.Batch, ev *event.Event) error {
	g := s.group(ev.Group)
	tier, mixer := slices.Index(x.tiers, ev.Tier), x.mixer(ev.Group, ev.Tier)
	for i := range ev.Blocks {
		bl := &ev.Blocks[i]
		x.fetch.next(s, b)
		if bl.Effect >= 0 {
			continue
		}
		switch {
		case g != nil && x.fall(g, tier, bl.Hash):
		case !x.cfg.Shard.Whole() && (bl.Prefix == 0 || !x.cfg.Shard.Holds(bl.Prefix)): // another index's
		case s.leftOut > 0:
			s.leftOut--
		default:
			return &resident.InvariantError{Seq: b.First, Hash: bl.Hash, Reason: "no copy to take"}
		}
		s.digest -= mixer.Mix64(bl.Hash)
	}
	return nil
}

// fall takes a copy of a block out of a tier, and reports whether there was one.
func (x *Index) fall(g *group, tier int, hash event.BlockHash) bool {
	for _, h := range g.shelves {
		if int(h.tier) != tier {
			continue
		}
		if h.fewer(hash) {
			return true
		}
		if id := h.take(hash); id != 0 {
			x.went(fell, h, hash, id)
			if h.forest != nil {
				x.part(h, id)
			}
			return true
		}
	}
	return false
}

// mixing is the mixer of the group and tier that came last.
type mixing struct {
	group event.Group
	tier  event.Tier
	mixer event.Mixer
}

// mixer returns what digests of a group's blocks in a tier are made with, until it is called for others.
func (x *Index) mixer(g event.Group, t event.Tier) *event.Mixer {
	if m := &x.mixing; m.group != g || m.tier != t {
		*m = mixing{g, t, event.NewMixer(g, t)}
	}
	return &x.mixing.mixer
}

// tierOf returns the number of a tier that a source names.
func (x *Index) tierOf(s *source, name event.Tier) (tier uint16, ok bool) {
	for _, t := range s.tiers {
		if x.tiers[t] == name {
			return t, true
		}
	}
	if len(s.tiers) == maxTiers {
		return 0, false
	}
	tier = x.tier(name)
	s.tiers = append(s.tiers, tier)
	return tier, true
}
