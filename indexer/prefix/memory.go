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
	spare []*chunk
	age   atomic.Uint32 // grows with the messages that were applied
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

// chunk returns a zeroed chunk.
func (m *memory) chunk() *chunk {
	if n := len(m.spare); n > 0 {
		c := m.spare[n-1]
		m.spare = m.spare[:n-1]
		return c
	}
	return (*chunk)(m.take(chunkBytes))
}

// giveChunk takes a chunk back. Its pages go back to the system.
func (m *memory) giveChunk(c *chunk) {
	for i := range c.prefixes {
		atomic.StoreUint64(&c.prefixes[i], 0)
		atomic.StoreUint32(&c.owners[i], 0)
		c.holders[i], c.depths[i] = 0, 0
	}
	clear(c.free[:])
	clear(c.tabled[:])
	c.blocks, c.listed, c.leaving = 0, false, false
	atomic.StoreUint32(&c.stamp, 0)
	m.slabs.giveBack(unsafe.Slice((*byte)(unsafe.Pointer(c)), chunkBytes))
	m.spare = append(m.spare, c)
}
