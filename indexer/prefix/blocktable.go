package prefix

import (
	"math/bits"
	"sync/atomic"
	"unsafe"

	"kvstrata/event"
	"kvstrata/event/flat"
)

const (
	tagSlots   = 12 // a bucket's
	maxTables  = 24 // bits of a directory
	tableSizes = 8  // how many sizes pages have
)

// pageSizes are how many buckets a page of a table can have. The largest splits into two of pageSizes[pageSplit].
var pageSizes = [tableSizes]uint32{1, 2, 4, 8, 16, 32, 64, 90}

const (
	pageSplit  = 6
	maxBuckets = 90 // buckets
)

// tagBucket is a cache line of numbers of blocks, each beside eight bits of its hash.
type tagBucket struct {
	ids     [tagSlots]uint32 // 0 is empty
	tags    [tagSlots / 4]uint32
	spilled uint32 // numbers that would lie here, if there had been room
}

// tablePage is a table of its own, as flat's pages are; its numbers lie in their first bucket, or in their second.
type tablePage struct {
	buckets []tagBucket
	size    uint8 // of pageSizes
	depth   uint8 // upper bits that all of its hashes share
}

// directory finds the page of a hash by its warped upper bits; see flat.
type directory struct {
	shift uint8
	pages []atomic.Pointer[tablePage]
}

// blockTable maps prefix hashes to numbers of blocks. One goroutine writes, others may read meanwhile: what they find then can be
// wrong, and is thrown away with the change that it was read in.
type blockTable struct {
	dir    atomic.Pointer[directory]
	memory *memory
	old    []*tablePage // replaced since the change was published: readers may be reading them
	free   [tableSizes][][]tagBucket
	len    int
	bytes  int
	seed   uint64
}

func newBlockTable(m *memory, seed uint64) *blockTable {
	t := &blockTable{memory: m, seed: seed}
	t.clear()
	return t
}

func (t *blockTable) clear() {
	d := &directory{shift: 32, pages: make([]atomic.Pointer[tablePage], 1)}
	d.pages[0].Store(&tablePage{buckets: t.take(0)})
	t.dir.Store(d)
}

func (t *blockTable) take(size uint8) []tagBucket {
	n := int(pageSizes[size])
	t.bytes += n * int(unsafe.Sizeof(tagBucket{}))
	if k := len(t.free[size]); k > 0 {
		buckets := t.free[size][k-1]
		t.free[size] = t.free[size][:k-1]
		return buckets
	}
	return unsafe.Slice((*tagBucket)(t.memory.take(n*int(unsafe.Sizeof(tagBucket{})))), n)
}

func (t *blockTable) give(p *tablePage) {
	for i := range p.buckets {
		b := &p.buckets[i]
		for j := range b.ids {
			atomic.StoreUint32(&b.ids[j], 0)
		}
		for j := range b.tags {
			atomic.StoreUint32(&b.tags[j], 0)
		}
		atomic.StoreUint32(&b.spilled, 0)
	}
	t.free[p.size] = append(t.free[p.size], p.buckets)
	t.bytes -= len(p.buckets) * int(unsafe.Sizeof(tagBucket{}))
}

// reap gives the pages back that were replaced.
func (t *blockTable) reap() {
	for _, p := range t.old {
		t.give(p)
	}
	clear(t.old)
	t.old = t.old[:0]
}

// hash spreads a prefix hash: they are evenly spread already, unless somebody made them.
func (t *blockTable) hash(p event.PrefixHash) uint64 {
	h := (uint64(p) ^ t.seed) * 0x9fb21c651e98df25
	return h ^ h>>29
}

func (d *directory) page(h uint64) *tablePage { return d.pages[flat.Warp(h)>>d.shift].Load() }

// span returns where the page of a hash stands, if it has so many bits in common.
func (d *directory) span(h uint64, depth uint8) []atomic.Pointer[tablePage] {
	width := len(d.pages) >> depth
	first := int(flat.Warp(h)>>d.shift) &^ (width - 1)
	return d.pages[first : first+width]
}

func (p *tablePage) homes(h uint64) (first, second *tagBucket) {
	n := uint64(len(p.buckets))
	lower := uint32(h)
	return &p.buckets[uint64(lower)*n>>32], &p.buckets[uint64(lower*0x9e3779b1)*n>>32]
}

// appendLine appends the cache line that the next operation on a prefix looks at first, and mostly at no other.
func (t *blockTable) appendLine(lines []unsafe.Pointer, p event.PrefixHash) []unsafe.Pointer {
	h := t.hash(p)
	first, _ := t.dir.Load().page(h).homes(h)
	return append(lines, unsafe.Pointer(first))
}

// find returns the number of a block, 0 when it is not there.
func (t *blockTable) find(p event.PrefixHash, f *forest) uint32 {
	h := t.hash(p)
	first, second := t.dir.Load().page(h).homes(h)
	tag := uint32(byte(h>>3)) * 0x01010101
	if id := first.find(tag, p, f); id != 0 || atomic.LoadUint32(&first.spilled) == 0 {
		return id
	}
	return second.find(tag, p, f)
}

func (b *tagBucket) find(tag uint32, p event.PrefixHash, f *forest) uint32 {
	for w := range b.tags {
		x := atomic.LoadUint32(&b.tags[w]) ^ tag
		for hit := (x - 0x01010101) & ^x & 0x80808080; hit != 0; hit &= hit - 1 {
			id := atomic.LoadUint32(&b.ids[4*w+bits.TrailingZeros32(hit)/8])
			if id != 0 && f.prefix(id) == p {
				return id
			}
		}
	}
	return 0
}

// put enters a block, which must not be there.
func (t *blockTable) put(p event.PrefixHash, id uint32, f *forest) {
	h := t.hash(p)
	for !t.dir.Load().page(h).put(h, id, t, f) {
		t.grow(h, f)
	}
	t.len++
}

// put reports whether there was room.
func (p *tablePage) put(h uint64, id uint32, t *blockTable, f *forest) bool {
	first, second := p.homes(h)
	tag := byte(h >> 3)
	if first.add(tag, id) {
		return true
	}
	if first != second && second.add(tag, id) {
		atomic.StoreUint32(&first.spilled, first.spilled+1)
		return true
	}
	// One of the numbers that are at home here may have room elsewhere.
	for i := range first.ids {
		other := t.hash(f.prefix(first.ids[i]))
		home, away := p.homes(other)
		if home != first || away == first || !away.add(byte(other>>3), first.ids[i]) {
			continue
		}
		atomic.StoreUint32(&first.spilled, first.spilled+1)
		first.set(i, tag, id)
		return true
	}
	return false
}

func (b *tagBucket) add(tag byte, id uint32) bool {
	for i := range b.ids {
		if b.ids[i] == 0 {
			b.set(i, tag, id)
			return true
		}
	}
	return false
}

// taken returns how many places are taken; they are so from the first on while a page is filled.
func (b *tagBucket) taken() (n uint8) {
	for int(n) < tagSlots && b.ids[n] != 0 {
		n++
	}
	return n
}

func (b *tagBucket) set(i int, tag byte, id uint32) {
	shift := uint(i%4) * 8
	word := b.tags[i/4]&^(0xff<<shift) | uint32(tag)<<shift
	atomic.StoreUint32(&b.tags[i/4], word)
	atomic.StoreUint32(&b.ids[i], id)
}

// replace gives a block another number; 0 takes it out.
func (t *blockTable) replace(p event.PrefixHash, old, id uint32) {
	h := t.hash(p)
	first, second := t.dir.Load().page(h).homes(h)
	for _, b := range []*tagBucket{first, second} {
		for i := range b.ids {
			if b.ids[i] != old {
				continue
			}
			atomic.StoreUint32(&b.ids[i], id)
			if id == 0 {
				t.len--
				if b != first {
					atomic.StoreUint32(&first.spilled, first.spilled-1)
				}
			}
			return
		}
	}
	panic("prefix: a block is not in its table")
}

// grow makes room in the page of a hash: a larger one, or two.
func (t *blockTable) grow(h uint64, f *forest) {
	d := t.dir.Load()
	old := d.page(h)
	for size := int(old.size) + 1; size < tableSizes; size++ {
		page := &tablePage{buckets: t.take(uint8(size)), size: uint8(size), depth: old.depth}
		if page.fill(old, t, f, nil) {
			put(d.span(h, page.depth), page)
			t.old = append(t.old, old)
			return
		}
		t.give(page)
	}
	if old.depth == 32-d.shift {
		if old.depth == maxTables {
			panic("prefix: too many blocks for a table")
		}
		wide := &directory{shift: d.shift - 1, pages: make([]atomic.Pointer[tablePage], 2*len(d.pages))}
		for i := range d.pages {
			p := d.pages[i].Load()
			wide.pages[2*i].Store(p)
			wide.pages[2*i+1].Store(p)
		}
		t.dir.Store(wide)
		d = wide
	}
	span := d.span(h, old.depth)
	for half, part := range [][]atomic.Pointer[tablePage]{span[:len(span)/2], span[len(span)/2:]} {
		bit := 31 - old.depth
		mine := func(h uint64) bool { return flat.Warp(h)>>bit&1 == uint32(half) }
		page := &tablePage{size: pageSplit, depth: old.depth + 1}
		for page.buckets = t.take(page.size); !page.fill(old, t, f, mine); page.buckets = t.take(page.size) {
			t.give(page)
			page.size++ // the largest holds what the old page held
		}
		put(part, page)
	}
	t.old = append(t.old, old)
}

func put(span []atomic.Pointer[tablePage], page *tablePage) {
	for i := range span {
		span[i].Store(page)
	}
}

// fill puts the numbers of a page into an empty one, or those whose hashes are wanted, and reports whether they fit.
func (p *tablePage) fill(old *tablePage, t *blockTable, f *forest, wanted func(h uint64) bool) bool {
	lines := make([]unsafe.Pointer, 0, len(old.buckets)*tagSlots)
	for i := range old.buckets {
		for _, id := range old.buckets[i].ids {
			if id != 0 {
				lines = append(lines, unsafe.Pointer(&f.chunk(id).prefixes[id&(chunkBlocks-1)]))
			}
		}
	}
	flat.Prefetch(lines)
	var count [maxBuckets]uint8
	n := uint64(len(p.buckets))
	for i := range old.buckets {
		for _, id := range old.buckets[i].ids {
			if id == 0 {
				continue
			}
			h := t.hash(f.prefix(id))
			if wanted != nil && !wanted(h) {
				continue
			}
			if at := uint64(uint32(h)) * n >> 32; count[at] < tagSlots {
				p.buckets[at].set(int(count[at]), byte(h>>3), id)
				count[at]++
			} else if !p.put(h, id, t, f) {
				return false
			} else {
				for at := range p.buckets { // one went elsewhere
					count[at] = p.buckets[at].taken()
				}
			}
		}
	}
	return true
}
