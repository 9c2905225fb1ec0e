package capacity

import "math/bits"

// recency is a set of blocks in the order in which they were last touched. Touching, removing and counting those that are
// newer than one cost O(log n).
//
// Each touch takes the next slot of a line; a block is in the slot of its last touch. How many are newer is how many
// occupied slots are behind: words of bits, and a Fenwick tree over groups of them. When the line is full, the blocks move
// together to its beginning, in a line of twice their number or more.
type recency struct {
	table []place // open addressing by the hash's low bits, linear probing
	n     int

	line []uint64 // the block of each slot, if it is occupied
	live []uint64 // a bit a slot
	tree []uint32 // occupied slots, by group
	next int      // slot
}

// place is an entry of the table.
type place struct {
	hash uint64
	slot uint32 // + 1; 0 = the entry is free
}

const (
	groupWords = 8
	groupSlots = 64 * groupWords
	minSlots   = 2 * groupSlots
)

func newRecency() recency {
	return recency{
		table: make([]place, minSlots),
		line:  make([]uint64, minSlots), live: make([]uint64, minSlots/64), tree: make([]uint32, minSlots/groupSlots+1),
	}
}

// find returns the entry of a block, or the free one where it would be.
func (r *recency) find(hash uint64) *place { return &r.table[r.index(hash)] }

func (r *recency) index(hash uint64) uint64 {
	mask := uint64(len(r.table) - 1)
	for i := hash & mask; ; i = (i + 1) & mask {
		if p := &r.table[i]; p.slot == 0 || p.hash == hash {
			return i
		}
	}
}

// newer returns how many blocks were touched since the block of an entry.
func (r *recency) newer(p *place) int {
	slot := int(p.slot - 1)
	group, word := slot/groupSlots, slot/64
	older := bits.OnesCount64(r.live[word] & (1<<(slot%64) - 1))
	for w := group * groupWords; w < word; w++ {
		older += bits.OnesCount64(r.live[w])
	}
	for i := group; i > 0; i &= i - 1 {
		older += int(r.tree[i])
	}
	return r.n - older - 1
}

// touch makes a block the newest; it may be new.
func (r *recency) touch(hash uint64) {
	if r.next == len(r.line) {
		r.compact()
	}
	p := r.find(hash)
	if p.slot == 0 {
		if 8*(r.n+1) > 5*len(r.table) {
			r.growTable()
			p = r.find(hash)
		}
		p.hash = hash
		r.n++
	} else {
		r.leave(p)
	}
	slot := r.next
	r.next++
	p.slot = uint32(slot + 1)
	r.line[slot] = hash
	r.live[slot/64] |= 1 << (slot % 64)
	for i := slot/groupSlots + 1; i < len(r.tree); i += i & -i {
		r.tree[i]++
	}
}

// leave frees the slot of an entry.
func (r *recency) leave(p *place) {
	slot := int(p.slot - 1)
	r.live[slot/64] &^= 1 << (slot % 64)
	for i := slot/groupSlots + 1; i < len(r.tree); i += i & -i {
		r.tree[i]--
	}
}

// remove takes a block out that is there. Entries that collisions pushed behind its own move up.
func (r *recency) remove(hash uint64) {
	mask := uint64(len(r.table) - 1)
	free := r.index(hash)
	r.leave(&r.table[free])
	r.n--
	for i := (free + 1) & mask; r.table[i].slot != 0; i = (i + 1) & mask {
		if home := r.table[i].hash & mask; (i-home)&mask >= (i-free)&mask {
			r.table[free] = r.table[i]
			free = i
		}
	}
	r.table[free] = place{}
}

func (r *recency) growTable() {
	old := r.table
	r.table = make([]place, 2*len(old))
	for _, p := range old {
		if p.slot != 0 {
			*r.find(p.hash) = p
		}
	}
}

// compact moves the blocks to the beginning of the line.
func (r *recency) compact() { r.rebuild(func(uint64) bool { return true }) }

// keep takes all blocks out but those that a function names.
func (r *recency) keep(keeps func(hash uint64) bool) {
	clear(r.table)
	r.rebuild(keeps)
}

// rebuild makes line, bits and tree anew.
func (r *recency) rebuild(keeps func(hash uint64) bool) {
	n := 0
	for w, word := range r.live {
		for ; word != 0; word &= word - 1 {
			hash := r.line[w*64+bits.TrailingZeros64(word)]
			if !keeps(hash) {
				continue
			}
			r.line[n] = hash
			n++
			*r.find(hash) = place{hash: hash, slot: uint32(n)}
		}
	}
	r.n, r.next = n, n
	if want := max(minSlots, (2*n+groupSlots-1)/groupSlots*groupSlots); want > len(r.line) {
		slots := want + want/2/groupSlots*groupSlots
		r.line = append(make([]uint64, 0, slots), r.line[:n]...)[:slots]
		r.live, r.tree = make([]uint64, slots/64), make([]uint32, slots/groupSlots+1)
	}
	clear(r.live)
	clear(r.tree)
	for slot := 0; slot < n; slot += 64 {
		r.live[slot/64] = ^uint64(0) >> (64 - min(64, n-slot))
	}
	for i := 1; i < len(r.tree); i++ {
		r.tree[i] += uint32(min(max(n-(i-1)*groupSlots, 0), groupSlots))
		if above := i + i&-i; above < len(r.tree) {
			r.tree[above] += r.tree[i]
		}
	}
}

// clear takes all blocks out.
func (r *recency) clear() {
	clear(r.table)
	clear(r.live)
	clear(r.tree)
	r.n, r.next = 0, 0
}
