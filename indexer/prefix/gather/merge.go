package gather

import (
	"cmp"
	"fmt"
	"slices"

	"kvstrata/event"
	"kvstrata/indexer/prefix"
)

// checkAnswer reports what of a shard's answer does not belong to the question.
func checkAnswer(r *prefix.ShardRequest, a *prefix.ShardAnswer) error {
	if a.Shard != r.Shard {
		return fmt.Errorf("shard %v answers", a.Shard)
	}
	for i := range a.Sources {
		s := &a.Sources[i]
		for _, list := range [][]prefix.ShardGroup{s.Groups, s.Lanes} {
			for g := range list {
				if !fits(r, &list[g], len(a.Tiers)) {
					return fmt.Errorf("what it says of %v is of another prompt", s.Source)
				}
			}
		}
	}
	return nil
}

func fits(r *prefix.ShardRequest, g *prefix.ShardGroup, tiers int) bool {
	if g.BlockSize == 0 {
		return false
	}
	i := slices.IndexFunc(r.Cuts, func(c prefix.Cut) bool { return c.BlockSize == g.BlockSize && c.Eagle == g.Eagle })
	if i < 0 {
		return len(g.Runs) == 0
	}
	for _, run := range g.Runs {
		at, ok := slices.BinarySearch(r.Cuts[i].Positions, run[0])
		if !ok || run[1] < 0 || run[1] > len(r.Cuts[i].Positions)-at || run[2] < 0 || run[2] >= tiers {
			return false
		}
	}
	return true
}

// merger puts answers together.
type merger struct {
	*question
	answers []*prefix.ShardAnswer
	tiers   []event.Tier // all that the shards name, from warm to cold
	ranks   [][]int16    // of each shard's tiers, by its place among them all
	sources []*merged    // in order of appearance
	by      map[event.Source]*merged
}

// merged is one source as all shards know it.
type merged struct {
	said   []*prefix.ShardSource // by shard; nil: it does not know the source, or only an earlier life of it
	newest *prefix.ShardSource   // of the shard that has read furthest
	state  event.State
	reason string
	epoch  event.Epoch
	seq    event.Seq // up to where all shards have read that say something
}

// merge makes the shards' answers one.
func (q *question) merge(r *prefix.Request, answers []*prefix.ShardAnswer) (*prefix.Answer, error) {
	m := &merger{question: q, answers: answers, by: make(map[event.Source]*merged)}
	serves := false
	var models []string
	for _, a := range answers {
		serves, models = serves || a.Serves, append(models, a.Models...)
	}
	if !serves {
		return nil, unknownModel(r.Model, models)
	}
	m.rank()
	m.collect()
	out := &prefix.Answer{Model: r.Model, Blocks: len(r.Hashes), Tokens: len(r.Tokens), Matches: []prefix.Match{}}
	for _, s := range m.sources {
		if !s.state.Answers() {
			out.LeftOut = append(out.LeftOut, prefix.LeftOut{Source: s.newest.Source, State: s.state, Reason: s.reason})
			continue
		}
		out.Matches = append(out.Matches, m.match(s))
	}
	slices.SortStableFunc(out.Matches, func(p, q prefix.Match) int {
		return cmp.Or(cmp.Compare(reached(&q), reached(&p)), cmp.Compare(p.Source.Origin, q.Source.Origin), cmp.Compare(q.Tokens, p.Tokens),
			cmp.Compare(q.DeviceTokens, p.DeviceTokens))
	})
	return out, nil
}

// reached returns how many tokens need not be computed.
func reached(m *prefix.Match) int {
	if m.Reach != nil {
		return m.Reach.Tokens
	}
	return m.Tokens
}

// compareTiers orders tiers as an index does: from warm to cold, and equally warm ones by name.
func compareTiers(p, q event.Tier) int {
	return cmp.Or(cmp.Compare(p.Warmth(), q.Warmth()), cmp.Compare(p, q))
}

func (m *merger) rank() {
	for _, a := range m.answers {
		m.tiers = append(m.tiers, a.Tiers...)
	}
	slices.SortFunc(m.tiers, compareTiers)
	m.tiers = slices.Compact(m.tiers)
	for _, a := range m.answers {
		ranks := make([]int16, len(a.Tiers))
		for i, tier := range a.Tiers {
			at, _ := slices.BinarySearchFunc(m.tiers, tier, compareTiers)
			ranks[i] = int16(at)
		}
		m.ranks = append(m.ranks, ranks)
	}
}

// collect brings together what the shards say of each source. One that a shard leaves out of lookups is left out; of the states
// that answer, the one that is told last among live, recovering and partial counts.
func (m *merger) collect() {
	for i, a := range m.answers {
		for j := range a.Sources {
			one := &a.Sources[j]
			s := m.by[one.Source]
			if s == nil {
				s = &merged{said: make([]*prefix.ShardSource, len(m.answers)), state: one.State, reason: one.Reason, epoch: one.Epoch}
				m.by[one.Source] = s
				m.sources = append(m.sources, s)
			}
			s.said[i] = one
			s.epoch = max(s.epoch, one.Epoch)
			if s.state.Answers() && one.State > s.state {
				s.state, s.reason = one.State, one.Reason
			}
		}
	}
	for _, s := range m.sources {
		for i, one := range s.said {
			if one == nil {
				continue
			}
			if one.Epoch < s.epoch { // what it holds is of a life that is over
				s.said[i] = nil
				continue
			}
			if s.newest == nil {
				s.newest, s.seq = one, one.Seq
			} else if s.seq = min(s.seq, one.Seq); one.Seq > s.newest.Seq {
				s.newest = one
			}
		}
	}
}

const nowhere = int16(-1)

// lane is the rank of the tier of each block of a prompt within a group or a store; nowhere where it is missing.
type lane []int16

func (l lane) at(i int) int16 {
	if i >= len(l) {
		return nowhere
	}
	return l[i]
}

// find returns what a shard says of a group, or of a store under a cut; nil when it says nothing.
func find(list []prefix.ShardGroup, g *prefix.ShardGroup) *prefix.ShardGroup {
	for i := range list {
		if list[i].Group == g.Group && list[i].BlockSize == g.BlockSize && list[i].Eagle == g.Eagle {
			return &list[i]
		}
	}
	return nil
}

// missing returns the position of the first block that some shard says is missing.
func (m *merger) missing(s *merged, g *prefix.ShardGroup, c int) int {
	first := m.blocks[c]
	for i, one := range s.said {
		at := m.blocks[c]
		if one != nil {
			if said := find(one.Groups, g); said != nil {
				first = min(first, said.Missing)
				continue
			}
		}
		if mine := m.requests[i].Cuts[c].Positions; len(mine) > 0 {
			at = mine[0]
		}
		first = min(first, at)
	}
	return max(first, 0)
}

// gathered returns a group's lane up to a position; that of a store where lanes is set.
func (m *merger) gathered(s *merged, g *prefix.ShardGroup, c, upTo int, lanes bool) lane {
	all := make(lane, upTo)
	for i := range all {
		all[i] = nowhere
	}
	for i, one := range s.said {
		if one == nil {
			continue
		}
		list := one.Groups
		if lanes {
			list = one.Lanes
		}
		said := find(list, g)
		if said == nil {
			continue
		}
		mine := m.requests[i].Cuts[c].Positions
		for _, run := range said.Runs {
			from, _ := slices.BinarySearch(mine, run[0])
			for _, at := range mine[from : from+run[1]] {
				if at >= upTo {
					break
				}
				all[at] = m.ranks[i][run[2]]
			}
		}
	}
	return all
}

// cutOf returns the place of a group's cut; −1 when it was not asked about.
func (m *merger) cutOf(g *prefix.ShardGroup) int {
	return slices.Index(m.cuts, cut{g.BlockSize, g.Eagle})
}

// match adds up what the groups of a source hold, as an index does: with several groups a block counts where all of them have
// it, in the coldest tier that serves it, in steps that are whole blocks of each.
func (m *merger) match(s *merged) prefix.Match {
	out := prefix.Match{Source: s.newest.Source, State: s.state, Reason: s.reason, Epoch: s.epoch, Seq: s.seq, Tiers: []prefix.Tier{}}
	groups := s.newest.Groups
	if len(groups) > 0 {
		step := stepOf(groups)
		lanes := make([]lane, len(groups))
		for i := range groups {
			if c := m.cutOf(&groups[i]); c >= 0 {
				lanes[i] = m.gathered(s, &groups[i], c, m.missing(s, &groups[i], c), false)
			}
		}
		m.count(&out, groups, lanes, step)
	}
	if stores := m.stores(s); len(stores) > 0 {
		var step int
		out.Reach, step = m.reach(s, stores)
		out.BlockSize = cmp.Or(out.BlockSize, uint32(step))
	}
	return out
}

func (m *merger) count(out *prefix.Match, groups []prefix.ShardGroup, lanes []lane, step int) {
	out.BlockSize = uint32(step)
	counts := make([]int, len(m.tiers))
	onDevice := true
	for {
		coldest := nowhere
		for i := range groups {
			each := step / int(groups[i].BlockSize)
			for n := out.Blocks * each; n < (out.Blocks+1)*each; n++ {
				rank := lanes[i].at(n)
				if rank == nowhere {
					out.Tokens, out.DeviceTokens = out.Blocks*step, out.DeviceBlocks*step
					out.Tiers = m.tiersOf(counts, step)
					return
				}
				coldest = max(coldest, rank)
			}
		}
		counts[coldest]++
		out.Blocks++
		if onDevice = onDevice && m.tiers[coldest].Warmth() == 0; onDevice {
			out.DeviceBlocks++
		}
	}
}

func (m *merger) tiersOf(counts []int, step int) []prefix.Tier {
	out := []prefix.Tier{}
	for rank, n := range counts {
		if n > 0 {
			out = append(out, prefix.Tier{Tier: m.tiers[rank], Blocks: n, Tokens: n * step})
		}
	}
	return out
}

// stepOf returns the tokens of the least step that is whole blocks of each group.
func stepOf(groups []prefix.ShardGroup) int {
	step := 1
	for i := range groups {
		a, b := step, int(groups[i].BlockSize)
		for b != 0 {
			a, b = b, a%b
		}
		step = step / a * int(groups[i].BlockSize)
	}
	return step
}

// stores returns the stores that an engine reaches on into, by what all shards say that know the engine.
func (m *merger) stores(s *merged) (all []prefix.StoreShare) {
	for _, share := range s.newest.Stores {
		if share.Blocks, share.Tokens = 0, 0; m.by[share.Source] == nil || !m.by[share.Source].state.Answers() {
			continue
		}
		named := true
		for _, one := range s.said {
			named = named && (one == nil || slices.ContainsFunc(one.Stores, func(o prefix.StoreShare) bool { return o.Source == share.Source }))
		}
		if named {
			all = append(all, share)
		}
	}
	return all
}

// spot is where a block is taken from: by the rank of its tier, from the engine (store −1), or from one of its stores.
type spot struct{ rank, store int16 }

func (p spot) compare(q spot) int {
	return cmp.Or(cmp.Compare(p.rank, q.rank), cmp.Compare(p.store, q.store))
}

// reach goes on in the stores, block by block, as an index does. It returns the tokens of a step, 0 when nothing is known of any
// group.
func (m *merger) reach(s *merged, shares []prefix.StoreShare) (*prefix.Reach, int) {
	out := &prefix.Reach{Tiers: []prefix.Tier{}, Stores: shares}
	groups, hasOwn := s.newest.Groups, len(s.newest.Groups) > 0
	for i := 0; i < len(shares) && len(groups) == 0; i++ { // an engine of which no block is known yet cuts prompts as its stores do
		groups = m.by[shares[i].Source].newest.Groups
	}
	if len(groups) == 0 {
		return out, 0
	}
	step := stepOf(groups)
	own, stores := make([]lane, len(groups)), make([][]lane, len(groups))
	for i := range groups {
		c := m.cutOf(&groups[i])
		if c < 0 {
			continue
		}
		if hasOwn {
			own[i] = m.gathered(s, &groups[i], c, m.blocks[c], false)
		}
		for _, share := range shares {
			key := &prefix.ShardGroup{BlockSize: groups[i].BlockSize, Eagle: groups[i].Eagle}
			stores[i] = append(stores[i], m.gathered(m.by[share.Source], key, c, m.blocks[c], true))
		}
	}
	counts := make([]int, len(m.tiers))
	for ; ; out.Blocks++ {
		worst := spot{rank: nowhere, store: -1}
		for i := range groups {
			each := step / int(groups[i].BlockSize)
			for n := out.Blocks * each; n < (out.Blocks+1)*each; n++ {
				best := bestSpot(own[i], stores[i], n)
				if best.rank == nowhere {
					out.Tokens, out.Tiers = out.Blocks*step, m.tiersOf(counts, step)
					for j := range out.Stores {
						out.Stores[j].Tokens = out.Stores[j].Blocks * step
					}
					return out, step
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

func bestSpot(own lane, stores []lane, n int) spot {
	best := spot{rank: own.at(n), store: -1}
	for i, l := range stores {
		if rank := l.at(n); rank != nowhere && (best.rank == nowhere || rank < best.rank) {
			best = spot{rank: rank, store: int16(i)}
		}
	}
	return best
}
