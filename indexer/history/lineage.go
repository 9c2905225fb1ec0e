package history

import "kvstrata/event"

// lineage follows what prefixes continue. It makes the rows of chains, one for a prefix, unless it was told lately on that
// day, and names what runs continue. What it remembers of blocks is bounded; of a run that continues a block that it does not know, it
// tells neither parent nor depth. One goroutine uses it.
type lineage struct {
	sources dictionary
	blocks  recent[engineBlock, link]
	told    recent[blockName, bool] // whether with its depth
	rows    chainRows
}

// engineBlock is what one source calls a block.
type engineBlock struct {
	hash   uint64
	source uint32
}

// blockName is what block_events calls a block.
type blockName struct {
	hash  uint64
	named uint8
}

// link is a prefix, and how many blocks it has; 0 = unknown.
type link struct {
	prefix uint64
	depth  uint32
}

// lineageRoom is how many blocks are remembered at least, and half of how many at most.
const lineageRoom = 1 << 19

func newLineage() *lineage {
	return &lineage{blocks: newRecent[engineBlock, link](lineageRoom), told: newRecent[blockName, bool](lineageRoom)}
}

// follow makes the rows of what blocks of one day were stored.
func (l *lineage) follow(b *blockRows, day int64) {
	if b.len() == 0 {
		day = int64(l.rows.day)
	}
	if l.rows.day != uint16(day) {
		l.told = newRecent[blockName, bool](lineageRoom)
	}
	l.rows.reset(uint16(day))
	sources := make([]uint32, len(b.sources.texts)) // numbers of ours
	for i, text := range b.sources.texts {
		sources[i] = l.sources.id(text)
	}
	depth := uint32(0) // of the block before
	for i, op := range b.op {
		if op != int8(event.Stored) {
			continue
		}
		source := sources[b.source[i]]
		var parent uint64
		switch {
		case b.named[i] == 0: // an engine's hash, as its parent
			if parent, depth = b.runParent[i], 0; b.pos[i] > 0 {
				parent = b.engineHash[i-1]
			}
		case b.pos[i] > 0 && b.named[i-1] == 0:
			parent, depth = 0, 0
		case b.pos[i] > 0:
			parent = b.hash[i-1]
			if depth > 0 {
				depth++
			}
		case b.runParent[i] == 0:
			parent, depth = 0, 1
		default:
			before, _ := l.blocks.get(engineBlock{b.runParent[i], source})
			if parent, depth = before.prefix, before.depth; depth > 0 {
				depth++
			}
			b.runPrefix[i] = parent
		}
		if b.named[i] != 0 {
			l.blocks.put(engineBlock{b.engineHash[i], source}, link{b.hash[i], depth})
		}
		name := blockName{b.hash[i], b.named[i]}
		if whole, ok := l.told.get(name); !ok || depth > 0 && !whole {
			l.told.put(name, depth > 0)
			l.rows.add(name, parent, depth, b.blockSize[i], b.committed[i])
		}
	}
}

// recent remembers the newest entries: between so many and twice as many.
type recent[K comparable, V any] struct {
	young, old map[K]V
	room       int
}

func newRecent[K comparable, V any](room int) recent[K, V] {
	return recent[K, V]{young: make(map[K]V), room: room}
}

// get returns an entry, which is a new one from then on.
func (r *recent[K, V]) get(k K) (V, bool) {
	if v, ok := r.young[k]; ok {
		return v, true
	}
	v, ok := r.old[k]
	if ok {
		r.put(k, v)
	}
	return v, ok
}

func (r *recent[K, V]) put(k K, v V) {
	if len(r.young) >= r.room {
		r.young, r.old = make(map[K]V, r.room), r.young
	}
	r.young[k] = v
}

// chainRows are rows of chains.
type chainRows struct {
	day              uint16 // since 1970
	hash, parent     []uint64
	named            []uint8
	depth, blockSize []uint32
	firstSeen        seconds
}

func (r *chainRows) len() int { return len(r.hash) }

func (r *chainRows) reset(day uint16) {
	*r = chainRows{
		day: day, hash: r.hash[:0], parent: r.parent[:0], named: r.named[:0], depth: r.depth[:0], blockSize: r.blockSize[:0],
		firstSeen: r.firstSeen[:0],
	}
}

func (r *chainRows) columns() []column {
	return []column{
		{"day", date, days{r.day, r.len()}},
		{"hash", u64, r.hash},
		{"named", u8, r.named},
		{"parent", u64, r.parent},
		{"depth", u32, r.depth},
		{"block_size", u32, r.blockSize},
		{"first_seen", wholeSeconds, r.firstSeen},
	}
}

func (r *chainRows) add(name blockName, parent uint64, depth, blockSize, at uint32) {
	r.hash = append(r.hash, name.hash)
	r.named = append(r.named, name.named)
	r.parent = append(r.parent, parent)
	r.depth = append(r.depth, depth)
	r.blockSize = append(r.blockSize, blockSize)
	r.firstSeen = append(r.firstSeen, at)
}
