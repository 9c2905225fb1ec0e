package resident

import (
	"iter"
	"slices"
	"sync/atomic"

	"kvstrata/event"
)

// Flags of a record.
const (
	recUsed       uint8 = 1 << iota
	recParent           // it has a parent
	recEagle            //
	recLocal            // its name is a local hash
	recQueued           // among the names
	recLongHash         // the hash is no integer: it lies in the extra
	recLongParent       // the parent's likewise
	recSpread           // copies in more than one tier: the further ones lie in the extra
)

// record is what is known of one (hash, group): a cache line. It holds no pointer, so that the collector need not walk the slab.
type record struct {
	hash      uint64 // its word in the table
	parent    uint64
	name      uint64  // the prefix hash, or, while that is unknown only because the parent's is, the local one; 0 = unknown
	seed      uint64  // sealed
	first     holding // the only one, mostly; without copies when there is none
	group     uint32
	blockSize uint32
	link      uint32 // its place among the names, or the next free record plus one
	flags     uint8
}

// prefix returns the name of the prefix that ends with the block, 0 while that is unknown.
func (r *record) prefix() event.PrefixHash {
	if r.flags&recLocal != 0 {
		return 0
	}
	return event.PrefixHash(r.name)
}

// local returns the local hash of a block whose prefix hash waits for the parent's, else 0.
func (r *record) local() uint64 {
	if r.flags&recLocal == 0 {
		return 0
	}
	return r.name
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

// parent returns the block before record i's, if recParent says that there is one.
func (s *slab) parent(i int32) event.BlockHash {
	if r := s.at(i); r.flags&recLongParent == 0 {
		return event.IntHash(r.parent)
	}
	return s.extra(i).parent
}

func (s *slab) setParent(i int32, r *record, h *event.BlockHash) {
	if n, isInt := h.Int(); isInt {
		r.parent, r.flags = n, r.flags&^recLongParent|recParent
		return
	}
	r.flags |= recParent | recLongParent
	s.editExtra(i).parent = h.Clone()
}

// more returns the holdings of record i beyond the first.
func (s *slab) more(i int32) []holding {
	if s.at(i).flags&recSpread == 0 {
		return nil
	}
	return s.extra(i).more
}

func (s *slab) setMore(i int32, r *record, more []holding) {
	s.spread += len(more) - len(s.more(i))
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

func (r *record) resident() bool { return r.first.copies > 0 }

func (s *slab) copies(i int32, r *record, tier uint16) uint32 {
	if r.first.tier == tier || r.flags&recSpread == 0 && r.first.copies == 0 {
		return r.first.copies
	}
	for _, h := range s.more(i) {
		if h.tier == tier {
			return h.copies
		}
	}
	return 0
}

// add adds a copy to a record that has some, and returns how many the tier has.
func (s *slab) add(i int32, r *record, tier uint16, now event.Time) uint32 {
	if r.first.tier == tier {
		r.first.copies++
		return r.first.copies
	}
	more := slices.Clone(s.more(i))
	for j := range more {
		if more[j].tier == tier {
			more[j].copies++
			s.setMore(i, r, more)
			return more[j].copies
		}
	}
	s.setMore(i, r, append(more, holding{stored: now, copies: 1, tier: tier}))
	return 1
}

// take takes a copy from a tier that has one.
func (s *slab) take(i int32, r *record, tier uint16) (left uint32, stored event.Time) {
	if r.first.tier == tier {
		r.first.copies--
		left, stored = r.first.copies, r.first.stored
		if left == 0 && r.flags&recSpread != 0 {
			more := s.more(i)
			r.first = more[0]
			s.setMore(i, r, slices.Clone(more[1:]))
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
	s.setMore(i, r, more)
	return left, stored
}

const (
	chunkBits = 10
	chunkSize = 1 << chunkBits
)

// chunk is a run of records that snapshots share until it is written.
type chunk struct {
	records    *[chunkSize]record
	extras     *[chunkSize]extra // nil while no record of the chunk needs one
	generation uint32
}

// slab holds the records. A snapshot is a copy of the list of chunks: while it lives, the first write to a shared chunk
// copies it, so that taking a snapshot costs three words a thousand records and holds nothing up.
type slab struct {
	chunks     []chunk
	generation uint32
	snapshots  *atomic.Int32 // that live
	used       int32         // records ever taken; those freed since are in the list
	freeList   uint32        // the first free record plus one; 0 = none
	spread     int           // holdings beyond the first of their record
}

func (s *slab) at(i int32) *record { return &s.chunks[i>>chunkBits].records[i&(chunkSize-1)] }

// touch loads some records, one after the other and nothing between them, so that the misses overlap.
func (s *slab) touch(records []int32) (sink uint64) {
	for _, i := range records {
		sink += s.at(i).hash
	}
	return sink
}

func (s *slab) extra(i int32) *extra { return &s.chunks[i>>chunkBits].extras[i&(chunkSize-1)] }

// editExtra returns the extra of a record to be written.
func (s *slab) editExtra(i int32) *extra {
	s.edit(i)
	c := &s.chunks[i>>chunkBits]
	if c.extras == nil {
		c.extras = new([chunkSize]extra)
	}
	return &c.extras[i&(chunkSize-1)]
}

// edit returns a record to be written, at this place until the next snapshot.
func (s *slab) edit(i int32) *record {
	c := &s.chunks[i>>chunkBits]
	if c.generation != s.generation {
		s.own(c)
	}
	return &c.records[i&(chunkSize-1)]
}

// own makes a chunk one that no snapshot shares.
func (s *slab) own(c *chunk) {
	if s.snapshots.Load() > 0 {
		records := *c.records
		c.records = &records
		if c.extras != nil {
			extras := *c.extras
			c.extras = &extras
		}
	}
	c.generation = s.generation
}

// alloc returns a record that nobody uses, all zero.
func (s *slab) alloc() (int32, *record) {
	if s.freeList != 0 {
		i := int32(s.freeList - 1)
		r := s.edit(i)
		s.freeList = r.link
		r.link = 0
		return i, r
	}
	i := s.used
	if int(i>>chunkBits) == len(s.chunks) {
		s.chunks = append(s.chunks, chunk{records: new([chunkSize]record), generation: s.generation})
	}
	s.used++
	return i, s.edit(i)
}

func (s *slab) free(i int32, r *record) {
	if r.flags&(recLongHash|recLongParent|recSpread) != 0 {
		*s.editExtra(i) = extra{}
	}
	*r = record{link: s.freeList}
	s.freeList = uint32(i) + 1
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
