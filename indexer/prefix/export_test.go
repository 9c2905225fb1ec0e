package prefix

import (
	"fmt"
	"time"

	"kvstrata/event"
)

// ListBy has a subscription list so many places at once.
func (s *Subscription) ListBy(places int) { s.piece = places }

// CoolDown forgets the coldest half of the hot prefixes.
func (x *Index) CoolDown(now time.Time) { x.coolDown(now) }

// Dense reports whether some forest has every block in its table.
func (x *Index) Dense() bool {
	for _, m := range *x.models.Load() {
		for _, f := range *m.forests.Load() {
			if f.dense {
				return true
			}
		}
	}
	return false
}

// Check returns what is wrong with the index's own books, nil if nothing is.
func (x *Index) Check() error {
	x.mu.RLock()
	defer x.mu.RUnlock()
	for _, m := range *x.models.Load() {
		for _, f := range *m.forests.Load() {
			if err := f.check(); err != nil {
				return fmt.Errorf("model %s, %+v: %w", m.name, f.cut, err)
			}
		}
	}
	return nil
}

func (f *forest) check() error {
	there := make(map[event.PrefixHash]uint32)
	tabled := 0
	for n, c := range *f.chunks.Load() {
		for i := range c.prefixes {
			id, p := uint32(n<<chunkBits|i), event.PrefixHash(c.prefixes[i])
			isFree := c.free[i/64]>>(i%64)&1 != 0
			switch other := there[p]; {
			case id == 0 || c == &nothing || c.holders[i] == moved:
				continue
			case isFree && (p != 0 || c.holders[i] != 0 || c.owners[i] != 0):
				return fmt.Errorf("place %d is free and not empty", id)
			case isFree:
				continue
			case c.owners[i] != c.holders[i] || c.owners[i] == 0:
				return fmt.Errorf("block %d: holders %d, shown %d", id, c.holders[i], c.owners[i])
			case other != 0:
				return fmt.Errorf("prefix %v is block %d and block %d", p, other, id)
			}
			there[p] = id
			isTabled := c.tabled[i/64]>>(i%64)&1 != 0
			if isTabled {
				tabled++
			}
			if found := f.table.find(p, f); isTabled && found != id || !isTabled && found != 0 {
				return fmt.Errorf("block %d: found as %d", id, found)
			}
			before := i - 1
			if !isTabled && (f.dense || i == 0 || c.free[before/64]>>(before%64)&1 != 0 || c.holders[before] == moved) {
				return fmt.Errorf("nothing leads to block %d", id)
			}
		}
	}
	if f.blocks != len(there) || f.table.len != tabled || len(f.changed)+len(f.left) > 0 || f.bare != 0 {
		return fmt.Errorf("%d blocks, %d counted; %d in the table, %d counted; left over: %v %v %d",
			len(there), f.blocks, tabled, f.table.len, f.changed, f.left, f.bare)
	}
	return nil
}
