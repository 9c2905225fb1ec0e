package capacity

import "math"

// Optimum remembers what was asked for, and tells what the best possible policy would have hit: one that knows the future,
// and keeps of what it has seen the blocks that are asked for soonest (Belady). Of two that are asked for by the same request
// that is the one nearer to the prompt's head, so that it keeps whole prefixes, too. How far it is above the LRU curve is
// what any policy could win; the rest is for memory.
//
// It is not safe for concurrent use.
type Optimum struct {
	sampler
	most  int
	asked Count
	calls []call

	// Of the calls, once somebody asks: their blocks by number, and the next call of the same block, or never.
	number []uint32
	next   []int
	blocks int
}

// call is a block of the sample that was asked for.
type call struct {
	hash   uint64
	tokens uint32
	first  bool // of its request
}

// NewOptimum returns one that remembers at most so many blocks that were asked for, 36 bytes each, and looks at half as many
// blocks where that is not enough.
func NewOptimum(shift uint8, most int) *Optimum {
	o := &Optimum{most: max(most, minBlocks)}
	o.set(min(shift, maxShift))
	return o
}

// Request takes the blocks of a request in the order of its prompt.
func (o *Optimum) Request(blocks []Block) {
	first := true
	o.next = nil
	for i := range blocks {
		o.asked.add(blocks[i].Tokens)
		if o.looksAt(blocks[i].Hash) {
			o.calls = append(o.calls, call{blocks[i].Hash, blocks[i].Tokens, first})
			first = false
		}
	}
	for len(o.calls) > o.most && o.shift < maxShift {
		o.halve()
	}
}

func (o *Optimum) halve() {
	o.set(o.shift + 1)
	kept, first := o.calls[:0], false
	for _, c := range o.calls {
		first = first || c.first
		if o.looksAt(c.hash) {
			c.first, first = first, false
			kept = append(kept, c)
		}
	}
	o.calls = kept
}

// Hits returns what a cache of so many blocks would have hit at best; false where the sample says too little of such a
// size. It takes O(n log n) for what is remembered.
func (o *Optimum) Hits(size uint64) (Count, bool) {
	if o.shift > 0 && size < resolution<<o.shift {
		return Count{}, false
	}
	if o.next == nil {
		o.foresee()
	}
	room, held := int(size>>o.shift), 0
	cached := make([]bool, o.blocks)
	soonest := make([]int, o.blocks) // at which call a cached block is asked for next
	var latest calendar
	var hits weight
	for begin := 0; begin < len(o.calls); {
		end := begin + 1
		for end < len(o.calls) && !o.calls[end].first {
			end++
		}
		for i := begin; i < end && cached[o.number[i]]; i++ {
			hits.add(o.calls[i].tokens)
		}
		for i := begin; i < end; i++ {
			b := o.number[i]
			stays := o.next[i] != never
			if stays != cached[b] {
				cached[b] = stays
				if stays {
					held++
				} else {
					held--
				}
			}
			if stays {
				soonest[b] = o.next[i]
				latest.push(o.next[i])
			}
		}
		for held > room {
			at := latest.pop()
			if b := o.number[at]; cached[b] && soonest[b] == at {
				cached[b] = false
				held--
			}
		}
		begin = end
	}
	return o.all(hits), true
}

// all returns what hits of the sample are of all that was asked for, corrected as [Stack.Curve] is.
func (o *Optimum) all(hits weight) Count {
	var sample weight
	for i := range o.calls {
		sample.add(o.calls[i].tokens)
	}
	scale := math.Ldexp(1, int(o.shift))
	whole := func(hits, sample float64, asked uint64) uint64 {
		return uint64(math.Round(min(max(float64(asked)-scale*(sample-hits), 0), float64(asked))))
	}
	return Count{whole(hits.blocks, sample.blocks, o.asked.Blocks), whole(hits.tokens, sample.tokens, o.asked.Tokens)}
}

// foresee numbers the blocks, and finds for each call the next one of its block.
func (o *Optimum) foresee() {
	numbers := make(map[uint64]uint32)
	o.number, o.next = make([]uint32, len(o.calls)), make([]int, len(o.calls))
	last := []int{}
	for i := range o.calls {
		b, known := numbers[o.calls[i].hash]
		if !known {
			b = uint32(len(numbers))
			numbers[o.calls[i].hash] = b
			last = append(last, never)
		}
		o.number[i] = b
	}
	for i := len(o.calls) - 1; i >= 0; i-- {
		o.next[i] = last[o.number[i]]
		last[o.number[i]] = i
	}
	o.blocks = len(numbers)
}

// calendar is a heap of calls, the latest on top.
type calendar []int

func (c *calendar) push(at int) {
	h := append(*c, at)
	i := len(h) - 1
	for ; i > 0 && h[(i-1)/2] < at; i = (i - 1) / 2 {
		h[i] = h[(i-1)/2]
	}
	h[i] = at
	*c = h
}

func (c *calendar) pop() int {
	h := *c
	top, end := h[0], len(h)-1
	at := h[end]
	h = h[:end]
	i := 0
	for {
		below := 2*i + 1
		if below >= end {
			break
		}
		if below+1 < end && h[below+1] > h[below] {
			below++
		}
		if h[below] <= at {
			break
		}
		h[i] = h[below]
		i = below
	}
	if end > 0 {
		h[i] = at
	}
	*c = h
	return top
}
