package prefix

import (
	"runtime"
	"sync/atomic"
	"unsafe"
)

// memory is what an index's tables lie in: slabs outside of the collected heap, so that the collector neither walks them nor lets the
// heap grow by as much again before it looks. The slabs go when the index is collected.
type memory struct {
	rest  []byte
	next  int // size of the next slab
	taken atomic.Int64
	slabs *slabs
}

// slabs are what a memory maps; it outlives the index for a moment.
type slabs struct{ mapped [][]byte }

// The sizes of slabs. The largest is a huge page.
const (
	firstSlab = 64 << 10
	maxSlab   = 2 << 20
)

func newMemory(owner *Index) *memory {
	m := &memory{next: firstSlab, slabs: new(slabs)}
	runtime.AddCleanup(owner, func(s *slabs) { s.unmap() }, m.slabs)
	return m
}

// take returns zeroed memory, aligned to 64 bytes.
func (m *memory) take(bytes int) unsafe.Pointer {
	bytes = (bytes + 63) &^ 63
	if len(m.rest) < bytes {
		m.rest = m.slabs.grow(max(m.next, bytes))
		m.taken.Add(int64(len(m.rest)))
		m.next = min(2*m.next, maxSlab)
	}
	p := unsafe.Pointer(unsafe.SliceData(m.rest))
	m.rest = m.rest[bytes:]
	return p
}
