package resident

import "kvstrata/event"

const (
	ahead = 64      // blocks whose cache misses overlap
	cold  = 1 << 13 // records from which on there are misses
)

// lookahead has the cache lines loaded that the judge will look at next, many at a time: it would wait for each by itself.
type lookahead struct {
	left      int // blocks whose lines have been
	hashes    [2 * ahead]uint64
	found     [2 * ahead]int32
	forgotten [ahead]int32
	sink      uint64 // of what was loaded, so that it is
}

// next says that the judge comes to block i of event e.
func (s *Set) next(b *event.Batch, e, i int) {
	if s.ahead.left == 0 {
		s.ahead.left = s.load(b.Events[e:], i)
	}
	s.ahead.left--
}

// load loads the lines of the blocks that come next, from block i of the first event on, and returns of how many.
func (s *Set) load(events []event.Event, i int) (blocks int) {
	if s.records < cold {
		return ahead
	}
	a := &s.ahead
	n, gone := 0, 0
	for e := range events {
		ev := &events[e]
		group := ev.Group.Index()
		if i == 0 && ev.HasParent && n < len(a.hashes) {
			a.hashes[n] = s.index.hash(s.index.word(&ev.Parent), group)
			n++
		}
		run := ev.Blocks[i:][:min(len(ev.Blocks)-i, ahead-blocks, len(a.hashes)-n)]
		for j := range run {
			a.hashes[n+j] = s.index.hash(s.index.word(&run[j].Hash), group)
		}
		n += len(run)
		blocks += len(run)
		if ev.Kind == event.Evicted {
			gone += len(run)
		}
		if blocks == ahead || n == len(a.hashes) {
			break
		}
		i = 0
	}
	gone = min(gone, s.names.length+gone-s.mostNames()) // names that will be forgotten
	forgotten := s.names.first(a.forgotten[:0], gone)
	a.sink += s.index.touch(a.hashes[:n]) + s.slab.touch(forgotten)
	found := a.found[:0]
	for _, hash := range a.hashes[:n] {
		found = s.index.appendLikely(found, hash)
	}
	n = 0
	for _, i := range forgotten {
		r := s.slab.at(i)
		a.hashes[n] = s.index.hash(r.hash, r.group)
		n++
	}
	a.sink += s.slab.touch(found) + s.index.touch(a.hashes[:n])
	return blocks
}
