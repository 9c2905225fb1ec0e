package prefix

import (
	"slices"
	"sync/atomic"

	"github.com/zeebo/xxh3"
)

// ownerSet is a set of shelves that hold the same blocks. Equal sets are one: blocks that lie together have mostly the same
// owners, and differ in four bytes. Only its writer looks at blocks and steps.
type ownerSet struct {
	id      uint32
	shelves []uint32 // sorted
	sum     uint64   // of the shelves' hashes
	blocks  int      // that have this set; a set that has none is dead, unless it is one shelf's own
	pinned  bool
	steps   [2]step // the last one shelf more, and less
}

// step leads from a set to the one with a shelf more or less. A nil one has none left.
type step struct {
	shelf uint32
	taken bool
	to    *ownerSet
}

func (o *ownerSet) isDead() bool { return o.blocks == 0 && !o.pinned }

// ownerSets are all sets of an index. Readers look sets up by id while one goroutine changes them.
type ownerSets struct {
	byID  atomic.Pointer[[]atomic.Pointer[ownerSet]]
	bySum map[uint64][]*ownerSet
	dead  []*ownerSet // since the change was published, unless they have blocks again
	free  []uint32
	next  uint32
	words int // shelves in all sets
}

func newOwnerSets() *ownerSets {
	s := &ownerSets{bySum: make(map[uint64][]*ownerSet), next: 1}
	first := make([]atomic.Pointer[ownerSet], 64)
	s.byID.Store(&first)
	return s
}

// at returns a set, nil when there is none of that id: a reader may have read the id in the middle of a change.
func (s *ownerSets) at(id uint32) *ownerSet {
	all := *s.byID.Load()
	if int(id) >= len(all) {
		return nil
	}
	return all[id].Load()
}

// alone makes the set of one shelf, which stays until unpin.
func (s *ownerSets) alone(shelf uint32) *ownerSet {
	o := s.intern([]uint32{shelf}, sumOf(shelf))
	o.pinned = true
	return o
}

func (s *ownerSets) unpin(o *ownerSet) {
	o.pinned = false
	s.release(o, 0)
}

// with returns the set with a shelf more; the same one when it has it. The set may be nil.
func (s *ownerSets) with(o, alone *ownerSet, shelf uint32) *ownerSet {
	if o == nil {
		return alone
	}
	last := &o.steps[0]
	if last.taken && last.shelf == shelf && !last.to.isDead() {
		return last.to
	}
	to := o
	if i, has := slices.BinarySearch(o.shelves, shelf); !has {
		to = s.intern(slices.Insert(slices.Clone(o.shelves), i, shelf), o.sum+sumOf(shelf))
	}
	*last = step{shelf: shelf, taken: true, to: to}
	return to
}

// without returns the set with a shelf less, nil when none is left.
func (s *ownerSets) without(o *ownerSet, shelf uint32) *ownerSet {
	if len(o.shelves) == 1 {
		return nil
	}
	last := &o.steps[1]
	if last.taken && last.shelf == shelf && !last.to.isDead() {
		return last.to
	}
	i, has := slices.BinarySearch(o.shelves, shelf)
	if !has {
		panic("prefix: a shelf leaves a set that it is not in")
	}
	to := s.intern(slices.Delete(slices.Clone(o.shelves), i, i+1), o.sum-sumOf(shelf))
	*last = step{shelf: shelf, taken: true, to: to}
	return to
}

func sumOf(shelf uint32) uint64 {
	return xxh3.Hash([]byte{byte(shelf), byte(shelf >> 8), byte(shelf >> 16), byte(shelf >> 24)})
}

// intern returns the set of some shelves.
func (s *ownerSets) intern(shelves []uint32, sum uint64) *ownerSet {
	for _, o := range s.bySum[sum] {
		if slices.Equal(o.shelves, shelves) {
			return o
		}
	}
	o := &ownerSet{shelves: shelves, sum: sum}
	if n := len(s.free); n > 0 {
		o.id, s.free = s.free[n-1], s.free[:n-1]
	} else {
		o.id = s.next
		s.next++
	}
	all := *s.byID.Load()
	if int(o.id) == len(all) {
		more := make([]atomic.Pointer[ownerSet], 2*len(all))
		for i := range all {
			more[i].Store(all[i].Load())
		}
		s.byID.Store(&more)
		all = more
	}
	all[o.id].Store(o)
	s.bySum[sum] = append(s.bySum[sum], o)
	s.words += len(shelves)
	return o
}

// move counts a block that goes from one set to another; either may be nil.
func (s *ownerSets) move(from, to *ownerSet) {
	if to != nil {
		to.blocks++
	}
	if from != nil {
		s.release(from, 1)
	}
}

// release takes blocks away from a set, which goes with the last one.
func (s *ownerSets) release(o *ownerSet, blocks int) {
	if o.blocks -= blocks; o.isDead() {
		s.dead = append(s.dead, o)
	}
}

// reap forgets the sets that have no blocks: readers do not find them any more.
func (s *ownerSets) reap() {
	for _, o := range s.dead {
		if o.isDead() && s.at(o.id) == o {
			s.forget(o)
		}
	}
	clear(s.dead)
	s.dead = s.dead[:0]
}

func (s *ownerSets) forget(o *ownerSet) {
	(*s.byID.Load())[o.id].Store(nil)
	s.free = append(s.free, o.id)
	s.words -= len(o.shelves)
	o.steps = [2]step{}
	same := s.bySum[o.sum]
	i := slices.Index(same, o)
	if same = slices.Delete(same, i, i+1); len(same) == 0 {
		delete(s.bySum, o.sum)
	} else {
		s.bySum[o.sum] = same
	}
}

// setBytes is what a set takes beside its shelves, about.
const setBytes = 160

// bytes returns how much memory the sets take, about.
func (s *ownerSets) bytes() int {
	return int(s.next)*16 + (int(s.next)-len(s.free))*setBytes + 4*s.words
}
