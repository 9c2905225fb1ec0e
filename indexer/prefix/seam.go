package prefix

import (
	"cmp"
	"fmt"
	"iter"
	"maps"
	"slices"
	"strings"

	"kvstrata/event"
)

// What the files of the service read from the core stands here: which blocks a source has, piece by piece, and who holds a
// prefix. The caller of each function holds the index's lock, if only to read.

// part says of which moment a piece of a listing is, and where the next piece begins: 0 = nowhere, that was all.
type part struct {
	epoch event.Epoch
	seq   event.Seq
	next  uint64
}

// list yields the resident entries in n places of a source, from one on. What is there all the while comes exactly once, unless the
// source was loaded or begun anew in between. Of a life that its publisher has ended there are none.
func (x *Index) list(s *source, from uint64, n int, yield func(*event.Entry)) (p part) {
	p.epoch, p.seq, _ = s.life()
	if !s.isDead() {
		p.next = s.set.From(from, n, yield)
	}
	return p
}

// place is a group of a source that holds a prefix in a tier.
type place struct {
	source uint32
	group  uint32
	tier   event.Tier
}

// places yields who holds a prefix, under one way of cutting.
func (x *Index) places(m *model, v variant, p event.PrefixHash) iter.Seq[place] {
	return func(yield func(place) bool) {
		h := m.tables[v][p]
		for o := range h.all {
			if !yield(place{o.source, o.group, x.tiers[o.tier]}) {
				return
			}
		}
	}
}

// cuts returns every way in which a model's prompts are cut.
func (m *model) cuts() []variant { return slices.Collect(maps.Keys(m.tables)) }

// modelNamed returns a model that some source serves.
func (x *Index) modelNamed(name string) (*model, error) {
	if m := x.models[name]; m != nil {
		return m, nil
	}
	known := cmp.Or(strings.Join(slices.Sorted(maps.Keys(x.models)), ", "), "none yet")
	return nil, fmt.Errorf("model %q: %w; known: %s", name, ErrUnknownModel, known)
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
