package interop_test

import (
	"math/rand/v2"
	"slices"

	"kvstrata/event"
)

// pool makes up what an engine with a small cache would publish: chains that grow at their ends, shrink from their
// ends, are offloaded and come back. Everything in it is drawn from a seed.
type pool struct {
	rand   *rand.Rand
	chains [][]event.BlockHash // resident on the GPU, by prompt
	next   uint64
	cold   []event.BlockHash
}

const (
	poolPrompts = 6
	poolDepth   = 12
)

func newPool(seed uint64) *pool {
	return &pool{
		rand: rand.New(rand.NewPCG(seed, 1)), chains: make([][]event.BlockHash, poolPrompts), next: seed * 1_000_000,
	}
}

// batch makes one to three events.
func (p *pool) batch() (events []event.Event) {
	for range 1 + p.rand.IntN(3) {
		events = append(events, p.event())
	}
	return events
}

func (p *pool) event() event.Event {
	i := p.rand.IntN(len(p.chains))
	chain := p.chains[i]
	switch op := p.rand.IntN(10); {
	case op == 0 && len(chain) > 0: // to the CPU
		h := chain[p.rand.IntN(len(chain))]
		p.cold = append(p.cold, h)
		return offloaded(event.CPU, h)
	case op == 1 && len(p.cold) > 0:
		at := p.rand.IntN(len(p.cold))
		h := p.cold[at]
		p.cold = slices.Delete(p.cold, at, at+1)
		return evicted(event.CPU, h)
	case len(chain) == poolDepth || op < 5 && len(chain) > 0:
		n := 1 + p.rand.IntN(len(chain))
		gone := slices.Clone(chain[len(chain)-n:])
		slices.Reverse(gone)
		p.chains[i] = chain[:len(chain)-n]
		return evicted(event.GPU, gone...)
	default:
		n := 1 + p.rand.IntN(min(4, poolDepth-len(chain)))
		var hashes []event.BlockHash
		for range n {
			p.next++
			hashes = append(hashes, event.IntHash(p.next*0x9e3779b97f4a7c15))
		}
		all := prompt(uint32(i)+100, poolDepth*16)
		r := run{tokens: all[16*len(chain) : 16*(len(chain)+n)]}
		if len(chain) > 0 {
			r.parent = &chain[len(chain)-1]
		}
		p.chains[i] = append(slices.Clip(chain), hashes...)
		return stored(r, hashes...)
	}
}
