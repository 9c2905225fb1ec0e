package prefix

import (
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"slices"

	"kvstrata/event"
)

// ShardRequest asks an index that keeps a part of the prefix hashes about those blocks of a prompt that fall to it.
type ShardRequest struct {
	Shard   Shard  `json:"shard"` // who is meant; another one refuses
	Model   string `json:"model"`
	Cluster string `json:"cluster,omitempty"` // empty = all
	Cuts    []Cut  `json:"cuts,omitempty"`
	// Anywhere says that the first block may not be a prompt's, as in a [Request].
	Anywhere bool `json:"anywhere,omitempty"`
}

// Cut is a prompt under one way of cutting it into blocks, as far as it falls to a shard.
type Cut struct {
	BlockSize uint32   `json:"block_size"`
	Eagle     bool     `json:"eagle,omitempty"`
	Blocks    int      `json:"blocks"`        // of the whole prompt
	Positions []int    `json:"positions"`     // in the whole prompt, ascending, of each hash
	Hashes    HashList `json:"prefix_hashes"` // as long
}

// HashList are prefix hashes that travel as one text: 8 bytes each, big-endian, in base64.
type HashList []event.PrefixHash

// MarshalText writes the hashes.
func (l HashList) MarshalText() ([]byte, error) {
	raw := make([]byte, 0, 8*len(l))
	for _, h := range l {
		raw = binary.BigEndian.AppendUint64(raw, uint64(h))
	}
	return base64.StdEncoding.AppendEncode(nil, raw), nil
}

// UnmarshalText reads them.
func (l *HashList) UnmarshalText(text []byte) error {
	raw, err := base64.StdEncoding.AppendDecode(nil, text)
	if err != nil || len(raw)%8 != 0 {
		return errors.New("prefix_hashes: want 8 bytes each in base64")
	}
	*l = make(HashList, 0, len(raw)/8)
	for ; len(raw) > 0; raw = raw[8:] {
		*l = append(*l, event.PrefixHash(binary.BigEndian.Uint64(raw)))
	}
	return nil
}

// ShardAnswer lists the sources of a model as one shard knows them, in order of appearance.
type ShardAnswer struct {
	Shard   Shard         `json:"shard"`
	Ready   bool          `json:"ready"`            // the shard has caught up with the stream
	Serves  bool          `json:"serves"`           // some source of the model is known
	Models  []string      `json:"models,omitempty"` // that are known, where this one is not
	Tiers   []event.Tier  `json:"tiers,omitempty"`  // that runs name by their place here
	Sources []ShardSource `json:"sources,omitempty"`
}

// ShardSource is one source.
type ShardSource struct {
	Source event.Source `json:"source"`
	State  event.State  `json:"state"`
	Reason string       `json:"reason,omitempty"`
	Epoch  event.Epoch  `json:"epoch"`
	Seq    event.Seq    `json:"seq"`
	Groups []ShardGroup `json:"groups,omitempty"` // by which prompts are matched; none of a source that is not counted
	Stores []StoreShare `json:"stores,omitempty"` // that an engine reaches on into; their blocks are in lanes
	Lanes  []ShardGroup `json:"lanes,omitempty"`  // of such a store, of all its groups together, one a cut
}

// ShardGroup is what a cache group holds of the shard's blocks of a prompt.
type ShardGroup struct {
	Group     uint32 `json:"group"`
	BlockSize uint32 `json:"block_size"`
	Eagle     bool   `json:"eagle,omitempty"`
	// Missing is the position of the first of the shard's blocks that the group lacks; the prompt's length when it lacks none.
	Missing int `json:"missing"`
	// Runs are what it holds: of an engine that reaches on into stores, and of lanes, also behind the first that is missing.
	Runs []Run `json:"runs,omitempty"`
}

// Run are consecutive ones of a shard's blocks in one tier: the position of the first, how many, and the tier's place among Tiers.
type Run [3]int

// ErrOtherShard says that a request was meant for another part of the prefix hashes.
var ErrOtherShard = errors.New("this index keeps another part of the prefix hashes")

func (r *ShardRequest) validate(mine Shard) error {
	if r.Shard != mine {
		return fmt.Errorf("%w: it is %v, and %v was asked", ErrOtherShard, mine, r.Shard)
	}
	if r.Model == "" {
		return errors.New("model: missing")
	}
	for i := range r.Cuts {
		c := &r.Cuts[i]
		last := -1
		for n, at := range c.Positions {
			if at <= last || at >= c.Blocks || n >= len(c.Hashes) || !mine.Holds(c.Hashes[n]) {
				return fmt.Errorf("cuts: want ascending positions below blocks, and for each the hash of a block that falls to %v", mine)
			}
			last = at
		}
		if len(c.Hashes) != len(c.Positions) {
			return errors.New("cuts: want a position for each hash")
		}
	}
	return nil
}

// LookupShard answers for the blocks of a prompt that fall to this index: for each source the first of them that it lacks, and
// in which tiers the others lie. Blocks without a name fall to no part, and are not counted.
func (x *Index) LookupShard(r *ShardRequest) (*ShardAnswer, error) {
	if err := r.validate(x.cfg.Shard); err != nil {
		return nil, err
	}
	x.mu.RLock()
	defer x.mu.RUnlock()
	a := &ShardAnswer{Shard: x.cfg.Shard}
	models := *x.models.Load()
	m := models[r.Model]
	if m == nil {
		a.Models = slices.Sorted(maps.Keys(models))
		return a, nil
	}
	a.Serves = true
	now := x.cfg.Clock()
	beyond := x.reaches(m, &Request{Model: r.Model, Cluster: r.Cluster}, now)
	if beyond == nil {
		beyond = new(reaches)
		beyond.rank(x.tiers)
	}
	for _, tier := range beyond.order {
		a.Tiers = append(a.Tiers, x.tiers[tier])
	}
	w := newShardWalk(r.Cuts, beyond.ranks)
	stores := beyond.readFrom()
	for _, s := range m.sources {
		if r.Cluster != "" && s.name.Cluster != r.Cluster {
			continue
		}
		one := ShardSource{Source: s.name}
		one.Epoch, one.Seq, _ = s.life()
		if one.State, one.Reason = x.state(s, now); one.State.Answers() {
			w.enter(s, &one, beyond.byEngine[s.id], stores[s])
		}
		a.Sources = append(a.Sources, one)
	}
	for i := range r.Cuts {
		way := x.trail(&Request{Anywhere: r.Anywhere}, m.forest(variant{r.Cuts[i].BlockSize, r.Cuts[i].Eagle}), r.Cuts[i].Hashes)
		w.walk(&way, i)
	}
	for i := range a.Sources {
		w.finish(&a.Sources[i])
	}
	return a, nil
}

// readFrom returns the stores that some engine reaches on into.
func (a *reaches) readFrom() map[*source]bool {
	all := make(map[*source]bool)
	for _, r := range a.byEngine {
		for _, s := range r.stores {
			all[s] = true
		}
	}
	return all
}

// shardWalk walks a shard's blocks of a prompt.
type shardWalk struct {
	cuts  []Cut
	ranks []int16                   // of each tier, from warm to cold
	lanes []map[uint32][]*shardLane // of each cut, by source
	order []*shardLane              // as groups and lanes stand in the answer; nil: of a cut that was not asked about
}

// shardLane is where each of the shard's blocks lies within a group, or within a store.
type shardLane struct {
	lane
	cut   *Cut
	holes bool // it goes on behind the first block that is missing
}

func newShardWalk(cuts []Cut, ranks []int16) *shardWalk {
	w := &shardWalk{cuts: cuts, ranks: ranks}
	for range cuts {
		w.lanes = append(w.lanes, make(map[uint32][]*shardLane))
	}
	return w
}

// enter makes the lanes of a source that counts. reach is not nil for an engine that reaches on into stores; isStore says that
// some engine reaches into this one.
func (w *shardWalk) enter(s *source, one *ShardSource, reach *reach, isStore bool) {
	if reach != nil {
		one.Stores = reach.shares
	}
	if s.isDead() {
		return
	}
	groups := s.prefixGroups()
	for _, g := range groups {
		one.Groups = append(one.Groups, ShardGroup{Group: g.Group.Index(), BlockSize: g.BlockSize, Eagle: g.Eagle})
		i := slices.IndexFunc(w.cuts, func(c Cut) bool { return c.BlockSize == g.BlockSize && c.Eagle == g.Eagle })
		w.add(s, i, reach != nil, g.Group.Index())
	}
	if !isStore {
		return
	}
	var all []uint32
	for _, g := range groups {
		all = append(all, g.Group.Index())
	}
	for i := range w.cuts {
		one.Lanes = append(one.Lanes, ShardGroup{BlockSize: w.cuts[i].BlockSize, Eagle: w.cuts[i].Eagle})
		w.add(s, i, true, all...)
	}
}

func (w *shardWalk) add(s *source, cut int, holes bool, groups ...uint32) {
	if cut < 0 {
		w.order = append(w.order, nil)
		return
	}
	l := &shardLane{lane: lane{groups: groups}, cut: &w.cuts[cut], holes: holes}
	w.lanes[cut][s.id] = append(w.lanes[cut][s.id], l)
	w.order = append(w.order, l)
}

// walk fills the lanes of one cut, up to the first block that none of them goes on with.
func (w *shardWalk) walk(way *trail, cut int) {
	for i := range w.cuts[cut].Hashes {
		reached := false
		for _, h := range way.holders(i) {
			for _, l := range w.lanes[cut][h.source.id] {
				if (l.holes || len(l.ranks) >= i) && slices.Contains(l.groups, h.group.Index()) {
					l.set(i, w.ranks[h.tier])
					reached = true
				}
			}
		}
		if !reached {
			return
		}
	}
}

// finish writes a source's lanes into the answer.
func (w *shardWalk) finish(one *ShardSource) {
	for _, list := range [][]ShardGroup{one.Groups, one.Lanes} {
		for i := range list {
			if l := w.order[0]; l != nil {
				l.write(&list[i])
			}
			w.order = w.order[1:]
		}
	}
}

func (l *shardLane) write(g *ShardGroup) {
	g.Missing = l.cut.Blocks
	missing := slices.Index(l.ranks, nowhere)
	if missing < 0 {
		missing = len(l.ranks)
	}
	if missing < len(l.cut.Positions) {
		g.Missing = l.cut.Positions[missing]
	}
	for i, rank := range l.ranks {
		if last := len(g.Runs) - 1; rank == nowhere {
			continue
		} else if i > 0 && l.ranks[i-1] == rank {
			g.Runs[last][1]++
		} else {
			g.Runs = append(g.Runs, Run{l.cut.Positions[i], 1, int(rank)})
		}
	}
}
