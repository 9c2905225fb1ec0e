package capacity

// histogram counts touches by distance: how many of the blocks that are looked at were touched since. Its counts are of
// the sample as it is now.
type histogram struct {
	at    []weight // by distance
	first weight   // touches of blocks that were not there: no size would have hit them
}

// weight is a number of touches and of their tokens; after a halving not a whole one.
type weight struct{ blocks, tokens float64 }

func (w *weight) add(tokens uint32) {
	w.blocks++
	w.tokens += float64(tokens)
}

func (w *weight) plus(v weight, share float64) {
	w.blocks += share * v.blocks
	w.tokens += share * v.tokens
}

// never is the distance of a block that was not there.
const never = int(^uint(0) >> 1)

func (h *histogram) add(distance int, tokens uint32) {
	if distance == never {
		h.first.add(tokens)
		return
	}
	for distance >= len(h.at) {
		h.at = append(h.at, weight{})
	}
	h.at[distance].add(tokens)
}

// halve makes of the histogram one of half the sample: half of the touches, at half of the distance. Odd distances fall to
// either side.
func (h *histogram) halve() {
	half := make([]weight, len(h.at)/2+1)
	for d, w := range h.at {
		half[d/2].plus(w, 0.25)
		half[(d+1)/2].plus(w, 0.25)
	}
	h.at = half
	h.first = weight{h.first.blocks / 2, h.first.tokens / 2}
}
