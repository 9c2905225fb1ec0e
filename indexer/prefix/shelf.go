package prefix

import (
	"sync/atomic"

	"kvstrata/event"
	"kvstrata/event/flat"
)

// shelf is the blocks of one source that lie in one tier of one cache group and are cut in one way, by what the engine calls them.
// Blocks without a name have shelves of their own.
type shelf struct {
	id     uint32
	lane   uint32 // number of the source's group
	source *source
	group  event.Group
	tier   uint16
	device bool
	forest *forest // nil: these blocks have no name
	alone  *ownerSet

	blocks *flat.Map                  // number in the forest by integer hash
	long   map[event.BlockHash]uint32 // by other hashes
	extra  map[event.BlockHash]uint32 // copies beyond the first
	twins  map[uint32]uint32          // by number: hashes beyond the first that name one block
	copies uint64

	// shown says that lookups count the shelf. A shelf that is cleared, or not filled yet, is not shown, whatever sets it is in.
	shown atomic.Bool
}

// unnamedBlock is the number of a block without a name.
const unnamedBlock = 1

// len returns how many hashes lie here.
func (h *shelf) len() int { return h.blocks.Len() + len(h.long) }

// get returns the number of a block, 0 when it is not here.
func (h *shelf) get(b event.BlockHash) uint32 {
	id := h.long[b]
	if n, ok := b.Int(); ok {
		id = h.blocks.Get(n)
	}
	if id != 0 && h.forest != nil {
		return h.forest.resolve(id)
	}
	return id
}

// put enters a block that is not here.
func (h *shelf) put(b event.BlockHash, id uint32) {
	h.copies++
	if n, ok := b.Int(); ok {
		*h.blocks.Entry(n) = id
		return
	}
	if h.long == nil {
		h.long = make(map[event.BlockHash]uint32)
	}
	h.long[b.Clone()] = id
}

// again counts further copies of a block that is here.
func (h *shelf) again(b event.BlockHash, n uint32) {
	if n == 0 {
		return
	}
	if h.extra == nil {
		h.extra = make(map[event.BlockHash]uint32)
	}
	if _, ok := h.extra[b]; !ok {
		b = b.Clone()
	}
	h.extra[b] += n
	h.copies += uint64(n)
}

// fewer takes a copy of a block, and reports whether there was one beyond the first.
func (h *shelf) fewer(b event.BlockHash) bool {
	if len(h.extra) == 0 {
		return false
	}
	n := h.extra[b]
	switch n {
	case 0:
		return false
	case 1:
		delete(h.extra, b)
	default:
		h.extra[b] = n - 1
	}
	h.copies--
	return true
}

// take removes a block and returns its number, 0 when it is not here.
func (h *shelf) take(b event.BlockHash) (id uint32) {
	if n, ok := b.Int(); ok {
		id = h.blocks.Delete(n)
	} else if id = h.long[b]; id != 0 {
		delete(h.long, b)
	}
	if id == 0 {
		return 0
	}
	h.copies--
	if h.forest != nil {
		return h.forest.resolve(id)
	}
	return id
}

// each yields the blocks, in no order.
func (h *shelf) each(yield func(event.BlockHash, uint32) bool) {
	for n, id := range h.blocks.All() {
		if h.forest != nil {
			id = h.forest.resolve(id)
		}
		if !yield(event.IntHash(n), id) {
			return
		}
	}
	for b, id := range h.long {
		if h.forest != nil {
			id = h.forest.resolve(id)
		}
		if !yield(b, id) {
			return
		}
	}
}

// newShelf makes an empty shelf, which is not shown yet. The caller holds the write lock.
func (x *Index) newShelf(s *source, g *group, tier uint16, f *forest) *shelf {
	all := *x.shelves.Load()
	h := &shelf{
		lane: g.lane, source: s, group: g.group, tier: tier, device: x.tiers[tier].Warmth() == 0, forest: f, blocks: flat.NewMap(x.pool),
	}
	if n := len(x.freeShelves); n > 0 {
		h.id, x.freeShelves = x.freeShelves[n-1], x.freeShelves[:n-1]
		more := append([]*shelf(nil), all...)
		more[h.id] = h
		x.shelves.Store(&more)
	} else {
		h.id = uint32(len(all))
		more := append(all, h) // readers see no further than the length they have
		x.shelves.Store(&more)
	}
	if f != nil {
		h.alone = x.owners.alone(h.id)
	}
	return h
}

// join makes a shelf an owner of a block.
func (x *Index) join(h *shelf, id uint32) {
	f := h.forest
	c := f.chunk(id)
	var old *ownerSet
	if n := c.holders[id&(chunkBlocks-1)]; n != 0 {
		old = x.owners.at(n)
	}
	set := x.owners.with(old, h.alone, h.id)
	if set == old {
		if h.twins == nil {
			h.twins = make(map[uint32]uint32)
		}
		h.twins[id]++
		return
	}
	x.owners.move(old, set)
	x.touch(f)
	f.hold(c, id, set.id)
}

// part ends a shelf's owning of a block by one of its hashes.
func (x *Index) part(h *shelf, id uint32) {
	if len(h.twins) > 0 {
		if n := h.twins[id]; n > 1 {
			h.twins[id] = n - 1
			return
		} else if n == 1 {
			delete(h.twins, id)
			return
		}
	}
	f := h.forest
	c := f.chunk(id)
	old := x.owners.at(c.holders[id&(chunkBlocks-1)])
	set, next := x.owners.without(old, h.id), uint32(0)
	if set != nil {
		next = set.id
	}
	x.owners.move(old, set)
	x.touch(f)
	f.hold(c, id, next)
}
