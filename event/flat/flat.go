// Package flat has the table that the prefix index is made of: 64-bit keys to 32-bit values, twelve bytes a slot and no pointer
// among them.
//
// A page is a table of its own, of buckets of five slots, a cache line each. A key is in one of two buckets, so that every operation
// looks at two lines (two-choice hashing; where both are full, one of their keys moves to its other bucket). A page that is full moves to
// a larger one, and the largest splits in two; a directory finds the page by the hash's upper bits (extendible hashing). Those bits are warped, so that pages at one end of the directory hold twice as many keys as at the other:
// they grow one after the other, not all at once, and the bytes a key stay the same while a table grows (spiral storage;
// Martin, 1979).
package flat

import (
	"hash/maphash"
	"iter"
	"unsafe"
)

const (
	bucketSlots = 5
	maxDepth    = 24 // bits of the directory: 16 M pages
)

// sizes are how many buckets a page can have. The largest splits into two of splitSize.
var sizes = [...]uint16{1, 2, 4, 8, 16, 32, 64, 90}

const (
	splitSize  = 6 // of sizes
	maxBuckets = 90
)

// bucket is a cache line of slots.
type bucket struct {
	slots [bucketSlots]slot
	_     uint32
}

// BucketSize is the size of what pages are made of, in bytes.
const BucketSize = int(unsafe.Sizeof(bucket{}))

// slot is a key under its hash, and its value; a value of 0 makes it empty.
type slot struct {
	lower, upper uint32
	value        uint32
}

// page is a run of buckets, and how many upper bits all of its keys share.
type page struct {
	first *bucket
	size  uint8 // of sizes
	depth uint8
}

func (p *page) buckets() []bucket { return unsafe.Slice(p.first, sizes[p.size]) }

// at returns a bucket, which the page has.
func (p *page) at(i uint32) *bucket {
	return (*bucket)(unsafe.Add(unsafe.Pointer(p.first), uintptr(i)*unsafe.Sizeof(bucket{})))
}

// places returns where the two buckets of a hash are, which are one in a page of one.
func (p *page) places(lower uint32) (uint32, uint32) {
	n := uint64(sizes[p.size])
	return uint32(uint64(lower) * n >> 32), uint32(uint64(lower*0x9e3779b1) * n >> 32)
}

// homes returns the two buckets of a hash.
func (p *page) homes(lower uint32) (*bucket, *bucket) {
	i, j := p.places(lower)
	return p.at(i), p.at(j)
}

// Memory is where pools take their memory from: zeroed, a multiple of 64 bytes, and aligned to 64, never given back while a pool that took it is in use.
type Memory func(bytes int) unsafe.Pointer

// Pool hands out pages to maps that one goroutine owns.
type Pool struct {
	memory Memory
	free   [len(sizes)][]*bucket
	bytes  int
	idle   int
	seed   uint64
}

// NewPool returns a pool; nil memory is the heap.
func NewPool(memory Memory) *Pool {
	if memory == nil {
		memory = func(bytes int) unsafe.Pointer {
			return unsafe.Pointer(unsafe.SliceData(make([]bucket, bytes/BucketSize)))
		}
	}
	return &Pool{memory: memory, seed: maphash.String(maphash.MakeSeed(), "")}
}

// Bytes returns how much memory the pool took, and how much of it is in no map.
func (p *Pool) Bytes() (taken, idle int) { return p.bytes, p.idle }

func (p *Pool) take(size uint8) *bucket {
	free := &p.free[size]
	bytes := int(sizes[size]) * BucketSize
	if n := len(*free); n > 0 {
		first := (*free)[n-1]
		*free = (*free)[:n-1]
		p.idle -= bytes
		return first
	}
	p.bytes += bytes
	return (*bucket)(p.memory(bytes))
}

func (p *Pool) give(first *bucket, size uint8) {
	clear(unsafe.Slice(first, sizes[size]))
	p.free[size] = append(p.free[size], first)
	p.idle += int(sizes[size]) * BucketSize
}

// hash spreads a key over 64 bits, one to one, with a seed that nobody outside knows.
func (p *Pool) hash(key uint64) uint64 {
	h := key ^ p.seed
	h ^= h >> 33
	h *= 0xff51afd7ed558ccd
	h ^= h >> 33
	h *= 0xc4ceb9fe1a85ec53
	return h ^ h>>33
}

// key is the inverse of hash.
func (p *Pool) key(h uint64) uint64 {
	h ^= h >> 33
	h *= 0x9cb4b2f8129337db
	h ^= h >> 33
	h *= 0x4f74430c22a54005
	h ^= h >> 33
	return h ^ p.seed
}

// Map maps 64-bit keys to 32-bit values other than 0. One goroutine owns it.
type Map struct {
	pool  *Pool
	dir   []page // by the upper bits of the warped hash
	shift uint8  // 32 − bits of the directory
	len   int
	bytes int

	drained int // buckets of the last page, by Drain
}

// NewMap returns an empty map of a pool's pages.
func NewMap(pool *Pool) *Map { return &Map{pool: pool, shift: 32} }

// Len returns how many keys there are.
func (m *Map) Len() int { return m.len }

// Bytes returns how much memory the pages take.
func (m *Map) Bytes() int { return m.bytes }

// Warp maps the upper half of a hash to where in the directory it lies, in order: twice as dense at the end as at the beginning.
func Warp(h uint64) uint32 {
	x := h >> 32
	return uint32(x + x*(1<<32-x)>>32/3)
}

// AppendLines appends the cache lines that the next operation on a key will look at, for Prefetch. They may be another's by
// then.
func (m *Map) AppendLines(lines []unsafe.Pointer, key uint64) []unsafe.Pointer {
	if len(m.dir) == 0 {
		return lines
	}
	h := m.pool.hash(key)
	b, c := m.dir[Warp(h)>>m.shift].homes(uint32(h))
	return append(lines, unsafe.Pointer(b), unsafe.Pointer(c))
}

// find returns the slot of a hash and its bucket, nil when it is not there.
func (m *Map) find(h uint64) (*slot, *bucket) {
	p := &m.dir[Warp(h)>>m.shift]
	b, c := p.homes(uint32(h))
	if s, _ := b.search(h); s != nil {
		return s, b
	}
	s, _ := c.search(h)
	return s, c
}

// Get returns the value of a key, 0 when it is not there.
func (m *Map) Get(key uint64) uint32 {
	if m.len == 0 {
		return 0
	}
	if s, _ := m.find(m.pool.hash(key)); s != nil {
		return s.value
	}
	return 0
}

// Entry returns the value of a key, to be written; it is 0, and has to be written, when the key was not there. It is
// valid until the map changes.
func (m *Map) Entry(key uint64) *uint32 {
	h := m.pool.hash(key)
	if len(m.dir) == 0 {
		m.dir = []page{{first: m.pool.take(0)}}
		m.bytes = BucketSize
	}
	p := &m.dir[Warp(h)>>m.shift]
	b, c := p.homes(uint32(h))
	s, free := b.search(h)
	if s != nil {
		return &s.value
	}
	other, room := c.search(h)
	if other != nil {
		return &other.value
	}
	m.len++
	if free >= 0 && (free <= room || room < 0) { // slots fill from the first on: the emptier bucket
		s = &b.slots[free]
	} else if room >= 0 {
		s = &c.slots[room]
	} else {
		for s = p.make(b, c); s == nil; s = m.dir[Warp(h)>>m.shift].open(uint32(h)) {
			m.grow(h)
		}
	}
	s.lower, s.upper = uint32(h), uint32(h>>32)
	return &s.value
}

// search returns the slot of a hash, or else the place of the first empty slot, −1 when there is none. Behind that all are empty.
func (b *bucket) search(h uint64) (*slot, int) {
	lower, upper := uint32(h), uint32(h>>32)
	for i := range b.slots {
		s := &b.slots[i]
		if s.value == 0 {
			return nil, i
		}
		if s.lower == lower && s.upper == upper {
			return s, 0
		}
	}
	return nil, -1
}

// open returns an empty slot for a hash, nil when the page is full.
func (p *page) open(lower uint32) *slot {
	b, c := p.homes(lower)
	s, t := b.empty(), c.empty()
	switch {
	case s >= 0 && s <= t || t < 0 && s >= 0: // slots fill from the first on: the emptier bucket
		return &b.slots[s]
	case t >= 0:
		return &c.slots[t]
	}
	return p.make(b, c)
}

// make empties a slot in one of two full buckets, nil when the page is full.
func (p *page) make(b, c *bucket) *slot {
	if moved := p.push(b); moved != nil {
		return moved
	}
	return p.push(c)
}

// empty returns the place of the first empty slot, −1 when there is none.
func (b *bucket) empty() int {
	for i := range b.slots {
		if b.slots[i].value == 0 {
			return i
		}
	}
	return -1
}

// push moves a key of a full bucket to its other bucket and returns the slot that it left, nil when no key can move.
func (p *page) push(b *bucket) *slot {
	for i := range b.slots {
		s := &b.slots[i]
		to, other := p.homes(s.lower)
		if to == b {
			to = other
		}
		if j := to.empty(); j >= 0 {
			to.slots[j], *s = *s, slot{}
			return s
		}
	}
	return nil
}

// Delete removes a key and returns its value, 0 when it was not there.
func (m *Map) Delete(key uint64) uint32 {
	if m.len == 0 {
		return 0
	}
	s, b := m.find(m.pool.hash(key))
	if s == nil {
		return 0
	}
	value := s.value
	last := len(b.slots) - 1
	for b.slots[last].value == 0 {
		last--
	}
	*s = b.slots[last]
	b.slots[last] = slot{}
	m.len--
	return value
}

// grow makes room in the page of a hash: a larger one, or two.
func (m *Map) grow(h uint64) {
	old := m.dir[Warp(h)>>m.shift]
	if int(old.size) < len(sizes)-1 {
		p := page{size: old.size + 1, depth: old.depth}
		for ; ; p.size++ { // the next size holds all, almost surely
			if p.first = m.pool.take(p.size); p.fill(old) {
				break
			}
			m.pool.give(p.first, p.size)
			if int(p.size) == len(sizes)-1 {
				m.split(h, old)
				return
			}
		}
		m.replace(h, p)
		m.account(p.size, +1)
		m.release(old)
		return
	}
	m.split(h, old)
}

func (m *Map) account(size uint8, sign int) { m.bytes += sign * int(sizes[size]) * BucketSize }

func (m *Map) release(p page) {
	m.account(p.size, -1)
	m.pool.give(p.first, p.size)
}

// filler puts keys into a page that was empty.
type filler struct {
	page  *page
	count [maxBuckets]uint8 // slots taken, by bucket
}

// add puts a key in, and reports whether there was room.
func (f *filler) add(s *slot) bool {
	i, j := f.page.places(s.lower)
	if f.count[j] < f.count[i] {
		i = j
	}
	if n := f.count[i]; n < bucketSlots {
		f.page.at(i).slots[n] = *s
		f.count[i]++
		return true
	}
	return f.push(i, s) || f.push(j, s)
}

// push puts a key into a full bucket, one of whose keys goes to its other bucket, and reports whether any could.
func (f *filler) push(i uint32, s *slot) bool {
	b := f.page.at(i)
	for k := range b.slots {
		p, q := f.page.places(b.slots[k].lower)
		if p == i {
			p = q
		}
		if n := f.count[p]; n < bucketSlots {
			f.page.at(p).slots[n], b.slots[k] = b.slots[k], *s
			f.count[p]++
			return true
		}
	}
	return false
}

// fill puts all keys of some pages into an empty one, and reports whether they fit.
func (p *page) fill(pages ...page) bool {
	f := filler{page: p}
	for k := range pages {
		buckets := pages[k].buckets()
		for i := range buckets {
			for j := range buckets[i].slots {
				if s := &buckets[i].slots[j]; s.value != 0 && !f.add(s) {
					return false
				}
			}
		}
	}
	return true
}

// replace puts a page in the place of the one that has a hash.
func (m *Map) replace(h uint64, p page) {
	width := len(m.dir) >> p.depth
	first := int(Warp(h)>>m.shift) &^ (width - 1)
	for i := range width {
		m.dir[first+i] = p
	}
}

// split puts the keys of a page into two, by the next bit of the warped hash.
func (m *Map) split(h uint64, old page) {
	if old.depth == 32-m.shift {
		if old.depth == maxDepth {
			panic("flat: too many keys for the directory")
		}
		dir := make([]page, 2*len(m.dir))
		for i, p := range m.dir {
			dir[2*i], dir[2*i+1] = p, p
		}
		m.dir, m.shift = dir, m.shift-1
	}
	size := uint8(splitSize)
	var halves [2]page
	for halves = m.halve(old, size); halves[0].first == nil; halves = m.halve(old, size) {
		size++ // the largest holds what the old page held
	}
	width := len(m.dir) >> old.depth
	first := int(Warp(h)>>m.shift) &^ (width - 1)
	for i := range width {
		m.dir[first+i] = halves[i/((width+1)/2)]
	}
	m.release(old)
}

// halve divides the keys of a page among two of a size, by the next bit of the warped hash. It returns no pages where they do not
// fit.
func (m *Map) halve(old page, size uint8) (halves [2]page) {
	var f [2]filler
	for i := range halves {
		halves[i] = page{size: size, depth: old.depth + 1, first: m.pool.take(size)}
		m.account(size, +1)
		f[i].page = &halves[i]
	}
	buckets := old.buckets()
	for i := range buckets {
		for j := range buckets[i].slots {
			s := &buckets[i].slots[j]
			if s.value == 0 || f[Warp(s.hash())>>(31-old.depth)&1].add(s) {
				continue
			}
			m.release(halves[0])
			m.release(halves[1])
			return [2]page{}
		}
	}
	return halves
}

func (s *slot) hash() uint64 { return uint64(s.upper)<<32 | uint64(s.lower) }

// From yields the keys and values of one page, the one that a place lies in, from that place on, and returns the place behind it:
// 0 is the first place, Done the one behind the last. A walk that takes up where it stopped meets every key once that was there
// all the while, whatever else came and went.
func (m *Map) From(place uint64, yield func(key uint64, value uint32) bool) (next uint64) {
	i := int(place >> m.shift)
	if i >= len(m.dir) {
		return Done
	}
	p := &m.dir[i]
	width := uint64(1) << (32 - p.depth)
	for i := range p.buckets() {
		b := p.at(uint32(i))
		for j := range b.slots {
			s := &b.slots[j]
			if s.value != 0 && uint64(Warp(s.hash())) >= place && !yield(m.pool.key(s.hash()), s.value) {
				return place&^(width-1) + width
			}
		}
	}
	return place&^(width-1) + width
}

// PageEnd returns the place behind the page that a place lies in.
func (m *Map) PageEnd(place uint64) uint64 {
	i := int(place >> m.shift)
	if i >= len(m.dir) {
		return Done
	}
	width := uint64(1) << (32 - m.dir[i].depth)
	return place&^(width-1) + width
}

// Range yields the keys and values between two places that lie in one page: no further apart than PageEnd says. The place of a key is
// the same in all maps of a pool.
func (m *Map) Range(place, end uint64, yield func(key uint64, value uint32)) {
	m.From(place, func(key uint64, value uint32) bool {
		if uint64(Warp(m.pool.hash(key))) < end {
			yield(key, value)
		}
		return true
	})
}

// Done is the place behind the last key.
const Done = uint64(1) << 32

// All yields all keys and values. The map must not change meanwhile.
func (m *Map) All() iter.Seq2[uint64, uint32] {
	return func(yield func(uint64, uint32) bool) {
		more := true
		for place := uint64(0); place < Done && more; {
			place = m.From(place, func(key uint64, value uint32) bool {
				more = yield(key, value)
				return more
			})
		}
	}
}

// Clear removes all keys and gives the pages back.
func (m *Map) Clear() {
	for i := 0; i < len(m.dir); {
		p := m.dir[i]
		i += len(m.dir) >> p.depth
		m.release(p)
	}
	m.dir, m.shift, m.len = nil, 32, 0
}

// Drain removes up to so many keys and gives the memory back that they leave, and reports whether any are left. The map is good for
// nothing else any more.
func (m *Map) Drain(most int, removed func(key uint64, value uint32)) bool {
	for len(m.dir) > 0 && most > 0 {
		p := &m.dir[len(m.dir)-1]
		buckets := p.buckets()
		for ; m.drained < len(buckets) && most > 0; m.drained++ {
			for j := range buckets[m.drained].slots {
				s := &buckets[m.drained].slots[j]
				if s.value != 0 {
					removed(m.pool.key(s.hash()), s.value)
					*s = slot{}
					m.len--
					most--
				}
			}
		}
		if m.drained < len(buckets) {
			return true
		}
		m.drained = 0
		last := *p
		m.dir = m.dir[:len(m.dir)-(1<<(32-m.shift-last.depth))]
		m.release(last)
	}
	return len(m.dir) > 0
}

// Shrink moves the keys of pages that are mostly empty into smaller ones, and joins those that fit in one. It looks at one page, that
// of a place, and returns the place behind it, as From does.
func (m *Map) Shrink(place uint64) (next uint64) {
	i := int(place >> m.shift)
	if i >= len(m.dir) {
		return Done
	}
	p := m.dir[i]
	next = place&^(uint64(1)<<(32-p.depth)-1) + uint64(1)<<(32-p.depth)
	width := len(m.dir) >> p.depth
	first := i &^ (width - 1)
	count := p.count()
	if p.depth > 0 && first&width != 0 && int(p.size) <= splitSize {
		buddy := m.dir[first-width]
		if buddy.depth == p.depth && count+buddy.count() < int(sizes[splitSize])*bucketSlots/2 {
			joined := page{size: splitSize, depth: p.depth - 1, first: m.pool.take(splitSize)}
			if joined.fill(p, buddy) {
				for j := first - width; j < first+width; j++ {
					m.dir[j] = joined
				}
				m.account(joined.size, +1)
				m.release(p)
				m.release(buddy)
				m.narrow()
				return next
			}
			m.pool.give(joined.first, joined.size)
		}
	}
	if p.size > 0 && count < int(sizes[p.size-1])*bucketSlots/2 {
		smaller := page{size: p.size - 1, depth: p.depth, first: m.pool.take(p.size - 1)}
		if !smaller.fill(p) {
			m.pool.give(smaller.first, smaller.size)
			return next
		}
		for j := first; j < first+width; j++ {
			m.dir[j] = smaller
		}
		m.account(smaller.size, +1)
		m.release(p)
	}
	return next
}

// narrow halves the directory while no page needs its last bit.
func (m *Map) narrow() {
	for len(m.dir) > 1 {
		for _, p := range m.dir {
			if p.depth == 32-m.shift {
				return
			}
		}
		half := make([]page, len(m.dir)/2)
		for i := range half {
			half[i] = m.dir[2*i]
		}
		m.dir, m.shift = half, m.shift+1
	}
}

func (p *page) count() (n int) {
	for i := range p.buckets() {
		b := p.at(uint32(i))
		for j := range b.slots {
			if b.slots[j].value != 0 {
				n++
			}
		}
	}
	return n
}
