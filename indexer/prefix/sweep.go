package prefix

import "kvstrata/event/flat"

// sweepPiece is how many blocks are swept in one change, so that no reader waits for long.
const sweepPiece = 64

// clear takes everything off a source's shelves, at once: lookups count a shelf no more that is not shown. The caller holds the write
// lock, as for all that follows.
func (x *Index) clear(s *source) {
	for h := range s.shelves {
		if h.len() > 0 {
			x.emptied(s)
			break
		}
	}
	for _, g := range s.groups {
		x.drop(g)
	}
	s.digest, s.leftOut = 0, 0
	s.reshaped = true
}

// reset forgets a source's life.
func (x *Index) reset(s *source) {
	x.clear(s)
	s.told, s.tiers = nil, nil
}

// drop takes the shelves of a group away. Their blocks are taken out of the forests later, piece by piece.
func (x *Index) drop(g *group) {
	x.disturb()
	for _, h := range g.shelves {
		h.shown.Store(false)
		x.swept = append(x.swept, h)
		x.unswept.Store(true)
	}
	g.shelves = nil
}

// sweep takes up to so many blocks out that are on no shelf any more.
func (x *Index) sweep(blocks int) {
	for ; blocks > 0 && x.unswept.Load(); blocks -= sweepPiece {
		x.begin()
		if x.sweepShelf(x.swept[0]) {
			x.remove(x.swept[0])
			x.swept = x.swept[1:]
			x.unswept.Store(len(x.swept) > 0)
		}
		x.end()
	}
}

// sweepShelf takes a piece of a shelf's blocks out, and reports whether it was the last.
func (x *Index) sweepShelf(h *shelf) bool {
	n := sweepPiece
	for hash, id := range h.long {
		if n--; n < 0 {
			return false
		}
		delete(h.long, hash)
		if h.forest != nil {
			x.part(h, h.forest.resolve(id))
		}
	}
	return !h.blocks.Drain(n, func(_ uint64, id uint32) {
		if h.forest != nil {
			x.part(h, h.forest.resolve(id))
		}
	})
}

// remove forgets an empty shelf.
func (x *Index) remove(h *shelf) {
	if h.alone != nil {
		x.owners.unpin(h.alone)
	}
	h.blocks = flat.NewMap(x.pool)
	x.freeShelves = append(x.freeShelves, h.id)
}
