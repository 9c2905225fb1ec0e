package resident

import (
	"hash/maphash"
	"math/bits"

	"kvstrata/event"

	"github.com/zeebo/xxh3"
)

const (
	bucketSlots = 12
	bucketFill  = 8       // records a bucket, on average, at which the table grows
	firstSize   = 16      // buckets
	quickSize   = 1 << 14 // below it a table grows fourfold
)

// bucket is a cache line of numbers of records, each beside eight bits of its key's hash.
type bucket struct {
	tags [2]uint64 // of slots 0 to 7 and 8 to 11, a byte each, 0 is empty; above them how many records found no room and lie further on
	at   [bucketSlots]int32
}

const (
	eachByte = 0x01010101_01010101
	topBits  = 0x80808080_80808080
	lower    = 1<<32 - 1
	oneOver  = 1 << 32
)

func (b *bucket) over() bool { return b.tags[1] >= oneOver }

// match returns the slots that have a tag, as slot reads them. Behind the first it may name taken ones that have the tag's neighbour.
func (b *bucket) match(tag uint8) uint64 {
	pattern := uint64(tag) * eachByte
	x, y := b.tags[0]^pattern, b.tags[1]^pattern // bytes that are 0 where the tag stands
	return (x-eachByte)&^x&topBits | (y-eachByte)&^y&(topBits&lower)>>1
}

// slot returns the first of the slots that match has named.
func slot(match uint64) uint {
	bit := uint(bits.TrailingZeros64(match))
	return (bit>>3 + 8*(^bit&1)) & 15
}

// set enters a record under a tag in an empty slot.
func (b *bucket) set(slot uint, tag uint8, at int32) {
	b.at[slot] = at
	b.tags[slot/8] |= uint64(tag) << (slot % 8 * 8)
}

func (b *bucket) empty(slot uint) { b.tags[slot/8] &^= 0xff << (slot % 8 * 8) }

// table finds records by their keys, which lie in the records: a hash and a cache group. An operation looks at one bucket, and behind a
// full one at the next. A table that is full is followed by a larger one, into which the records are moved a few at a time,
// so that no operation waits for all of them.
type table struct {
	buckets []bucket // a power of two
	len     int      // records in them
	seed    [2]uint64

	former []bucket // of the table before this one, as it was then, while records are moved
	moved  int32    // records below have been
	last   int32    // from here on they came since
	puts   uint
	sink   uint64 // of what was loaded, so that it is
}

func newTable() table {
	seed := maphash.MakeSeed()
	return table{buckets: make([]bucket, firstSize), seed: [2]uint64{maphash.String(seed, "0"), maphash.String(seed, "1") | 1}}
}

// word returns what a record has of a hash: an integer itself, of anything longer a hash of it.
func (t *table) word(h *event.BlockHash) uint64 {
	word, isInt := h.Int()
	if !isInt {
		word = t.longWord(h)
	}
	return word
}

func (t *table) longWord(h *event.BlockHash) uint64 {
	var room [64]byte
	return xxh3.HashSeed(h.AppendTo(room[:0]), t.seed[0])
}

// hash spreads a key over 64 bits, by seeds that nobody outside knows.
func (t *table) hash(word uint64, group uint32) uint64 {
	hi, lo := bits.Mul64(word^t.seed[0]^uint64(group)<<32, t.seed[1])
	return hi ^ lo
}

// tag returns the eight bits of a hash that stand in its bucket: not 0, which is an empty slot's, nor that one's neighbour.
func tag(hash uint64) uint8 { return max(uint8(hash>>56), 2) }

// find returns the record of a key, −1 when there is none, and the key's hash.
func (t *table) find(s *slab, h *event.BlockHash, group uint32) (at int32, hash uint64) {
	word, isInt := h.Int()
	if !isInt {
		return t.search(s, h, group)
	}
	hash = t.hash(word, group)
	b := t.bucket(hash)
	m := b.match(tag(hash))
	if m == 0 && !b.over() && t.former == nil {
		return -1, hash
	}
	if m != 0 { // most often it is the first
		at := b.at[slot(m)]
		if r := s.at(at); r.hash == word && r.group == group && r.flags&(recUsed|recLongHash) == recUsed {
			return at, hash
		}
	}
	return t.search(s, h, group)
}

// search is find wherever the key may be.
func (t *table) search(s *slab, h *event.BlockHash, group uint32) (at int32, hash uint64) {
	_, isInt := h.Int()
	word := t.word(h)
	hash = t.hash(word, group)
	at = search(t.buckets, s, hash, word, group, h, isInt)
	if at < 0 && t.former != nil {
		// What was freed since is found there no more: a record that is used again has another key, or this one.
		at = search(t.former, s, hash, word, group, h, isInt)
	}
	return at, hash
}

func search(buckets []bucket, s *slab, hash, word uint64, group uint32, h *event.BlockHash, isInt bool) int32 {
	for i := range uint64(len(buckets)) {
		b := &buckets[(hash+i)&uint64(len(buckets)-1)]
		for m := b.match(tag(hash)); m != 0; m &= m - 1 {
			at := b.at[slot(m)]
			r := s.at(at)
			if r.hash == word && r.group == group && r.flags&recUsed != 0 && r.flags&recLongHash != 0 != isInt && (isInt || s.extra(at).hash == *h) {
				return at
			}
		}
		if !b.over() {
			break
		}
	}
	return -1
}

// bucket returns the bucket in which a hash is at home.
func (t *table) bucket(hash uint64) *bucket { return &t.buckets[hash&uint64(len(t.buckets)-1)] }

// insert enters a record whose key, of this hash, is not there. It may have become due that others are moved.
func (t *table) insert(hash uint64, at int32) {
	t.len++
	b := t.bucket(hash)
	empty := b.match(0)
	for i := hash + 1; empty == 0; i++ {
		b.tags[1] += oneOver
		b = t.bucket(i)
		empty = b.match(0)
	}
	b.set(slot(empty), tag(hash), at)
}

// remove takes a record out. The former buckets keep it, where it is not found any more.
func (t *table) remove(r *record, at int32) {
	hash := t.hash(r.hash, r.group)
	b := t.bucket(hash)
	if m := b.match(tag(hash)); m != 0 && b.at[slot(m)] == at { // most often it is the first
		b.empty(slot(m))
		t.len--
		return
	}
	b, in := t.locate(hash, at)
	if b == nil {
		return
	}
	b.empty(in)
	t.len--
	for ; t.bucket(hash) != b; hash++ {
		t.bucket(hash).tags[1] -= oneOver
	}
}

// locate returns where a record is in the buckets, nil when it is not there.
func (t *table) locate(hash uint64, at int32) (b *bucket, in uint) {
	for i := range uint64(len(t.buckets)) {
		b := t.bucket(hash + i)
		for m := b.match(tag(hash)); m != 0; m &= m - 1 {
			if in := slot(m); b.at[in] == at {
				return b, in
			}
		}
		if !b.over() {
			break
		}
	}
	return nil, 0
}

// due reports whether tidy has to be called.
func (t *table) due() bool { return t.former != nil || t.len > bucketFill*len(t.buckets) }

// tidy begins a larger table, or moves the next records into it.
func (t *table) tidy(s *slab) {
	if t.len > bucketFill*len(t.buckets) {
		t.grow(s)
	}
	if t.puts++; t.puts%(ahead/4) == 0 { // of 4 n records that fit, n are here when all of those before have been moved
		t.move(s)
	}
}

func (t *table) grow(s *slab) {
	for t.former != nil {
		t.move(s)
	}
	size := 2 * len(t.buckets)
	if size < quickSize {
		size *= 2
	}
	t.former, t.moved, t.last = t.buckets, 0, s.used
	t.buckets, t.len = make([]bucket, size), 0
}

// move moves the next records, in their own order, which the processor foresees.
func (t *table) move(s *slab) {
	first := t.moved
	t.moved = min(first+ahead, t.last)
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
		if b, _ := t.locate(hash, at); b == nil { // it is there when it came since
			t.insert(hash, at)
		}
	}
	if t.moved == t.last {
		t.former = nil
	}
}

// touch loads the first bucket of each of some hashes, one after the other and nothing between them, so that the misses overlap.
func (t *table) touch(hashes []uint64) (sink uint64) {
	for _, hash := range hashes {
		sink += t.bucket(hash).tags[0]
	}
	if t.former != nil {
		for _, hash := range hashes {
			sink += t.former[hash&uint64(len(t.former)-1)].tags[0]
		}
	}
	return sink
}

// appendLikely appends the record that a hash's bucket has under its tag, if any: most often the one that find returns.
func (t *table) appendLikely(records []int32, hash uint64) []int32 {
	b := t.bucket(hash)
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
