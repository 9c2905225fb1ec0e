package resident

import (
	"iter"
	"slices"
	"sync/atomic"
	"unsafe"

	"kvstrata/event"
	"kvstrata/event/flat"
)

// key finds a record: an engine's hash within a cache group. Nil group and group 0 are the same.
type key struct {
	hash  event.BlockHash
	group uint32
}

// table maps keys to records. Integer hashes, which most are, have a flat map a group.
type table struct {
	pool  *flat.Pool
	ints  []*flat.Map // by group
	bytes map[key]int32
}

func newTable() table {
	return table{pool: flat.NewPool(nil), bytes: make(map[key]int32)}
}

// group returns the integer hashes of a group, made at its first.
func (t *table) group(g uint32) *flat.Map {
	for uint32(len(t.ints)) <= g {
		t.ints = append(t.ints, flat.NewMap(t.pool))
	}
	return t.ints[g]
}

// flatGroups bounds the groups that have flat maps: a source may name any number.
const flatGroups = 64

func (t *table) get(k key) (i int32, ok bool) {
	n, isInt := k.hash.Int()
	if !isInt || k.group >= flatGroups {
		i, ok = t.bytes[k]
		return i, ok
	}
	if k.group >= uint32(len(t.ints)) {
		return 0, false
	}
	i = int32(t.ints[k.group].Get(n)) - 1
	return i, i >= 0
}

func (t *table) put(k key, i int32) {
	if n, isInt := k.hash.Int(); isInt && k.group < flatGroups {
		*t.group(k.group).Entry(n) = uint32(i) + 1
		return
	}
	t.bytes[k] = i
}

func (t *table) remove(k key) {
	if n, isInt := k.hash.Int(); isInt && k.group < flatGroups {
		t.group(k.group).Delete(n)
		return
	}
	delete(t.bytes, k)
}

// ahead is how many blocks' misses overlap at a time.
const ahead = 64

// prefetch has what the next operations on some blocks will look at fetched.
func (t *table) prefetch(blocks []event.Block, g event.Group) {
	if g.Index() >= uint32(len(t.ints)) || len(blocks) < 2 {
		return
	}
	var room [2 * ahead]unsafe.Pointer
	lines := room[:0]
	for i := range blocks[:min(ahead, len(blocks))] {
		if n, isInt := blocks[i].Hash.Int(); isInt {
			lines = t.ints[g.Index()].AppendLines(lines, n)
		}
	}
	flat.Prefetch(lines)
}

// Flags of a record.
const (
	recUsed       uint8 = 1 << iota
	recParent           // it has a parent
	recEagle            //
	recQueued           // in the queue of names
	recLongHash         // the hash is no integer: it lies in the extra
	recLongParent       // the parent's likewise
	recSpread           // copies in more than one tier: the further ones lie in the extra
)

// record is what is known of one (hash, group). It holds no pointer, so that the collector need not walk the slab.
type record struct {
	hash      uint64
	parent    uint64
	prefix    event.PrefixHash // 0 = unknown
	local     uint64           // while the prefix is unknown only because the parent's is
	seed      uint64           // sealed
	first     holding          // the only one, mostly
	group     uint32
	blockSize uint32
	older     int32 // neighbours in the queue of names, or the next free record
	newer     int32
	flags     uint8
}

// extra is what few records need.
type extra struct {
	hash   event.BlockHash
	parent event.BlockHash
	more   []holding // in further tiers; never changed in place, since snapshots share it
}

// holding is the copies in one tier.
type holding struct {
	stored event.Time // when copies rose from 0
	copies uint32
	tier   uint16
}

// hash returns what the engine calls the block of record i.
func (s *slab) hash(i int32) event.BlockHash {
	if r := s.at(i); r.flags&recLongHash == 0 {
		return event.IntHash(r.hash)
	}
	return s.extra(i).hash
}

func (s *slab) setHash(i int32, h event.BlockHash) {
	r := s.edit(i)
	if n, isInt := h.Int(); isInt {
		r.hash = n
		return
	}
	r.flags |= recLongHash
	s.editExtra(i).hash = h
}

// parent returns the block before record i's, if recParent says that there is one.
func (s *slab) parent(i int32) event.BlockHash {
	if r := s.at(i); r.flags&recLongParent == 0 {
		return event.IntHash(r.parent)
	}
	return s.extra(i).parent
}

func (s *slab) setParent(i int32, h event.BlockHash) {
	r := s.edit(i)
	r.flags |= recParent
	if n, isInt := h.Int(); isInt {
		r.parent = n
		r.flags &^= recLongParent
		return
	}
	r.flags |= recLongParent
	s.editExtra(i).parent = h
}

// more returns the holdings of record i beyond the first.
func (s *slab) more(i int32) []holding {
	if s.at(i).flags&recSpread == 0 {
		return nil
	}
	return s.extra(i).more
}

func (s *slab) setMore(i int32, more []holding) {
	r := s.edit(i)
	if len(more) == 0 {
		if r.flags&recSpread != 0 {
			r.flags &^= recSpread
			s.editExtra(i).more = nil
		}
		return
	}
	r.flags |= recSpread
	s.editExtra(i).more = more
}

func (s *slab) copies(i int32, tier uint16) uint32 {
	r := s.at(i)
	if r.first.tier == tier && r.first.copies > 0 {
		return r.first.copies
	}
	for _, h := range s.more(i) {
		if h.tier == tier {
			return h.copies
		}
	}
	return 0
}

func (s *slab) resident(i int32) bool {
	r := s.at(i)
	return r.first.copies > 0 || r.flags&recSpread != 0
}

// add adds a copy and returns how many there are.
func (s *slab) add(i int32, tier uint16, now event.Time) uint32 {
	r := s.edit(i)
	if !s.resident(i) {
		r.first = holding{stored: now, copies: 1, tier: tier}
		return 1
	}
	if r.first.tier == tier {
		r.first.copies++
		return r.first.copies
	}
	more := slices.Clone(s.more(i))
	for j := range more {
		if more[j].tier == tier {
			more[j].copies++
			s.setMore(i, more)
			return more[j].copies
		}
	}
	s.setMore(i, append(more, holding{stored: now, copies: 1, tier: tier}))
	return 1
}

// take takes a copy from a tier that has one.
func (s *slab) take(i int32, tier uint16) (left uint32, stored event.Time) {
	r := s.edit(i)
	if r.first.tier == tier && r.first.copies > 0 {
		r.first.copies--
		left, stored = r.first.copies, r.first.stored
		if more := s.more(i); left == 0 && len(more) > 0 {
			r.first = more[0]
			s.setMore(i, slices.Clone(more[1:]))
		}
		return left, stored
	}
	more := slices.Clone(s.more(i))
	for j := range more {
		if more[j].tier != tier {
			continue
		}
		more[j].copies--
		left, stored = more[j].copies, more[j].stored
		if left == 0 {
			more = slices.Delete(more, j, j+1)
		}
		break
	}
	s.setMore(i, more)
	return left, stored
}

const (
	chunkBits = 10
	chunkSize = 1 << chunkBits
)

// chunk is a run of records that snapshots share until it is written. The pointer stands first: the collector looks no
// further.
type chunk struct {
	extras     *[chunkSize]extra // nil while no record of the chunk needs one
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

func (s *slab) extra(i int32) *extra { return &s.chunks[i>>chunkBits].extras[i&(chunkSize-1)] }

// editExtra returns the extra of a record to be written.
func (s *slab) editExtra(i int32) *extra {
	s.edit(i)
	c := s.chunks[i>>chunkBits]
	if c.extras == nil {
		c.extras = new([chunkSize]extra)
	}
	return &c.extras[i&(chunkSize-1)]
}

// edit returns a record to be written.
func (s *slab) edit(i int32) *record {
	c := s.chunks[i>>chunkBits]
	if c.generation != s.generation {
		if s.snapshots.Load() > 0 {
			own := *c
			c = &own
			if c.extras != nil {
				extras := *c.extras
				c.extras = &extras
			}
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
	r := s.edit(i)
	if r.flags&(recLongHash|recLongParent|recSpread) != 0 {
		*s.editExtra(i) = extra{}
	}
	*r = record{older: s.freeList}
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
