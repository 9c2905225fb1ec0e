package prefix

import (
	"math/bits"
	"slices"
	"sync/atomic"
	"unsafe"

	"kvstrata/event"
	"kvstrata/event/flat"
)

const (
	chunkBits   = 10
	chunkBlocks = 1 << chunkBits
)

// chunk is a piece of a forest's blocks. Blocks that were stored in one run mostly lie one behind the other.
type chunk struct {
	prefixes [chunkBlocks]uint64
	owners   [chunkBlocks]uint32 // ids of owner sets, as readers see them; 0 = no block here
	holders  [chunkBlocks]uint32 // the same, as they will be when the change is published
	depths   [chunkBlocks]uint16 // blocks from the root, this one included; 0 = unknown
	free     [chunkBlocks / 64]uint64
	tabled   [chunkBlocks / 64]uint64 // places whose blocks are in the table, or were moved
	stamp    uint32                   // the age in which a block here was stored or matched last
	blocks   uint16
	listed   bool // among the chunks with room
	leaving  bool // its blocks are being moved elsewhere
}

// moved stands in holders where a block was moved: its new number stands in prefixes.
const moved = 1<<32 - 1

// roomy is how many blocks must be free in a chunk before it is filled anew: runs broken up over many holes make slow lookups.
const roomy = chunkBlocks / 4

// forest is every block of a model that is cut in one way: the prefixes, each by a number, and who holds it. Prefixes with a
// common beginning share its blocks.
//
// A block is in the table unless the place before its own holds the block that it continues: whoever comes along a prompt finds it there. So
// the table has the beginnings of runs, and stays in the nearer caches. What leaves from the middle of a run puts the next block into the table.
// Who asks for a block without the one before it searches all places; a forest where that happens too often is dense, with every block
// in the table, until it happens no more.
type forest struct {
	cut      variant
	table    *blockTable
	chunks   atomic.Pointer[[]*chunk] // by the upper bits of a block's number
	memory   *memory
	room     []uint32 // chunks with room
	vacant   []uint32 // numbers of chunks that were given back
	places   int      // in chunks that are not vacant
	blocks   int
	moving   bool // some chunks are leaving
	renumber func(owners, from, to uint32)
	at       uint32 // where the next block goes, if it is free

	changed []stretch // whose holders changed since it was published
	left    []uint32  // blocks that nobody held any more at some moment since then
	bare    uint32    // a block whose predecessor left, and that is not in the table yet; 0 = none

	dense  bool
	always bool // it stays dense
	credit int  // places that may be searched before it becomes dense
	kept   kept
}

// stretch is places one behind the other, in one chunk.
type stretch struct{ first, n uint32 }

// What a block continues, where that is no block's number.
const (
	nothingBefore = 0         // it begins a prompt
	unknownBefore = 1<<32 - 1 // it is not known, or not here
)

// A search of all places is paid for by the blocks that were entered: each allows for so many places. A forest that has become dense is so until
// as many blocks have been entered that it could be searched a number of times.
const (
	creditPerBlock = 16
	sparseAgain    = 32 // searches
)

func newForest(cut variant, m *memory, seed uint64, renumber func(owners, from, to uint32)) *forest {
	f := &forest{cut: cut, memory: m, table: newBlockTable(m, seed), renumber: renumber, credit: 1 << 16}
	f.chunks.Store(new([]*chunk))
	f.extend()
	f.occupy(f.chunk(0), 0) // number 0 is none
	f.chunk(0).tabled[0] |= 1
	f.at = 1
	return f
}

// used returns how much memory the forest's blocks take: places that are free do not count, since they are filled anew.
func (f *forest) used() int64 { return int64(f.table.bytes) + int64(f.len()*chunkBytes/chunkBlocks) }

// len returns how many blocks there are.
func (f *forest) len() int { return f.blocks }

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

// nothing stands where a chunk was given back.
var nothing chunk

const chunkBytes = int(unsafe.Sizeof(chunk{}))

// extend adds a chunk, and returns its first number.
func (f *forest) extend() uint32 {
	c := f.memory.chunk()
	for i := range c.free {
		c.free[i] = ^uint64(0)
	}
	f.places += chunkBlocks
	old := *f.chunks.Load()
	n := len(old)
	var chunks []*chunk
	if k := len(f.vacant); k > 0 {
		n, f.vacant = int(f.vacant[k-1]), f.vacant[:k-1]
		chunks = slices.Clone(old) // readers may be looking at the old one
		chunks[n] = c
	} else {
		chunks = append(old, c) // readers see no further than the length they have
	}
	f.chunks.Store(&chunks)
	return uint32(n) << chunkBits
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
			id := f.at&^(chunkBlocks-1) + w*64 + uint32(bits.TrailingZeros64(free))
			f.occupy(c, id)
			f.at = min(id+1, id|(chunkBlocks-1))
			return id
		}
	}
	if f.at &^= chunkBlocks - 1; chunkBlocks-c.blocks < roomy || c.leaving {
		f.at = f.nextRoom()
	}
	return f.claim()
}

// claimBehind returns the place behind a block's own, 0 where that is not free.
func (f *forest) claimBehind(before uint32) uint32 {
	id := before + 1
	i := id & (chunkBlocks - 1)
	if before == nothingBefore || before == unknownBefore || i == 0 {
		return 0
	}
	c := f.chunk(id)
	if c.free[i/64]>>(i%64)&1 == 0 || c.leaving {
		return 0
	}
	f.occupy(c, id)
	return id
}

func (f *forest) occupy(c *chunk, id uint32) {
	i := id & (chunkBlocks - 1)
	c.free[i/64] &^= 1 << (i % 64)
	c.tabled[i/64] &^= 1 << (i % 64)
	c.blocks++
}

// nextRoom returns the first number of a chunk that has room.
func (f *forest) nextRoom() uint32 {
	for len(f.room) > 0 {
		n := f.room[len(f.room)-1]
		f.room = f.room[:len(f.room)-1]
		c := (*f.chunks.Load())[n]
		c.listed = false
		if chunkBlocks-c.blocks >= roomy && !c.leaving && c != &nothing {
			return n << chunkBits
		}
	}
	return f.extend()
}

// enter returns the number of a prefix, made with a depth if it was not there.
func (f *forest) enter(p event.PrefixHash, before uint32, depth uint16) uint32 {
	if id := f.find(p, before); id != 0 {
		id = f.again(id)
		if c := f.chunk(id); depth != 0 && c.depths[id&(chunkBlocks-1)] == 0 {
			c.depths[id&(chunkBlocks-1)] = depth
		}
		return id
	}
	id := f.claimBehind(before)
	follows := id != 0
	if !follows {
		id = f.claim()
	}
	f.blocks++
	if f.credit += creditPerBlock; f.credit > sparseAgain*f.places {
		f.credit, f.dense = sparseAgain*f.places, f.always
	}
	c := f.chunk(id)
	f.use(c)
	atomic.StoreUint64(&c.prefixes[id&(chunkBlocks-1)], uint64(p))
	c.depths[id&(chunkBlocks-1)] = depth
	if !follows || f.dense || f.kept.has(p) {
		f.anchor(id)
	}
	return id
}

// again returns the number of a block that is there and is stored once more.
func (f *forest) again(id uint32) uint32 {
	if f.moving && f.chunk(id).leaving {
		id = f.move(id)
	}
	f.use(f.chunk(id))
	return id
}

// find returns the number of a prefix that continues a block, 0 when it is not there.
func (f *forest) find(p event.PrefixHash, before uint32) uint32 {
	f.settle()
	if before != unknownBefore {
		return f.after(before, p)
	}
	if id := f.table.find(p, f); id != 0 {
		return id
	}
	return f.search(p)
}

// search looks for a block that is not in the table.
func (f *forest) search(p event.PrefixHash) uint32 {
	if f.always {
		return 0
	}
	f.credit = max(f.credit, 0) - f.places
	switch {
	case f.dense:
		return 0
	case f.credit < 0:
		f.fill()
		return f.table.find(p, f)
	}
	id := f.scan(p)
	if id != 0 {
		f.anchor(id)
	}
	return id
}

// scan looks for a block at all places.
func (f *forest) scan(p event.PrefixHash) uint32 {
	for n, c := range *f.chunks.Load() {
		for i := range c.prefixes {
			if atomic.LoadUint64(&c.prefixes[i]) == uint64(p) && atomic.LoadUint32(&c.owners[i]) != moved {
				return uint32(n<<chunkBits | i)
			}
		}
	}
	return 0
}

// anchorAll puts those of some blocks into the table that are there.
func (f *forest) anchorAll(prefixes map[event.PrefixHash]bool) {
	if f.dense {
		return
	}
	var filter kept
	for p := range prefixes {
		filter.add(p)
	}
	for n, c := range *f.chunks.Load() {
		for i, p := range c.prefixes {
			if p := event.PrefixHash(p); filter.has(p) && prefixes[p] && c.holders[i] != moved {
				f.anchor(uint32(n<<chunkBits | i))
			}
		}
	}
}

// fill puts all blocks into the table.
func (f *forest) fill() {
	f.dense = true
	f.settle()
	var lines []unsafe.Pointer
	for n, c := range *f.chunks.Load() {
		if c == &nothing {
			continue
		}
		for w := range c.free {
			lines = lines[:0]
			for rest := ^c.free[w] &^ c.tabled[w]; rest != 0; rest &= rest - 1 {
				lines = f.table.appendLine(lines, event.PrefixHash(c.prefixes[w*64+bits.TrailingZeros64(rest)]))
			}
			flat.Prefetch(lines)
			for rest := ^c.free[w] &^ c.tabled[w]; rest != 0; rest &= rest - 1 {
				f.anchor(uint32(n<<chunkBits | w*64 + bits.TrailingZeros64(rest)))
			}
		}
	}
}

// anchor puts a block into the table, if it is not there.
func (f *forest) anchor(id uint32) {
	c, i := f.chunk(id), id&(chunkBlocks-1)
	if c.tabled[i/64]>>(i%64)&1 != 0 {
		return
	}
	c.tabled[i/64] |= 1 << (i % 64)
	f.table.put(event.PrefixHash(c.prefixes[i]), id, f)
	if f.bare == id {
		f.bare = 0
	}
}

// settle puts the block into the table that has to be there since its predecessor left. Until something looks at the table, it may leave
// itself: a run is evicted one block after the other.
func (f *forest) settle() {
	if f.bare != 0 {
		f.anchor(f.bare)
	}
}

// follows reports whether a place holds a block that only the one before it leads to.
func (f *forest) follows(id uint32) bool {
	i := id & (chunkBlocks - 1)
	if i == 0 {
		return false
	}
	c := f.chunk(id)
	return (c.free[i/64]|c.tabled[i/64])>>(i%64)&1 == 0
}

// hold gives a block other holders; 0 is none. Readers see them when the change is published.
func (f *forest) hold(c *chunk, id, set uint32) {
	c.holders[id&(chunkBlocks-1)] = set
	if n := len(f.changed) - 1; n >= 0 && f.changed[n].first+f.changed[n].n == id && id&(chunkBlocks-1) != 0 {
		f.changed[n].n++
	} else {
		f.changed = append(f.changed, stretch{id, 1})
	}
	if set == 0 {
		f.left = append(f.left, id)
	}
}

// commit shows readers who holds what.
func (f *forest) commit() {
	for _, s := range f.changed {
		c, i := f.chunk(s.first), s.first&(chunkBlocks-1)
		for j := i; j < i+s.n; j++ {
			atomic.StoreUint32(&c.owners[j], c.holders[j])
		}
	}
	f.changed = f.changed[:0]
}

// reap frees what readers do not find any more, except those that look at an older version.
func (f *forest) reap() {
	for _, id := range f.left {
		c, i := f.chunk(id), id&(chunkBlocks-1)
		if c.holders[i] == 0 && c.free[i/64]>>(i%64)&1 == 0 {
			f.leave(id)
		}
	}
	f.left = f.left[:0]
	f.settle()
	f.table.reap()
}

// leave frees a block that nobody holds any more.
func (f *forest) leave(id uint32) {
	c := f.chunk(id)
	i := id & (chunkBlocks - 1)
	f.untable(id, 0)
	atomic.StoreUint64(&c.prefixes[i], 0)
	c.free[i/64] |= 1 << (i % 64)
	c.blocks--
	f.blocks--
	if f.follows(id+1) && f.bare != id+1 {
		f.settle()
		f.bare = id + 1
	}
	if !c.listed && !c.leaving && chunkBlocks-c.blocks >= roomy && id>>chunkBits != f.at>>chunkBits {
		c.listed = true
		f.room = append(f.room, id>>chunkBits)
	}
}

// untable takes a block out of the table, or gives it another number there. It reports whether it was there.
func (f *forest) untable(id, to uint32) bool {
	if f.bare == id {
		f.bare = 0
		return false
	}
	c, i := f.chunk(id), id&(chunkBlocks-1)
	if c.tabled[i/64]>>(i%64)&1 == 0 {
		return false
	}
	f.table.replace(event.PrefixHash(c.prefixes[i]), id, to)
	return true
}

// use notes that something in a chunk was stored or matched.
func (f *forest) use(c *chunk) {
	if age := f.memory.age.Load(); atomic.LoadUint32(&c.stamp) != age {
		atomic.StoreUint32(&c.stamp, age)
	}
}

// age returns how many steps of age ago something near a block was stored or matched.
func (f *forest) age(id uint32) uint32 {
	return f.memory.age.Load() - atomic.LoadUint32(&f.chunk(id).stamp)
}

// resolve returns the number that a block has now.
func (f *forest) resolve(id uint32) uint32 {
	if f.moving {
		if c := f.chunk(id); c.holders[id&(chunkBlocks-1)] == moved {
			return uint32(c.prefixes[id&(chunkBlocks-1)])
		}
	}
	return id
}

// move gives a block of a chunk that is leaving another number. Readers must not be reading.
func (f *forest) move(id uint32) uint32 {
	from, i := f.chunk(id), id&(chunkBlocks-1)
	p := event.PrefixHash(from.prefixes[i])
	to := f.claim()
	c, j := f.chunk(to), to&(chunkBlocks-1)
	c.depths[j] = from.depths[i]
	f.use(c)
	atomic.StoreUint64(&c.prefixes[j], uint64(p))
	f.hold(c, to, from.holders[i])
	if f.untable(id, to) {
		c.tabled[j/64] |= 1 << (j % 64)
	} else {
		f.anchor(to)
	}
	atomic.StoreUint64(&from.prefixes[i], uint64(to))
	atomic.StoreUint32(&from.owners[i], moved)
	from.holders[i] = moved
	from.tabled[i/64] |= 1 << (i % 64)
	from.blocks--
	if f.follows(id + 1) {
		f.anchor(id + 1)
	}
	f.renumber(c.holders[j], id, to)
	return to
}

// evacuate has the blocks of mostly empty chunks move, if more than a third of all places is free, and reports whether any will.
func (f *forest) evacuate() bool {
	const few = 4 // chunks
	if f.moving || f.places < few*chunkBlocks || f.len() > f.places*2/3 {
		return f.moving
	}
	for n, c := range *f.chunks.Load() {
		if n > 0 && c != &nothing && c.blocks < chunkBlocks/2 && uint32(n) != f.at>>chunkBits {
			c.leaving, f.moving = true, true
		}
	}
	return f.moving
}

// vacate gives the chunks back that were left. Nobody may know a number of theirs any more.
func (f *forest) vacate() {
	if !f.moving {
		return
	}
	chunks := slices.Clone(*f.chunks.Load())
	var left []*chunk
	for n, c := range chunks {
		if !c.leaving {
			continue
		}
		if c.blocks > 0 {
			panic("prefix: a block stayed behind in a chunk that is left")
		}
		left = append(left, c)
		chunks[n] = &nothing
		f.vacant = append(f.vacant, uint32(n))
		f.places -= chunkBlocks
	}
	f.chunks.Store(&chunks)
	f.moving = false
	for _, c := range left {
		f.memory.giveChunk(c)
	}
}
