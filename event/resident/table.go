package resident

import (
	"hash/maphash"
	"math/bits"

	"kvstrata/event"

	"github.com/zeebo/xxh3"
)

const (
	bucketSlots = 12
	bucketFill  = 8  // records a bucket, on average, at which the table grows
	firstSize   = 16 // buckets
)

// bucket is a cache line of numbers of records, each beside eight bits of its key's hash.
type bucket struct {
	tags  uint64 // of slots 0 to 7, a byte each; 0 is empty
	tags2 uint32 // of slots 8 to 11
	over  uint32 // records that found this bucket full and lie further on
	at    [bucketSlots]int32
}

const (
	eachByte = 0x01010101_01010101
	topBits  = 0x80808080_80808080
	lower    = 1<<32 - 1
)

// match returns the slots that have a tag, as slot reads them. Behind the first it may name some that have not.
func (b *bucket) match(tag uint8) uint64 {
	x, y := b.tags^uint64(tag)*eachByte, uint64(b.tags2)^uint64(tag)*(eachByte&lower)
	return (x-eachByte)&^x&topBits | (y-eachByte&lower)&^y&(topBits&lower)>>1
}

// slot returns the first of the slots that match has named.
func slot(match uint64) int {
	bit := bits.TrailingZeros64(match)
	return bit>>3 + 8*(^bit&1)
}

// set enters a record under a tag; tag 0 takes it out.
func (b *bucket) set(slot int, tag uint8, at int32) {
	b.at[slot] = at
	if shift := slot % 8 * 8; slot < 8 {
		b.tags = b.tags&^(0xff<<shift) | uint64(tag)<<shift
	} else {
		b.tags2 = b.tags2&^(0xff<<shift) | uint32(tag)<<shift
	}
}

// table finds records by their keys, which lie in the records: a hash and a cache group. An operation looks at one bucket, mostly; of a
// full one at the next, too. A table that is full is followed by another of twice the size, into which the records are
// moved a few at a time, so that no operation waits for all of them.
type table struct {
	buckets []bucket // a power of two
	len     int      // records in them
	seed    [2]uint64

	former []bucket // of the table before this one, as it was then, while records are moved
	moved  int32    // records below have been
	puts   uint
	sink   uint64
}

func newTable() table {
	seed := maphash.MakeSeed()
	return table{buckets: make([]bucket, firstSize), seed: [2]uint64{maphash.String(seed, "0"), maphash.String(seed, "1") | 1}}
}

// probe is a key as it is looked for.
type probe struct {
	hash  uint64 // of the key
	word  uint64 // what its record has of the engine's hash: an integer itself, of anything longer a hash of it
	group uint32
	flags uint8 // that its record has
}

func (t *table) probe(h *event.BlockHash, group uint32) probe {
	if n, isInt := h.Int(); isInt {
		return probe{hash: t.hash(n, group), word: n, group: group, flags: recUsed}
	}
	return t.probeLong(h, group)
}

func (t *table) probeLong(h *event.BlockHash, group uint32) probe {
	var room [64]byte
	word := xxh3.HashSeed(h.AppendTo(room[:0]), t.seed[0])
	return probe{hash: t.hash(word, group), word: word, group: group, flags: recUsed | recLongHash}
}

// hash spreads a key over 64 bits, by seeds that nobody outside knows.
func (t *table) hash(word uint64, group uint32) uint64 {
	hi, lo := bits.Mul64(word^t.seed[0]^uint64(group)<<32, t.seed[1])
	return hi ^ lo
}

// tag returns the eight bits of a hash that stand in its bucket.
func tag(hash uint64) uint8 { return max(uint8(hash>>56), 1) }

// find returns the record of a key with this engine's hash, −1 when there is none.
func (t *table) find(s *slab, k probe, h *event.BlockHash) int32 {
	at := search(t.buckets, s, k, h)
	if at < 0 && t.former != nil {
		// What was freed since is found there no more: a record that is used again has another key, or this one.
		at = search(t.former, s, k, h)
	}
	return at
}

func search(buckets []bucket, s *slab, k probe, h *event.BlockHash) int32 {
	for i := range uint64(len(buckets)) {
		b := &buckets[(k.hash+i)&uint64(len(buckets)-1)]
		for m := b.match(tag(k.hash)); m != 0; m &= m - 1 {
			at := b.at[slot(m)]
			r := s.at(at)
			if r.hash == k.word && r.group == k.group && r.flags&(recUsed|recLongHash) == k.flags &&
				(k.flags == recUsed || s.extra(at).hash == *h) {
				return at
			}
		}
		if b.over == 0 {
			break
		}
	}
	return -1
}

// put enters a record whose key, of this hash, is not there.
func (t *table) put(s *slab, hash uint64, at int32) {
	if t.len >= bucketFill*len(t.buckets) {
		t.grow(s)
	}
	t.insert(hash, at)
	if t.former != nil {
		if t.puts++; t.puts%(ahead/4) == 0 { // of 4 n records that fit, n are here when all of those before have been moved
			t.move(s)
		}
	}
}

func (t *table) insert(hash uint64, at int32) {
	t.len++
	for i := hash; ; i++ {
		b := &t.buckets[i&uint64(len(t.buckets)-1)]
		if empty := b.match(0); empty != 0 {
			b.set(slot(empty), tag(hash), at)
			return
		}
		b.over++
	}
}

// remove takes a record out. The former buckets keep it, where it is not found any more.
func (t *table) remove(s *slab, at int32) {
	r := s.at(at)
	hash := t.hash(r.hash, r.group)
	steps, in := t.locate(hash, at)
	if in < 0 {
		return
	}
	for i := range steps {
		t.buckets[(hash+i)&uint64(len(t.buckets)-1)].over--
	}
	t.buckets[(hash+steps)&uint64(len(t.buckets)-1)].set(in, 0, 0)
	t.len--
}

// locate returns in which slot a record lies, −1 when it is not in the buckets, and how many buckets behind its own.
func (t *table) locate(hash uint64, at int32) (steps uint64, in int) {
	for steps := range uint64(len(t.buckets)) {
		b := &t.buckets[(hash+steps)&uint64(len(t.buckets)-1)]
		for m := b.match(tag(hash)); m != 0; m &= m - 1 {
			if in := slot(m); b.at[in] == at {
				return steps, in
			}
		}
		if b.over == 0 {
			break
		}
	}
	return 0, -1
}

func (t *table) grow(s *slab) {
	for t.former != nil {
		t.move(s)
	}
	t.former, t.moved = t.buckets, 0
	t.buckets, t.len = make([]bucket, 2*len(t.buckets)), 0
}

// move moves the next records, in their own order, which the processor foresees.
func (t *table) move(s *slab) {
	first := t.moved
	t.moved = min(first+ahead, s.used)
	var hashes [ahead]uint64
	for at := first; at < t.moved; at++ {
		r := s.at(at)
		hashes[at-first] = t.hash(r.hash, r.group)
	}
	t.sink += t.touch(hashes[:t.moved-first])
	for at := first; at < t.moved; at++ {
		if s.at(at).flags&recUsed == 0 {
			continue
		}
		hash := hashes[at-first]
		if _, in := t.locate(hash, at); in < 0 { // it is when it came since
			t.insert(hash, at)
		}
	}
	if t.moved == s.used {
		t.former = nil
	}
}

// touch loads the first bucket of each of some hashes, one after the other and nothing between them, so that the misses overlap.
func (t *table) touch(hashes []uint64) (sink uint64) {
	for _, hash := range hashes {
		sink += t.buckets[hash&uint64(len(t.buckets)-1)].tags
	}
	if t.former != nil {
		for _, hash := range hashes {
			sink += t.former[hash&uint64(len(t.former)-1)].tags
		}
	}
	return sink
}

// appendLikely appends the record that a hash's bucket has under its tag, if any: most often the one that find returns.
func (t *table) appendLikely(records []int32, hash uint64) []int32 {
	b := &t.buckets[hash&uint64(len(t.buckets)-1)]
	m := b.match(tag(hash))
	if m == 0 && t.former != nil {
		b = &t.former[hash&uint64(len(t.former)-1)]
		m = b.match(tag(hash))
	}
	if m == 0 {
		return records
	}
	return append(records, b.at[slot(m)])
}
