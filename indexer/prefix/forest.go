package prefix

import (
	"math/bits"
	"sync/atomic"
	"unsafe"

	"kvstrata/event"
)

const (
	chunkBits   = 8
	chunkBlocks = 1 << chunkBits
)

// chunk is a piece of a forest's blocks. Blocks that were stored in one run mostly lie one behind the other.
type chunk struct {
	prefixes [chunkBlocks]uint64
	owners   [chunkBlocks]uint32 // ids of owner sets; 0 = no block here
	depths   [chunkBlocks]uint16 // blocks from the root, this one included; 0 = unknown
	free     [chunkBlocks / 64]uint64
	blocks   uint16
	listed   bool // among the chunks with room
}

// roomy is how many blocks must be free in a chunk before it is filled anew: runs broken up over many holes make slow lookups.
const roomy = chunkBlocks / 4

// forest is every block of a model that is cut in one way: the prefixes, each by a number, and who holds it. Prefixes with a
// common beginning share its blocks.
type forest struct {
	cut    variant
	table  *blockTable
	chunks atomic.Pointer[[]*chunk] // by the upper bits of a block's number
	memory *memory
	spare  []*chunk // that belong to no number yet
	room   []uint32 // chunks with room
	at     uint32   // where the next block goes, if it is free
	misses uint64   // what touching added up to, so that it is not left out
}

func newForest(cut variant, m *memory, seed uint64) *forest {
	f := &forest{cut: cut, memory: m, table: newBlockTable(m, seed)}
	f.chunks.Store(new([]*chunk))
	f.extend()
	c := f.chunk(0)
	c.free[0] &^= 1 // number 0 is none
	c.blocks = 1
	f.at = 1
	return f
}

// bytes returns how much memory the forest takes.
func (f *forest) bytes() int {
	return f.table.bytes + len(*f.chunks.Load())*int(unsafe.Sizeof(chunk{}))
}

// len returns how many blocks there are.
func (f *forest) len() int { return f.table.len }

func (f *forest) chunk(id uint32) *chunk { return (*f.chunks.Load())[id>>chunkBits] }

// prefix returns the prefix hash of a block; 0 where there is none.
func (f *forest) prefix(id uint32) event.PrefixHash {
	chunks := *f.chunks.Load()
	if i := int(id >> chunkBits); i < len(chunks) {
		return event.PrefixHash(atomic.LoadUint64(&chunks[i].prefixes[id&(chunkBlocks-1)]))
	}
	return 0
}

// owners returns the id of a block's owner set; 0 where there is none.
func (f *forest) owners(id uint32) uint32 {
	chunks := *f.chunks.Load()
	if i := int(id >> chunkBits); i < len(chunks) {
		return atomic.LoadUint32(&chunks[i].owners[id&(chunkBlocks-1)])
	}
	return 0
}

// depth returns how many blocks a prefix has; 0 when it is unknown.
func (f *forest) depth(id uint32) uint16 { return f.chunk(id).depths[id&(chunkBlocks-1)] }

// extend adds a chunk.
func (f *forest) extend() uint32 {
	var c *chunk
	if n := len(f.spare); n > 0 {
		c, f.spare = f.spare[n-1], f.spare[:n-1]
	} else {
		c = (*chunk)(f.memory.take(int(unsafe.Sizeof(chunk{}))))
	}
	for i := range c.free {
		c.free[i] = ^uint64(0)
	}
	old := *f.chunks.Load()
	chunks := append(old, c) // readers see no further than the length they have
	f.chunks.Store(&chunks)
	return uint32(len(old)) << chunkBits
}

// claim returns the number of a free place, behind the last one if that is free.
func (f *forest) claim() uint32 {
	c := f.chunk(f.at)
	i := f.at & (chunkBlocks - 1)
	for w := i / 64; w < uint32(len(c.free)); w++ {
		free := c.free[w]
		if w == i/64 {
			free &= ^uint64(0) << (i % 64)
		}
		if free != 0 {
			at := w*64 + uint32(bits.TrailingZeros64(free))
			c.free[w] &^= 1 << (at % 64)
			c.blocks++
			id := f.at&^(chunkBlocks-1) + at
			f.at = id
			if at < chunkBlocks-1 {
				f.at++
			}
			return id
		}
	}
	if f.at &^= chunkBlocks - 1; chunkBlocks-c.blocks < roomy {
		f.at = f.nextRoom()
	}
	return f.claim()
}

// nextRoom returns the first number of a chunk that has room.
func (f *forest) nextRoom() uint32 {
	for len(f.room) > 0 {
		n := f.room[len(f.room)-1]
		f.room = f.room[:len(f.room)-1]
		c := (*f.chunks.Load())[n]
		c.listed = false
		if chunkBlocks-c.blocks >= roomy {
			return n << chunkBits
		}
	}
	return f.extend()
}

// enter returns the number of a prefix, made with a depth if it was not there.
func (f *forest) enter(p event.PrefixHash, depth uint16) uint32 {
	if id := f.table.find(p, f); id != 0 {
		if c := f.chunk(id); depth != 0 && c.depths[id&(chunkBlocks-1)] == 0 {
			c.depths[id&(chunkBlocks-1)] = depth
		}
		return id
	}
	id := f.claim()
	c := f.chunk(id)
	atomic.StoreUint64(&c.prefixes[id&(chunkBlocks-1)], uint64(p))
	c.depths[id&(chunkBlocks-1)] = depth
	f.table.put(p, id, f)
	return id
}

// leave frees a block that nobody holds any more.
func (f *forest) leave(id uint32) {
	c := f.chunk(id)
	i := id & (chunkBlocks - 1)
	f.table.replace(event.PrefixHash(c.prefixes[i]), id, 0)
	atomic.StoreUint64(&c.prefixes[i], 0)
	atomic.StoreUint32(&c.owners[i], 0)
	c.free[i/64] |= 1 << (i % 64)
	c.blocks--
	if !c.listed && chunkBlocks-c.blocks >= roomy && id>>chunkBits != f.at>>chunkBits {
		c.listed = true
		f.room = append(f.room, id>>chunkBits)
	}
}
