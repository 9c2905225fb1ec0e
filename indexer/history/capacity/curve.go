package capacity

import (
	"math"
	"sort"
)

// Curve is what caches of all sizes would have hit of what was asked for. A cache of 0 blocks hits nothing.
type Curve struct {
	Asked Count
	Shift uint8 // one of 2^Shift blocks was looked at

	hits []weight // of all that was asked for: by a cache in which as many blocks of the sample are newer, or fewer
}

// newCurve adds a histogram up. With correct, what the sample lacks of all is added to what every size hits.
func newCurve(h *histogram, shift uint8, asked Count, correct bool) *Curve {
	c := &Curve{Asked: asked, Shift: shift, hits: make([]weight, len(h.at))}
	scale := math.Ldexp(1, int(shift))
	sum := weight{}
	if correct {
		total := h.first
		for _, w := range h.at {
			total.plus(w, 1)
		}
		sum = weight{float64(asked.Blocks) - scale*total.blocks, float64(asked.Tokens) - scale*total.tokens}
	}
	for i, w := range h.at {
		sum.plus(w, scale)
		c.hits[i] = sum
	}
	return c
}

// Hits returns what a cache of so many blocks would have hit. It never falls with the size.
func (c *Curve) Hits(size uint64) Count {
	if size == 0 || len(c.hits) == 0 {
		return Count{}
	}
	return c.count(int(min((size-1)>>c.Shift, uint64(len(c.hits)-1))))
}

func (c *Curve) count(i int) Count {
	whole := func(x float64, most uint64) uint64 { return uint64(math.Round(min(max(x, 0), float64(most)))) }
	return Count{whole(c.hits[i].blocks, c.Asked.Blocks), whole(c.hits[i].tokens, c.Asked.Tokens)}
}

// Ceiling returns what a cache that never evicts would have hit, and the smallest size that hits as much.
func (c *Curve) Ceiling() (size uint64, hits Count) {
	if len(c.hits) == 0 {
		return 0, Count{}
	}
	last := len(c.hits) - 1
	return c.size(last), c.count(last)
}

// size returns the smallest cache that hits a block of which so many blocks of the sample are newer.
func (c *Curve) size(newer int) uint64 { return uint64(newer)<<c.Shift + 1 }

// Reaching returns the smallest size that hits a share of the blocks that a cache without end hits.
func (c *Curve) Reaching(share float64) uint64 {
	if len(c.hits) == 0 {
		return 0
	}
	want := share * c.hits[len(c.hits)-1].blocks
	return c.size(sort.Search(len(c.hits)-1, func(i int) bool { return c.hits[i].blocks >= want }))
}

// Knee returns the size beyond which more memory buys least for what it costs: where the curve is highest above the straight
// line from nothing to the smallest size that hits all that can be hit. It is 0 where nothing was hit.
func (c *Curve) Knee() uint64 {
	if len(c.hits) == 0 {
		return 0
	}
	last := len(c.hits) - 1
	end, all := float64(c.size(last)), c.hits[last].blocks
	knee, highest := c.size(last), 0.0
	for i := range c.hits {
		size := c.size(i)
		if above := c.hits[i].blocks/all - float64(size)/end; above > highest {
			knee, highest = size, above
		}
	}
	return knee
}

// Grid returns round sizes, 1, 2 and 5 times powers of ten, over the last three powers before the curve's end and to the first
// beyond it; of a sample only those of which it tells anything.
func (c *Curve) Grid() []uint64 {
	end, _ := c.Ceiling()
	from := end / 1000
	if c.Shift > 0 {
		from = max(from, resolution<<c.Shift)
	}
	var sizes []uint64
	for ten := uint64(1); ; ten *= 10 {
		for _, digit := range []uint64{1, 2, 5} {
			size := digit * ten
			if size >= from {
				sizes = append(sizes, size)
			}
			if size >= end {
				return sizes
			}
		}
	}
}

// resolution is how many blocks of the sample a cache must hold for its hits to be told: fewer say too little.
const resolution = 16
