package prefix

import (
	"kvstrata/event"
	"kvstrata/event/flat"
)

// hand goes round all shelves, page by page, while there is something to do: blocks to leave out because the bound of memory is
// reached, chunks to leave because they are mostly empty. A step is small, and the writer makes it after what it applied.
type hand struct {
	shelf   uint32 // the one that the next step looks at
	place   uint64 // in it
	running bool
	over    bool            // blocks took more than they may when it was last looked
	ages    [maxAge + 1]int // of the blocks that this round met
	oldest  uint32          // blocks of this age and older go: what the last round met tells how many they are
	rows    []handRow
}

// maxAge is the age from which on blocks are equally old.
const maxAge = 63

// handRow is a block that something is to be done with.
type handRow struct {
	hash event.BlockHash
	id   uint32
	drop bool
}

// Bytes is how much memory an index takes.
type Bytes struct {
	Shelves int64 `json:"shelves"` // what engines call their blocks
	Blocks  int64 `json:"blocks"`  // prefixes
	Owners  int64 `json:"owners"`  // sets of owners
	Idle    int64 `json:"idle"`    // kept for what comes
}

// Used returns what blocks take, which is what Config.MaxBytes bounds.
func (b Bytes) Used() int64 { return b.Shelves + b.Blocks + b.Owners }

// Bytes returns how much memory the index takes.
func (x *Index) Bytes() Bytes {
	x.mu.RLock()
	defer x.mu.RUnlock()
	return x.bytes()
}

func (x *Index) bytes() Bytes {
	taken, idle := x.pool.Bytes()
	b := Bytes{Shelves: int64(taken - idle), Owners: int64(x.owners.bytes())}
	held := b.Shelves
	for _, m := range *x.models.Load() {
		for _, f := range *m.forests.Load() {
			b.Blocks += f.used()
			held += f.used()
		}
	}
	for _, h := range *x.shelves.Load() {
		if h != nil {
			b.Shelves += h.mapBytes()
		}
	}
	b.Idle = max(0, x.memory.taken.Load()-held)
	return b
}

// The sizes of what lies in Go's own maps, about.
const (
	longBytes = 120
	twinBytes = 24
)

// mapBytes is what a shelf takes beside its pages.
func (h *shelf) mapBytes() int64 {
	return int64(longBytes*(len(h.long)+len(h.extra)) + twinBytes*len(h.twins))
}

// tidy takes up what is left to do, about as much as was just done.
func (x *Index) tidy(blocks int) {
	x.sweep(max(sweepPiece, blocks))
	if x.wake() {
		if x.farOver.Load() {
			blocks = max(hurry, blocks*hurry/sweepPiece)
		}
		for done := 0; done <= blocks; {
			done += x.advance()
			if !x.hand.running {
				break
			}
		}
	}
}

// hurry is how many blocks a step of the writer looks at when the bound is far behind.
const hurry = 4096

// tidyEvery is how many messages make blocks a step older, and how often it is looked whether there is something to do.
const tidyEvery = 64

// wake starts the hand if there is something to do, and reports whether it goes.
func (x *Index) wake() bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.calls++; x.calls%tidyEvery != 0 {
		return x.hand.running
	}
	x.memory.age.Add(1)
	work := x.isOver()
	x.hand.over = work
	for _, m := range *x.models.Load() {
		for _, f := range *m.forests.Load() {
			x.moving = f.evacuate() || x.moving
		}
	}
	work = work || x.moving
	if work && !x.hand.running {
		x.hand = hand{running: true, over: x.hand.over, rows: x.hand.rows, oldest: x.hand.oldest}
	}
	return x.hand.running
}

// isOver reports whether blocks take more than they may.
func (x *Index) isOver() bool {
	if x.cfg.MaxBytes <= 0 {
		return false
	}
	used := x.bytes().Used()
	x.farOver.Store(used > x.cfg.MaxBytes+x.cfg.MaxBytes/16)
	return used > x.cfg.MaxBytes
}

// advance looks at one page of one shelf, and returns how many blocks it looked at, at least one.
func (x *Index) advance() (looked int) {
	x.mu.Lock() // nothing changes yet: Readers go on
	shelves := *x.shelves.Load()
	h := (*shelf)(nil)
	for int(x.hand.shelf) < len(shelves) {
		if h = shelves[x.hand.shelf]; h != nil { // also one that is being filled, or swept: all know numbers
			break
		}
		x.hand.shelf++
	}
	if h == nil {
		defer x.mu.Unlock()
		x.turn()
		return 1
	}
	looked = x.look(h)
	x.mu.Unlock()
	for rows := x.hand.rows; len(rows) > 0; {
		n := min(len(rows), sweepPiece)
		x.begin()
		for i := range rows[:n] {
			if rows[i].drop && !h.shown.Load() { // cleared since it was looked at
				continue
			}
			x.handle(h, &rows[i])
		}
		x.refresh(h.source)
		x.end()
		rows = rows[n:]
	}
	x.begin()
	defer x.end()
	next := h.blocks.PageEnd(x.hand.place)
	if h.shown.Load() {
		next = h.blocks.Shrink(x.hand.place)
	}
	if x.hand.place = next; next >= flat.Done {
		x.hand.shelf, x.hand.place = x.hand.shelf+1, 0
	}
	return max(1, looked)
}

// enough returns the age from which on blocks have to go so that the rest is within the bound, and some more.
func (x *Index) enough() uint32 {
	used, met := x.bytes().Used(), 0
	for _, n := range x.hand.ages {
		met += n
	}
	if x.cfg.MaxBytes <= 0 || used <= x.cfg.MaxBytes || met == 0 {
		return maxAge + 1
	}
	surplus := int((used - x.cfg.MaxBytes + x.cfg.MaxBytes/16) * int64(met) / used)
	age := len(x.hand.ages)
	for age > 0 && surplus > 0 {
		age--
		surplus -= x.hand.ages[age]
	}
	return uint32(age)
}

// look notes what is to be done with the blocks of the hand's page.
func (x *Index) look(h *shelf) (looked int) {
	x.hand.rows = x.hand.rows[:0]
	over := x.hand.over && h.shown.Load()
	note := func(hash event.BlockHash, id uint32) {
		looked++
		age, move := uint32(maxAge), false // without a name nobody finds it
		if f := h.forest; f != nil {
			age, move = min(maxAge, f.age(f.resolve(id))), f.moving && f.chunk(id).leaving
		}
		x.hand.ages[age]++
		drop := over && age >= x.hand.oldest
		if drop || move {
			x.hand.rows = append(x.hand.rows, handRow{hash, id, drop})
		}
	}
	h.blocks.From(x.hand.place, func(hash uint64, id uint32) bool {
		note(event.IntHash(hash), id)
		return true
	})
	if x.hand.place == 0 {
		for hash, id := range h.long {
			note(hash, id)
		}
	}
	return looked
}

// handle leaves a block out, or enters its new number.
func (x *Index) handle(h *shelf, row *handRow) {
	if !row.drop {
		id := h.forest.resolve(row.id)
		if h.forest.chunk(id).leaving {
			x.touch(h.forest)
			id = h.forest.move(id)
		}
		h.renumber(row.hash, id)
		return
	}
	for h.fewer(row.hash) {
		h.source.leftOut++
	}
	id := h.take(row.hash)
	x.went(fell, h, row.hash, id)
	h.source.leftOut++
	if h.forest != nil {
		x.part(h, id)
	}
}

// renumber enters the new number of a block.
func (h *shelf) renumber(b event.BlockHash, id uint32) {
	if n, ok := b.Int(); ok {
		*h.blocks.Entry(n) = id
		return
	}
	h.long[b] = id
}

// renumber moves what a block's owners count by its number.
func (x *Index) renumber(owners, from, to uint32) {
	shelves := *x.shelves.Load()
	for _, n := range x.owners.at(owners).shelves {
		if h := shelves[n]; h.twins[from] > 0 {
			h.twins[to] = h.twins[from]
			delete(h.twins, from)
		}
	}
}

// turn ends a round.
func (x *Index) turn() {
	for _, m := range *x.models.Load() {
		for _, f := range *m.forests.Load() {
			f.vacate()
		}
	}
	x.moving = false
	x.hand.oldest = x.enough()
	x.hand.running = false
}
