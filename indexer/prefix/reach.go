package prefix

import (
	"cmp"
	"slices"
	"time"

	"kvstrata/event"
)

// Reach is how much of the prompt an engine has together with the shared stores that its connector names: block by block, each
// from its warmest place, up to the first block in none. What the engine has itself is taken from there where a store is no
// warmer.
type Reach struct {
	Blocks int          `json:"blocks"`
	Tokens int          `json:"tokens"`
	Tiers  []Tier       `json:"tiers"`  // each block counted in its warmest tier
	Stores []StoreShare `json:"stores"` // those that can be counted on, in the order in which they are named
}

// StoreShare is what of a reach comes from one store.
type StoreShare struct {
	Source event.Source `json:"source"`
	State  event.State  `json:"state"`
	Blocks int          `json:"blocks"`
	Tokens int          `json:"tokens"`
}

// reach is an engine and what its connector reads from.
type reach struct {
	engine *source
	stores []*source
	shares []StoreShare
	groups []event.GroupInfo // that hold prefixes
	own    []*lane           // of each group; nil: the engine has none of it
}

// lane is where each block of a prompt lies within one source, holes included: the rank of its warmest tier, or nowhere.
type lane struct {
	groups  []uint32 // of the source's that count
	ranks   []int16
	unnamed *unnamed // of the engine's own; nil: every block has a name
}

// set enters that block i lies in a tier of a rank.
func (l *lane) set(i int, rank int16) {
	for len(l.ranks) <= i {
		l.ranks = append(l.ranks, nowhere)
	}
	if l.ranks[i] == nowhere || rank < l.ranks[i] {
		l.ranks[i] = rank
	}
}

const nowhere = int16(-1)

func (l *lane) at(i int) int16 {
	if l == nil || i >= len(l.ranks) {
		return nowhere
	}
	return l.ranks[i]
}

// laneKey is one source under one way of cutting.
type laneKey struct {
	source  uint32
	variant variant
}

// reaches are the engines of a model whose connectors read from stores that can be counted on.
type reaches struct {
	byEngine map[uint32]*reach
	lanes    map[variant]map[uint32][]*lane // by source
	stores   map[laneKey]*lane
	asked    map[variant][]*lane // engines' own that are asked by engine hash, too
	order    []uint16            // tiers from warm to cold; ranks are places in it
	ranks    []int16             // of each tier
}

// reaches returns the engines that are to be asked for beyond what they hold themselves; nil when there are none.
func (x *Index) reaches(m *model, r *Request, now time.Time) *reaches {
	var all *reaches
	for _, c := range m.connectors {
		if len(c.status.Stores) == 0 || r.Cluster != "" && c.name.Cluster != r.Cluster {
			continue
		}
		name := c.name
		name.Origin = event.Engine
		e := x.sources[name]
		if e == nil || !x.answers(e, now) || !x.answers(c, now) {
			continue
		}
		one := &reach{engine: e}
		for _, instance := range c.status.Stores {
			s := x.sources[event.Source{Cluster: name.Cluster, Model: name.Model, Instance: instance, Origin: event.Store}]
			if s == nil || s.isDead() || slices.Contains(one.stores, s) {
				continue
			}
			if state, _ := x.state(s, now); state.Answers() {
				one.stores = append(one.stores, s)
				one.shares = append(one.shares, StoreShare{Source: s.name, State: state})
			}
		}
		if len(one.stores) == 0 {
			continue
		}
		if all == nil {
			all = &reaches{byEngine: make(map[uint32]*reach), lanes: make(map[variant]map[uint32][]*lane), stores: make(map[laneKey]*lane)}
			all.rank(x.tiers)
		}
		all.byEngine[e.id] = one
		all.add(one)
	}
	return all
}

func (x *Index) answers(s *source, now time.Time) bool {
	state, _ := x.state(s, now)
	return state.Answers()
}

// isDead reports whether what a source's set holds is a life's that its publisher has ended.
func (s *source) isDead() bool { return s.status.Epoch > s.epoch }

func (a *reaches) rank(tiers []event.Tier) {
	for i := range tiers {
		a.order = append(a.order, uint16(i))
	}
	slices.SortFunc(a.order, func(p, q uint16) int { return compareTiers(tiers[p], tiers[q]) })
	a.ranks = make([]int16, len(tiers))
	for rank, tier := range a.order {
		a.ranks[tier] = int16(rank)
	}
}

// add makes the lanes of an engine and its stores. An engine of which no block is known yet cuts prompts as its stores do.
func (a *reaches) add(r *reach) {
	if !r.engine.isDead() {
		r.groups = r.engine.prefixGroups()
	}
	own := len(r.groups) > 0
	for i := 0; i < len(r.stores) && len(r.groups) == 0; i++ {
		r.groups = r.stores[i].prefixGroups()
	}
	r.own = make([]*lane, len(r.groups))
	for i, g := range r.groups {
		v := variant{g.BlockSize, g.Eagle}
		if a.lanes[v] == nil {
			a.lanes[v] = make(map[uint32][]*lane)
		}
		bySource := a.lanes[v]
		if own {
			r.own[i] = &lane{groups: []uint32{g.Group.Index()}}
			bySource[r.engine.id] = append(bySource[r.engine.id], r.own[i])
		}
		for _, s := range r.stores {
			k := laneKey{s.id, v}
			if a.stores[k] != nil {
				continue
			}
			l := new(lane)
			for _, g := range s.prefixGroups() {
				l.groups = append(l.groups, g.Group.Index())
			}
			a.stores[k], bySource[s.id] = l, append(bySource[s.id], l)
		}
	}
}

// ask has the engines' own blocks without a name found by engine hash.
func (a *reaches) ask(all unnamedBlocks) {
	for v, list := range all {
		for _, u := range list {
			r := a.byEngine[u.source.id]
			if r == nil {
				continue
			}
			for i, g := range r.groups {
				if g.Group.Index() == u.group.Index() && (variant{g.BlockSize, g.Eagle}) == v && r.own[i] != nil {
					if a.asked == nil {
						a.asked = make(map[variant][]*lane)
					}
					r.own[i].unnamed = u
					a.asked[v] = append(a.asked[v], r.own[i])
				}
			}
		}
	}
}

// prefixGroups returns the cache groups by which prompts are matched.
func (s *source) prefixGroups() []event.GroupInfo {
	groups := make([]event.GroupInfo, 0, len(s.told))
	for _, g := range s.told {
		if g.Spec.HoldsPrefix() && g.BlockSize > 0 {
			groups = append(groups, g)
		}
	}
	return groups
}

// walk fills the lanes of one way of cutting, up to the first block that is in none of them.
func (a *reaches) walk(x *Index, r *Request, f *forest, v variant, prefixes []event.PrefixHash) {
	bySource := a.lanes[v]
	if bySource == nil {
		return
	}
	way := x.trail(r, f, prefixes)
	for i := range prefixes {
		reached := false
		for _, h := range way.holders(i) {
			for _, l := range bySource[h.source.id] {
				if !slices.Contains(l.groups, h.group.Index()) {
					continue
				}
				l.set(i, a.ranks[h.tier])
				reached = true
			}
		}
		for _, l := range a.asked[v] {
			if tier, ok := l.unnamed.at(i); ok {
				l.set(i, a.ranks[tier])
				reached = true
			}
		}
		if !reached {
			return
		}
	}
}

// spot is where a block is taken from: by the rank of its tier, from the engine (store −1), or from one of its stores.
type spot struct{ rank, store int16 }

// compare orders spots from warm to cold, and the engine's own before its stores.
func (p spot) compare(q spot) int {
	return cmp.Or(cmp.Compare(p.rank, q.rank), cmp.Compare(p.store, q.store))
}

// reach adds up how far an engine reaches, in steps that are whole blocks of each of its groups. A step comes from the coldest
// of the places that its blocks come from. It returns the tokens of a step, 0 when nothing is known of any group.
func (x *Index) reach(a *reaches, r *reach) (*Reach, int) {
	out := &Reach{Tiers: []Tier{}, Stores: r.shares}
	if len(r.groups) == 0 {
		return out, 0
	}
	step := 1
	for _, g := range r.groups {
		step = lcm(step, int(g.BlockSize))
	}
	stores := make([][]*lane, len(r.groups))
	for i, g := range r.groups {
		for _, s := range r.stores {
			stores[i] = append(stores[i], a.stores[laneKey{s.id, variant{g.BlockSize, g.Eagle}}])
		}
	}
	counts := make([]int, len(a.order))
	for ; ; out.Blocks++ {
		worst := spot{rank: nowhere, store: -1}
		for i := range r.groups {
			each := step / int(r.groups[i].BlockSize)
			for n := out.Blocks * each; n < (out.Blocks+1)*each; n++ {
				best := bestSpot(r.own[i], stores[i], n)
				if best.rank == nowhere {
					return out.total(x, a, counts, step), step
				}
				if best.compare(worst) > 0 {
					worst = best
				}
			}
		}
		counts[worst.rank]++
		if worst.store >= 0 {
			out.Stores[worst.store].Blocks++
		}
	}
}

func bestSpot(own *lane, stores []*lane, n int) spot {
	best := spot{rank: own.at(n), store: -1}
	for i, l := range stores {
		if rank := l.at(n); rank != nowhere && (best.rank == nowhere || rank < best.rank) {
			best = spot{rank: rank, store: int16(i)}
		}
	}
	return best
}

// total fills in what follows from the counted blocks.
func (r *Reach) total(x *Index, a *reaches, counts []int, step int) *Reach {
	r.Tokens = r.Blocks * step
	for i := range r.Stores {
		r.Stores[i].Tokens = r.Stores[i].Blocks * step
	}
	for rank, n := range counts {
		if n > 0 {
			r.Tiers = append(r.Tiers, Tier{Tier: x.tiers[a.order[rank]], Blocks: n, Tokens: n * step})
		}
	}
	return r
}
