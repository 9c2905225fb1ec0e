package history

import (
	"slices"

	"kvstrata/event"
)

// lineage follows what prefixes continue. It makes the rows of chains, one for a prefix, unless it was told lately on that
// day, and names what runs continue. What it remembers of blocks is bounded; of a run that continues a block that it does not know, it
// tells neither parent nor depth.
type lineage struct {
	blocks links
	told   tellings
	day    int64
}

// link is a prefix, and how many blocks it has; 0 = unknown.
type link struct {
	prefix uint64
	depth  uint32
}

func newLineage() *lineage {
	return &lineage{blocks: make(links, 1<<linkBits), told: make(tellings, 1<<toldBits)}
}

// follow adds the rows of what a source stored, of its rows of block_events from one on, all of one day. The source is a number that
// is spread over 64 bits.
func (l *lineage) follow(b *blockRows, from int, source uint64, day int64, to *chainRows) {
	if l.day != day {
		clear(l.told)
		l.day = day
	}
	depth := uint32(0) // of the block before
	for i := from; i < b.len(); i++ {
		if b.op[i] != int8(event.Stored) {
			continue
		}
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
			before := l.blocks.get(source ^ mixed(b.runParent[i]))
			if parent, depth = before.prefix, before.depth; depth > 0 {
				depth++
			}
			b.runPrefix[i] = parent
		}
		if b.named[i] != 0 {
			l.blocks.put(source^mixed(b.engineHash[i]), link{b.hash[i], depth})
		}
		if l.told.tell(mixed(b.hash[i]^uint64(b.named[i])<<63), depth > 0) {
			to.add(b.hash[i], b.named[i], parent, depth, b.blockSize[i], b.committed[i])
		}
	}
}

// The logarithms of how many lines of 64 bytes links and tellings have. What is looked for is found with one miss of the caches.
const (
	linkBits = 18
	toldBits = 17
)

// links remembers of blocks, by a key that is spread over 64 bits, which prefix they end: the newest three of a line.
type links []struct {
	keys     [3]uint64
	prefixes [3]uint64
	depths   [3]uint32
	oldest   uint32
}

func (l links) get(key uint64) link {
	line := &l[key>>(64-linkBits)]
	for i, k := range line.keys {
		if k == key {
			return link{line.prefixes[i], line.depths[i]}
		}
	}
	return link{}
}

func (l links) put(key uint64, to link) {
	line := &l[key>>(64-linkBits)]
	at := slices.Index(line.keys[:], key)
	if at < 0 {
		at = int(line.oldest)
		line.oldest = (line.oldest + 1) % 3
	}
	line.keys[at], line.prefixes[at], line.depths[at] = key, to.prefix, to.depth
}

// tellings remember what was told, by keys that are spread over 64 bits, the lowest of which says whether as a whole: the newest
// eight of a line.
type tellings [][8]uint64

// tell reports whether what the key stands for has to be told, and takes it for told.
func (t tellings) tell(key uint64, whole bool) bool {
	line := &t[key>>(64-toldBits)]
	key &^= 1
	for i, k := range line {
		switch {
		case k&^1 != key || k == 0:
			continue
		case k&1 != 0 || !whole:
			return false
		}
		line[i] |= 1
		return true
	}
	copy(line[1:], line[:])
	if line[0] = key; whole {
		line[0] |= 1
	}
	return true
}

// mixed is splitmix64's output function, a permutation of 64 bits.
func mixed(x uint64) uint64 {
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// chainRows are rows of chains.
type chainRows struct {
	hash, parent     []uint64
	named            []uint8
	depth, blockSize []uint32
	firstSeen        seconds
}

func (r *chainRows) len() int { return len(r.hash) }

func (r *chainRows) reset() {
	*r = chainRows{
		hash: r.hash[:0], parent: r.parent[:0], named: r.named[:0], depth: r.depth[:0], blockSize: r.blockSize[:0], firstSeen: r.firstSeen[:0],
	}
}

// columns returns the columns of rows of one day since 1970.
func (r *chainRows) columns(day int64) []column {
	return []column{
		{"day", date, days{uint16(day), r.len()}},
		{"hash", u64, r.hash},
		{"named", u8, r.named},
		{"parent", u64, r.parent},
		{"depth", u32, r.depth},
		{"block_size", u32, r.blockSize},
		{"first_seen", wholeSeconds, r.firstSeen},
	}
}

func (r *chainRows) add(hash uint64, named uint8, parent uint64, depth, blockSize, at uint32) {
	r.hash = append(r.hash, hash)
	r.named = append(r.named, named)
	r.parent = append(r.parent, parent)
	r.depth = append(r.depth, depth)
	r.blockSize = append(r.blockSize, blockSize)
	r.firstSeen = append(r.firstSeen, at)
}
