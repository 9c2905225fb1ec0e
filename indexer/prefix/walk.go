package prefix

import (
	"sync/atomic"

	"kvstrata/event"
)

// walker goes along a prompt in a forest. Blocks that were stored in one run lie one behind the other, so that a step is a comparison with
// what lies next; where it is not the next block, the table finds it. Whatever changes meanwhile, a walker stays within bounds; what
// it then finds is of no use.
type walker struct {
	forest *forest
	owners *ownerSets
	hint   uint32 // where the next block is, if it was stored in the same run
}

// next returns the owners of block i, and up to which block the following ones have the same; nil owners when the block is not there.
func (w *walker) next(prefixes []event.PrefixHash, i int) (to int, set *ownerSet) {
	id := w.hint
	if id == 0 || w.forest.prefix(id) != prefixes[i] {
		if id = w.forest.table.find(prefixes[i], w.forest); id == 0 {
			w.hint = 0
			return i, nil
		}
	}
	chunks := *w.forest.chunks.Load()
	n, at := int(id>>chunkBits), int(id&(chunkBlocks-1))
	c := chunks[n]
	w.forest.use(c)
	owners := atomic.LoadUint32(&c.owners[at])
	for to = i + 1; to < len(prefixes); to++ {
		if at++; at == chunkBlocks {
			if n++; n == len(chunks) {
				break
			}
			c, at = chunks[n], 0
		}
		if atomic.LoadUint64(&c.prefixes[at]) != uint64(prefixes[to]) || atomic.LoadUint32(&c.owners[at]) != owners {
			break
		}
	}
	w.hint = 0
	if n < len(chunks) && at < chunkBlocks {
		w.hint = uint32(n<<chunkBits | at)
	}
	return to, w.owners.at(owners)
}

// trail goes along a prompt block by block, also past those that nobody holds.
type trail struct {
	index    *Index
	forest   *forest // nil: nothing is there
	prefixes []event.PrefixHash
	next     int
	last     uint32 // number of the block before next; 0 = it is not there
	first    uint32 // number of the first block, where only a search finds it
}

// trail returns the way along the blocks of a request in a forest.
func (x *Index) trail(r *Request, f *forest, prefixes []event.PrefixHash) trail {
	return trail{index: x, forest: f, prefixes: prefixes, first: f.start(r, prefixes)}
}

// start returns the number of the first block of a request if it may lie behind one that the request does not name; else 0.
func (f *forest) start(r *Request, prefixes []event.PrefixHash) uint32 {
	if f == nil || !r.Anywhere || len(prefixes) == 0 {
		return 0
	}
	if id := f.table.find(prefixes[0], f); id != 0 || f.dense {
		return id
	}
	return f.scan(prefixes[0])
}

// at returns the number of block i, 0 when it is not there. It is asked for blocks in ascending order.
func (t *trail) at(i int) uint32 {
	for ; t.next <= i && t.forest != nil; t.next++ {
		if t.last = t.forest.after(t.last, t.prefixes[t.next]); t.next == 0 && t.first != 0 {
			t.last = t.first
		}
	}
	return t.last
}

// holders returns the shelves that have block i. It is asked for blocks in ascending order.
func (t *trail) holders(i int) []*shelf { return t.index.holdersOf(t.forest, t.at(i)) }

// after returns the number of the block behind another one in a prompt, 0 when it is not there.
func (f *forest) after(last uint32, p event.PrefixHash) uint32 {
	if next := last + 1; last != 0 && next&(chunkBlocks-1) != 0 && f.prefix(next) == p && f.chunk(next).holders[next&(chunkBlocks-1)] != moved {
		return next
	}
	return f.table.find(p, f)
}
