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
