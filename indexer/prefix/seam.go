package prefix

import (
	"fmt"
	"iter"

	"kvstrata/event"
	"kvstrata/event/flat"

	"github.com/zeebo/xxh3"
)

// What the files of the service read from the core stands here: which blocks a source has, piece by piece, and who holds a
// prefix. The caller of each function holds the index's lock, if only to read.

// part says of which moment a piece of a listing is, and where the next piece begins: 0 = nowhere, that was all.
type part struct {
	epoch event.Epoch
	seq   event.Seq
	next  uint64
}

// list yields the resident entries of a source from a place on, of n places or some more. What is there all the while comes exactly
// once: a block's place is its hash's, whatever shelf it lies on. Of a life that its publisher has ended there are none.
func (x *Index) list(s *source, from uint64, n int, yield func(*event.Entry)) (p part) {
	p.epoch, p.seq, _ = s.life()
	if s.isDead() {
		return p
	}
	looked := 0
	give := func(h *shelf, hash event.BlockHash, id uint32) {
		e := x.entry(h, hash, id)
		yield(&e)
		looked++
	}
	total := 0
	for h := range s.shelves {
		total += h.blocks.Len()
	}
	stride := max(1, flat.Done/uint64(1+2*total/n)) // where about half of n blocks lie
	for p.next = from; p.next < flat.Done && looked < n; looked++ {
		from, p.next = p.next, min(flat.Done, p.next+stride)
		for h := range s.shelves {
			p.next = min(p.next, h.blocks.PageEnd(from))
		}
		for h := range s.shelves {
			h.blocks.Range(from, p.next, func(hash uint64, id uint32) { give(h, event.IntHash(hash), id) })
		}
	}
	for ; p.next >= flat.Done && p.next < 2*flat.Done && looked < n; looked++ {
		from = p.next
		p.next = s.longEnd(from)
		for h := range s.shelves {
			for hash, id := range h.long {
				if at := longPlace(hash); at >= from && at < p.next {
					give(h, hash, id)
				}
			}
		}
	}
	if p.next >= 2*flat.Done {
		p.next = 0
	}
	return p
}

// shelves yields all shelves of a source.
func (s *source) shelves(yield func(*shelf) bool) {
	for _, g := range s.groups {
		for _, h := range g.shelves {
			if !yield(h) {
				return
			}
		}
	}
}

// longPlace is the place of a hash that is no integer: behind all that are.
func longPlace(h event.BlockHash) uint64 {
	var room [64]byte
	return flat.Done + xxh3.Hash(h.AppendTo(room[:0]))>>32
}

// longEnd returns where a piece of those ends that begins at a place.
func (s *source) longEnd(from uint64) uint64 {
	const piece = 8192
	n := 0
	for h := range s.shelves {
		n += len(h.long)
	}
	return min(2*flat.Done, from+flat.Done/uint64(1+n/piece))
}

// place is a group of a source that holds a prefix in a tier.
type place struct {
	source uint32
	group  uint32
	tier   event.Tier
}

// places yields who holds block i of a prompt. It is asked for blocks in ascending order.
func (t *trail) places(i int) iter.Seq[place] {
	return func(yield func(place) bool) {
		for _, h := range t.holders(i) {
			if !yield(place{h.source.id, h.group.Index(), t.index.tiers[h.tier]}) {
				return
			}
		}
	}
}

// cuts returns every way in which a model's prompts are cut.
func (m *model) cuts() (cuts []variant) {
	for _, f := range *m.forests.Load() {
		if f.len() > 0 {
			cuts = append(cuts, f.cut)
		}
	}
	return cuts
}

// sourceNamed returns a source by its id.
func (x *Index) sourceNamed(id string) (*source, error) {
	name, err := event.ParseSource(id)
	if err != nil {
		return nil, fmt.Errorf("source: %w", err)
	}
	if s := x.sources[name]; s != nil {
		return s, nil
	}
	return nil, fmt.Errorf("source %q: %w; GET /v1/sources lists them", id, ErrUnknownSource)
}
