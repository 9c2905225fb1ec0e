package prefix

import (
	"slices"

	"kvstrata/event"
)

// A group with a sliding window holds the end of a prefix only, and an engine can go on from a prefix only where that end is there.
// Such a group's blocks are mostly told without tokens. Engines call the same content by the same hash in all of their groups, so that
// they take the name that another group has for it.

// describe enters what is told of the run's group: whether it takes names over.
func (r *run) describe() {
	if len(r.groups) < 2 {
		return
	}
	for i := range r.told {
		g := &r.told[i]
		switch {
		case g.Spec.HoldsPrefix() || g.BlockSize == 0:
		case g.Group.Index() != r.group.index:
			r.lends = true
		default:
			cut := variant{g.BlockSize, g.Eagle}
			if r.cut.blockSize == 0 {
				r.cut = cut
			}
			r.borrows = r.cut == cut
		}
	}
}

// borrowed returns the name that a block has in another group of the source, 0 when it has none there or may not take it. The run
// then knows its number.
func (r *run) borrowed(hash event.BlockHash) event.PrefixHash {
	if !r.borrows {
		return 0
	}
	for _, g := range r.groups {
		if g == r.group {
			continue
		}
		for _, h := range g.shelves {
			if h.forest == nil || h.forest.cut != r.cut {
				continue
			}
			if id := h.get(hash); id != 0 {
				r.known = id
				return h.forest.prefix(id)
			}
		}
	}
	return 0
}

// adopt names blocks that were told before their group was described.
func (r *run) adopt() {
	if !r.borrows {
		return
	}
	type known struct {
		prefix event.PrefixHash
		id     uint32
	}
	names := make(map[event.BlockHash]known)
	for _, h := range r.group.shelves {
		if h.forest != nil {
			continue
		}
		for hash := range h.each {
			if prefix := r.borrowed(hash); prefix != 0 {
				names[hash] = known{prefix, r.known}
			}
		}
	}
	r.known = 0
	for hash, name := range names {
		to := run{index: r.index, source: r.source, group: r.group, cut: r.cut, known: name.id}
		to.name(hash, name.prefix)
	}
}

// lend gives the name that a block has in the run's group to the same block in groups that take names over.
func (r *run) lend(hash event.BlockHash) {
	if !r.lends {
		return
	}
	from, id := r.group.named(hash)
	if from == nil {
		return
	}
	for i := range r.told {
		g := &r.told[i]
		if g.Spec.HoldsPrefix() || g.Group.Index() == r.group.index || from.forest.cut != (variant{g.BlockSize, g.Eagle}) {
			continue
		}
		n := slices.IndexFunc(r.groups, func(other *group) bool { return other.index == g.Group.Index() })
		if n < 0 {
			continue
		}
		to := run{index: r.index, source: r.source, group: r.groups[n], cut: from.forest.cut, forest: from.forest, known: id}
		to.name(hash, from.forest.prefix(id))
	}
}

// windowBlocks returns how many blocks at the end of a prefix a group must hold for the prefix to be of use; 0 for any number.
func windowBlocks(g *event.GroupInfo) int {
	if g.BlockSize == 0 {
		return 0
	}
	switch g.Spec {
	case event.SpecMamba: // the state behind the last block
		return 1
	case event.SpecSlidingWindow, event.SpecSlidingWindowMLA:
		if g.Window > 0 { // the next token sees itself, too
			return (int(g.Window) - 1 + int(g.BlockSize) - 1) / int(g.BlockSize)
		}
	}
	return 0
}

// window is a group of a source that must hold the end of a prefix, and the prompt as that group cuts it.
type window struct {
	index    *Index
	size     int // tokens a block
	blocks   int // at the end of a prefix
	request  *Request
	prefixes []event.PrefixHash
	numbers  []uint32 // of the prompt's blocks; 0 = not there
	forest   *forest  // nil: no block of this cut has a name
	own      *group   // nil: it holds nothing
	unnamed  *unnamed
}

// prompts are a request's blocks by each way of cutting it that was asked for.
type prompts struct {
	index   *Index
	request *Request
	cuts    map[variant][]event.PrefixHash
}

func (p *prompts) cut(v variant) []event.PrefixHash {
	prefixes, ok := p.cuts[v]
	if !ok {
		prefixes = p.index.prefixes(p.request, v)
		p.cuts[v] = prefixes
	}
	return prefixes
}

// usable returns how many of the first steps of a prompt, each of so many tokens, a source can go on from: at most those that its
// groups of whole prefixes hold, and as many as leave each of its windows whole.
func (x *Index) usable(s *source, p *prompts, step, most int) int {
	var windows []window
	for i := range s.told {
		g := &s.told[i]
		n := windowBlocks(g)
		if n == 0 || most == 0 {
			continue
		}
		v := variant{g.BlockSize, g.Eagle}
		w := window{
			index: x, size: int(g.BlockSize), blocks: n, request: p.request, prefixes: p.cut(v), forest: s.model.forest(v), own: s.group(g.Group),
		}
		if w.own != nil && s.recipe.Scheme != 0 && len(p.request.Tokens) > 0 &&
			slices.ContainsFunc(w.own.shelves, func(h *shelf) bool { return h.forest == nil && h.len() > 0 }) {
			w.unnamed = &unnamed{index: x, source: s, group: g.Group, names: newEngineNames(s.recipe, p.request, v)}
		}
		windows = append(windows, w)
	}
	for most > 0 {
		fewer := most
		for i := range windows {
			fewer = windows[i].fits(step, fewer)
		}
		if fewer == most {
			break
		}
		most = fewer
	}
	return most
}

// fits returns k if the window of the first k steps is whole, and otherwise the next smaller number that it may be whole for.
func (w *window) fits(step, k int) int {
	n := k * step / w.size
	if n > len(w.prefixes) {
		return len(w.prefixes) * w.size / step
	}
	if k*step%w.size != 0 {
		return k - 1
	}
	for i := n - 1; i >= max(0, n-w.blocks); i-- {
		if !w.holds(i) {
			return i * w.size / step
		}
	}
	return k
}

// holds reports whether the group holds a block of the prompt.
func (w *window) holds(i int) bool {
	if w.own == nil {
		return false
	}
	for _, h := range w.index.holdersOf(w.forest, w.number(i)) {
		if h.lane == w.own.lane {
			return true
		}
	}
	if w.unnamed == nil {
		return false
	}
	_, held := w.unnamed.at(i)
	return held
}

// number returns the number of a block of the prompt, 0 when nobody holds it.
func (w *window) number(i int) uint32 {
	if w.forest == nil {
		return 0
	}
	if w.numbers == nil {
		t := w.index.trail(w.request, w.forest, w.prefixes)
		for j := range w.prefixes {
			w.numbers = append(w.numbers, t.at(j))
		}
	}
	return w.numbers[i]
}
