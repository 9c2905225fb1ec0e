package resident

import (
	"iter"
	"slices"
	"sync/atomic"

	"kvstrata/event"
)

// key finds a record: an engine's hash within a cache group. Nil group and group 0 are the same.
type key struct {
	hash  event.BlockHash
	group uint32
}

// intKey is the key of an integer hash, free of pointers so that the collector need not walk the map.
type intKey struct {
	hash  uint64
	group uint32
}

// table maps keys to records.
type table struct {
	ints  map[intKey]int32
	bytes map[key]int32
}

func newTable() table {
	return table{ints: make(map[intKey]int32), bytes: make(map[key]int32)}
}

func (t *table) get(k key) (i int32, ok bool) {
	if n, isInt := k.hash.Int(); isInt {
		i, ok = t.ints[intKey{n, k.group}]
		return i, ok
	}
	i, ok = t.bytes[k]
	return i, ok
}

func (t *table) put(k key, i int32) {
	if n, isInt := k.hash.Int(); isInt {
		t.ints[intKey{n, k.group}] = i
		return
	}
	t.bytes[k] = i
}

func (t *table) remove(k key) {
	if n, isInt := k.hash.Int(); isInt {
		delete(t.ints, intKey{n, k.group})
		return
	}
	delete(t.bytes, k)
}

// Flags of a record.
const (
	recUsed   uint8 = 1 << iota
	recParent       // parent means something
	recEagle
	recQueued // in the queue of names
)

// record is what is known of one (hash, group).
type record struct {
	hash      event.BlockHash
	parent    event.BlockHash
	prefix    event.PrefixHash // 0 = unknown
	local     uint64           // while the prefix is unknown only because the parent's is
	seed      uint64           // sealed
	first     holding          // the only one, mostly
	more      []holding        // in further tiers; never changed in place, since snapshots share it
	group     uint32
	blockSize uint32
	older     int32 // neighbours in the queue of names, or the next free record
	newer     int32
	flags     uint8
}

// holding is the copies in one tier.
type holding struct {
	stored event.Time // when copies rose from 0
	copies uint32
	tier   uint16
}

func (r *record) holdings() iter.Seq[holding] {
	return func(yield func(holding) bool) {
		if !yield(r.first) {
			return
		}
		for _, h := range r.more {
			if !yield(h) {
				return
			}
		}
	}
}

func (r *record) copies(tier uint16) uint32 {
	for h := range r.holdings() {
		if h.tier == tier && h.copies > 0 {
			return h.copies
		}
	}
	return 0
}

func (r *record) resident() bool { return r.first.copies > 0 || len(r.more) > 0 }

// add adds a copy and returns how many there are. A record may be edited in place; its list of further holdings is
// replaced.
func (r *record) add(tier uint16, now event.Time) uint32 {
	if r.first.copies == 0 && len(r.more) == 0 {
		r.first = holding{stored: now, copies: 1, tier: tier}
		return 1
	}
	if r.first.tier == tier {
		r.first.copies++
		return r.first.copies
	}
	more := append(make([]holding, 0, len(r.more)+1), r.more...)
	for i := range more {
		if more[i].tier == tier {
			more[i].copies++
			r.more = more
			return more[i].copies
		}
	}
	r.more = append(more, holding{stored: now, copies: 1, tier: tier})
	return 1
}

// take takes a copy from a tier that has one.
func (r *record) take(tier uint16) (left uint32, stored event.Time) {
	if r.first.tier == tier && r.first.copies > 0 {
		r.first.copies--
		left, stored = r.first.copies, r.first.stored
		if left == 0 && len(r.more) > 0 {
			r.first, r.more = r.more[0], append([]holding(nil), r.more[1:]...)
		}
		return left, stored
	}
	more := append([]holding(nil), r.more...)
	for i := range more {
		if more[i].tier != tier {
			continue
		}
		more[i].copies--
		left, stored = more[i].copies, more[i].stored
		if left == 0 {
			more = append(more[:i], more[i+1:]...)
		}
		break
	}
	r.more = more
	return left, stored
}

const (
	chunkBits = 10
	chunkSize = 1 << chunkBits
)

// chunk is a run of records that snapshots share until it is written.
type chunk struct {
	generation uint32
	records    [chunkSize]record
}

// slab holds the records. A snapshot is a copy of the list of chunks: while it lives, the first write to a shared chunk
// copies it, so that taking a snapshot costs one pointer a thousand records and holds nothing up.
type slab struct {
	chunks     []*chunk
	generation uint32
	snapshots  *atomic.Int32 // that live
	used       int32         // records ever taken; those freed since are in the list
	freeList   int32         // index + 1 of the first free record; 0 = none
}

func (s *slab) at(i int32) *record { return &s.chunks[i>>chunkBits].records[i&(chunkSize-1)] }

// edit returns a record to be written.
func (s *slab) edit(i int32) *record {
	c := s.chunks[i>>chunkBits]
	if c.generation != s.generation {
		if s.snapshots.Load() > 0 {
			own := *c
			c = &own
			s.chunks[i>>chunkBits] = c
		}
		c.generation = s.generation
	}
	return &c.records[i&(chunkSize-1)]
}

func (s *slab) alloc() int32 {
	if s.freeList != 0 {
		i := s.freeList - 1
		s.freeList = s.at(i).older
		*s.edit(i) = record{}
		return i
	}
	i := s.used
	if int(i>>chunkBits) == len(s.chunks) {
		s.chunks = append(s.chunks, &chunk{generation: s.generation})
	}
	s.used++
	return i
}

func (s *slab) free(i int32) {
	*s.edit(i) = record{older: s.freeList}
	s.freeList = i + 1
}

// freeze returns the slab as it is now; s goes on.
func (s *slab) freeze() slab {
	frozen := slab{chunks: slices.Clone(s.chunks), used: s.used}
	s.generation++
	s.snapshots.Add(1)
	return frozen
}

// all yields the indices of the records in use.
func (s *slab) all() iter.Seq[int32] {
	return func(yield func(int32) bool) {
		for i := range s.used {
			if s.at(i).flags&recUsed != 0 && !yield(i) {
				return
			}
		}
	}
}

// queue orders the records that are only names, oldest first. Indices are kept plus one; 0 = none.
type queue struct {
	oldest int32 // index, when length > 0
	newest int32
	length int
}

func (q *queue) push(s *slab, i int32) {
	r := s.edit(i)
	r.flags |= recQueued
	r.older, r.newer = 0, 0
	if q.length == 0 {
		q.oldest = i
	} else {
		r.older = q.newest + 1
		s.edit(q.newest).newer = i + 1
	}
	q.newest = i
	q.length++
}

func (q *queue) remove(s *slab, i int32) {
	r := s.edit(i)
	older, newer := r.older, r.newer
	r.flags &^= recQueued
	r.older, r.newer = 0, 0
	if older != 0 {
		s.edit(older - 1).newer = newer
	} else {
		q.oldest = newer - 1
	}
	if newer != 0 {
		s.edit(newer - 1).older = older
	} else {
		q.newest = older - 1
	}
	q.length--
}
