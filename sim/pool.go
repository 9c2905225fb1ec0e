package sim

import (
	"fmt"
	"iter"
	"slices"
)

// BlockID numbers a physical block of a pool.
type BlockID uint32

// nullBlock is never handed out: vLLM keeps it as a placeholder. Here it also closes the ring of the free queue.
const nullBlock BlockID = 0

// chunkBlocks is how many blocks come into being at a time. vLLM makes all of them at start; a pool of 20 million of
// which a run uses a third should not cost the memory of all.
const chunkBlocks = 1 << 16

// BlockPool is a fixed number of physical blocks, as vLLM's BlockPool is. A block is in use (by one request or, shared,
// by several) or free; a free one may still be cached: it keeps its content and its hash until it is taken for something
// else. The free queue is in LRU order; before it stands what is free and not cached. Several physical blocks may be
// cached under one hash, since vLLM does not deduplicate.
//
// It is not safe for concurrent use. Misuse (a block freed twice, more blocks taken than are free) panics.
type BlockPool struct {
	blocks  int // all of them, the null block included
	evicted func(hash uint64)

	chunks [][]poolBlock
	spare  []BlockID // free and not cached, the next to be taken last; they stand before those that were never used
	fresh  BlockID   // blocks from here on were never used; they stand before the queue, in order
	queued int       // blocks in the queue
	cached int       // blocks with a hash
	first  map[uint64]BlockID
}

// poolBlock takes 32 bytes. Links that lead nowhere are to the null block.
type poolBlock struct {
	hash         uint64
	refs         int32
	prev, next   BlockID // in the free queue
	older, newer BlockID // ring of the blocks cached under the same hash, from the oldest on
	cached       bool
}

// NewBlockPool returns a pool of that many physical blocks, of which one is the null block. It calls evicted for every
// cached block that it takes for something else.
func NewBlockPool(blocks int, evicted func(hash uint64)) *BlockPool {
	p := &BlockPool{blocks: blocks, evicted: evicted, fresh: 1, first: make(map[uint64]BlockID)}
	p.grow()
	return p
}

// Usable returns how many blocks requests can hold together.
func (p *BlockPool) Usable() int { return p.blocks - 1 }

// Free returns how many blocks can be allocated, those that are cached included.
func (p *BlockPool) Free() int { return len(p.spare) + p.blocks - int(p.fresh) + p.queued }

// Cached returns how many blocks are cached, in use or free.
func (p *BlockPool) Cached() int { return p.cached }

// Lookup returns the block cached longest under a hash.
func (p *BlockPool) Lookup(hash uint64) (BlockID, bool) {
	id, ok := p.first[hash]
	return id, ok
}

// InUse reports whether any request holds a block.
func (p *BlockPool) InUse(id BlockID) bool { return p.at(id).refs > 0 }

// Touch adds a holder to a cached block that [BlockPool.Lookup] found; a free one leaves the queue.
func (p *BlockPool) Touch(id BlockID) {
	b := p.at(id)
	if b.refs == 0 {
		p.unlink(b)
	}
	b.refs++
}

// Allocate appends n blocks to dst, each with one holder: the least recently used first. It panics when n exceeds Free.
func (p *BlockPool) Allocate(dst []BlockID, n int) []BlockID {
	if n > p.Free() {
		panic(fmt.Sprintf("sim: BlockPool.Allocate: %d blocks wanted, %d free", n, p.Free()))
	}
	for range n {
		id := p.pop()
		p.at(id).refs = 1
		dst = append(dst, id)
	}
	return dst
}

// Cache gives a block in use its hash: from now on it can be found.
func (p *BlockPool) Cache(id BlockID, hash uint64) {
	b := p.at(id)
	if b.cached || b.refs == 0 {
		panic(fmt.Sprintf("sim: BlockPool.Cache: block %d is cached already, or free", id))
	}
	b.hash, b.cached = hash, true
	p.cached++
	head, ok := p.first[hash]
	if !ok {
		p.first[hash] = id
		b.older, b.newer = id, id
		return
	}
	oldest := p.at(head)
	b.older, b.newer = oldest.older, head
	p.at(oldest.older).newer = id
	oldest.older = id
}

// Release takes one holder from each of a request's blocks, the last block first: so that of a prefix that nobody uses
// the tail goes before the head. What is not cached is taken again first of all.
func (p *BlockPool) Release(ids []BlockID) {
	spares := len(p.spare)
	for i := len(ids) - 1; i >= 0; i-- {
		b := p.at(ids[i])
		if b.refs <= 0 {
			panic(fmt.Sprintf("sim: BlockPool.Release: block %d is free already", ids[i]))
		}
		switch b.refs--; {
		case b.refs > 0:
		case b.cached:
			p.push(ids[i], b)
		default:
			p.spare = append(p.spare, ids[i])
		}
	}
	slices.Reverse(p.spare[spares:])
}

// Clear forgets every hash, as vLLM's reset_prefix_cache does; it refuses while any block is in use. The order of the
// free queue stays.
func (p *BlockPool) Clear() bool {
	if p.Free() != p.Usable() {
		return false
	}
	for id := BlockID(1); id < p.fresh; id++ {
		p.at(id).cached = false
	}
	p.cached = 0
	p.first = make(map[uint64]BlockID)
	return true
}

// Copies yields every hash that is cached and how many blocks hold it, in no order.
func (p *BlockPool) Copies() iter.Seq2[uint64, int] {
	return func(yield func(uint64, int) bool) {
		for hash, head := range p.first {
			n := 1
			for id := p.at(head).newer; id != head; id = p.at(id).newer {
				n++
			}
			if !yield(hash, n) {
				return
			}
		}
	}
}

func (p *BlockPool) at(id BlockID) *poolBlock { return &p.chunks[id/chunkBlocks][id%chunkBlocks] }

func (p *BlockPool) grow() {
	rest := p.blocks - len(p.chunks)*chunkBlocks
	p.chunks = append(p.chunks, make([]poolBlock, min(rest, chunkBlocks)))
}

// pop takes the head of the queue; a block that is cached there loses its hash.
func (p *BlockPool) pop() BlockID {
	if last := len(p.spare) - 1; last >= 0 {
		id := p.spare[last]
		p.spare = p.spare[:last]
		return id
	}
	if int(p.fresh) < p.blocks {
		id := p.fresh
		if int(id) == len(p.chunks)*chunkBlocks {
			p.grow()
		}
		p.fresh++
		return id
	}
	id := p.at(nullBlock).next
	b := p.at(id)
	p.unlink(b)
	if b.cached {
		p.evict(id, b)
	}
	return id
}

func (p *BlockPool) evict(id BlockID, b *poolBlock) {
	switch {
	case b.newer == id:
		delete(p.first, b.hash)
	default:
		p.at(b.older).newer = b.newer
		p.at(b.newer).older = b.older
		if p.first[b.hash] == id {
			p.first[b.hash] = b.newer
		}
	}
	b.cached = false
	p.cached--
	p.evicted(b.hash)
}

func (p *BlockPool) push(id BlockID, b *poolBlock) {
	end := p.at(nullBlock)
	b.prev, b.next = end.prev, nullBlock
	p.at(end.prev).next = id
	end.prev = id
	p.queued++
}

func (p *BlockPool) unlink(b *poolBlock) {
	p.at(b.prev).next = b.next
	p.at(b.next).prev = b.prev
	p.queued--
}
