package prefix_test

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"maps"
	"slices"
	"time"

	"kvstrata/event"
	"kvstrata/indexer/prefix"
)

// oracle is what the index should answer, found the slow way: source by source, block by block, over plain maps.
type oracle struct {
	sources []*known // in order of appearance
	now     time.Time
}

// known is what the index was given of one source.
type known struct {
	source    event.Source
	life      *life
	fence     event.Fence
	doubt     string
	told      event.Status
	spoken    bool
	toldAt    time.Time
	appliedAt time.Time
	held      map[holding]event.Tier // of life, when it was last looked at; nil = not since it changed
}

// life is one life of a source after some batch, as its raw events tell it.
type life struct {
	epoch   event.Epoch
	seq     event.Seq
	started bool
	asSet   bool
	groups  map[uint32]event.GroupInfo
	copies  map[place]uint32
	names   map[block]name
	orphans map[block]orphan
	taken   map[block]name // that blocks of windows have from other groups
}

// block is what an engine calls a block in one cache group; place is a tier that holds it.
type block struct {
	hash  event.BlockHash
	group uint32
}

type place struct {
	block
	tier event.Tier
}

// name is everything that a block stands for: the tokens up to its end, and under what they were computed.
type name struct {
	text       string
	lora, salt string
	hash       event.PrefixHash
}

// orphan is a block of which no more than its own tokens is known.
type orphan struct {
	parent  block
	window  []uint32
	lora    string
	size    int
	isEagle bool
}

// holding is a prefix in a group: by its tokens, or by its hash.
type holding struct {
	group uint32
	name  name
}

func newLife(epoch event.Epoch, asSet bool) *life {
	return &life{
		epoch: epoch, asSet: asSet, groups: make(map[uint32]event.GroupInfo), copies: make(map[place]uint32),
		names: make(map[block]name), orphans: make(map[block]orphan), taken: make(map[block]name),
	}
}

func (l *life) clone() *life {
	c := *l
	c.groups, c.copies, c.names, c.orphans = maps.Clone(l.groups), maps.Clone(l.copies), maps.Clone(l.names), maps.Clone(l.orphans)
	c.taken = maps.Clone(l.taken)
	return &c
}

// batch enters the raw events of one batch.
func (l *life) batch(last event.Seq, events []event.Event) {
	l.started, l.seq = true, last
	for i := range events {
		ev := &events[i]
		switch ev.Kind {
		case event.Stored:
			l.store(ev)
		case event.Evicted:
			for _, b := range ev.Blocks {
				at := place{block{b.Hash, ev.Group.Index()}, ev.Tier}
				if l.copies[at]--; l.copies[at]+1 <= 1 { // it had one, or none
					delete(l.copies, at)
				}
				if !l.resident()[at.block] {
					delete(l.taken, at.block)
				}
			}
		case event.Cleared:
			clear(l.copies)
			clear(l.taken)
		}
	}
}

func (l *life) store(ev *event.Event) {
	g := ev.Group.Index()
	if ev.BlockSize > 0 {
		l.groups[g] = event.GroupInfo{Group: ev.Group, BlockSize: ev.BlockSize, Spec: ev.Spec, Window: ev.Window, Eagle: ev.Eagle}
	}
	parent := block{ev.Parent, g}
	above, rooted := name{lora: ev.LoRA, salt: ev.Salt}, true
	if ev.HasParent {
		above, rooted = l.names[parent]
	}
	for i, bl := range ev.Blocks {
		b := block{bl.Hash, g}
		if len(ev.Tokens) > 0 {
			o := orphan{parent: parent, lora: ev.LoRA, size: int(ev.BlockSize), isEagle: ev.Eagle}
			end := (i + 1) * o.size
			if ev.Eagle {
				end++
			}
			o.window = ev.Tokens[i*o.size : end]
			_, named := l.names[b]
			switch {
			case rooted:
				above = o.below(above)
				delete(l.orphans, b)
				l.names[b] = above
			case !named:
				if _, waits := l.orphans[b]; !waits {
					l.orphans[b] = o
				}
			}
			l.settle()
			parent = b
		}
		if at := (place{b, ev.Tier}); !l.asSet || l.copies[at] == 0 {
			l.copies[at]++
		}
		l.takeOver()
	}
}

// resident are the blocks that lie in some tier.
func (l *life) resident() map[block]bool {
	all := make(map[block]bool)
	for at := range l.copies {
		all[at.block] = true
	}
	return all
}

// name returns what a block stands for, by its own tokens or by another group's.
func (l *life) name(b block) (name, bool) {
	if n, ok := l.names[b]; ok {
		return n, true
	}
	n, ok := l.taken[b]
	return n, ok
}

// takeOver names what can be named in groups that do not hold prefixes.
func (l *life) takeOver() {
	all := l.resident()
	for again := true; again; {
		again = false
		for b := range all {
			to := l.groups[b.group]
			if _, named := l.name(b); named || to.Spec.HoldsPrefix() {
				continue
			}
			for g, from := range l.groups {
				other := block{b.hash, g}
				n, named := l.name(other)
				if named && all[other] && from.BlockSize == to.BlockSize && from.Eagle == to.Eagle {
					l.taken[b], again = n, true
				}
			}
		}
	}
}

// below returns the name of a block under one with a name.
func (o orphan) below(above name) name {
	whole := len(above.text) / (4 * o.size) * 4 * o.size // an eagle block's last token is the next one's first
	n := name{text: above.text[:whole] + spell(o.window), lora: above.lora, salt: above.salt}
	hashes := event.Prefixes(nil, read(n.text), o.size, event.Hasher{}.Seed(n.lora, n.salt), o.isEagle)
	n.hash = hashes[len(hashes)-1]
	return n
}

// settle names the orphans whose parent has a name. One under a salt never gets it: the salt is told with roots only.
func (l *life) settle() {
	for again := true; again; {
		again = false
		for b, o := range l.orphans {
			above, ok := l.names[o.parent]
			if !ok {
				continue
			}
			delete(l.orphans, b)
			if above.lora == o.lora && above.salt == "" {
				l.names[b] = o.below(above)
				again = true
			}
		}
	}
}

func spell(tokens []uint32) string {
	var text []byte
	for _, t := range tokens {
		text = binary.LittleEndian.AppendUint32(text, t)
	}
	return string(text)
}

func read(text string) []uint32 {
	tokens := make([]uint32, len(text)/4)
	for i := range tokens {
		tokens[i] = binary.LittleEndian.Uint32([]byte(text[4*i : 4*i+4]))
	}
	return tokens
}

// source returns what is known of a source, entered at its first appearance.
func (o *oracle) source(s event.Source) *known {
	for _, k := range o.sources {
		if k.source == s {
			return k
		}
	}
	k := &known{
		source: s, life: newLife(0, false), toldAt: o.now,
		told: event.Status{Source: s, State: event.StateRecovering, Reason: "nothing told yet"},
	}
	o.sources = append(o.sources, k)
	return k
}

// apply takes what a message made of a source.
func (o *oracle) apply(s event.Source, l *life, fence event.Fence) {
	k := o.source(s)
	if k.life.epoch != l.epoch {
		k.doubt = ""
	}
	k.life, k.fence, k.appliedAt, k.held = l.clone(), fence, o.now, nil
}

// restore takes what a checkpoint says of a source.
func (o *oracle) restore(cp *event.Checkpoint, l *life) {
	k := o.source(cp.Source)
	k.life, k.fence, k.doubt, k.held = l.clone(), cp.Fence, "", nil
	clear(k.life.taken) // a checkpoint has the publisher's names alone
	k.life.takeOver()
	same := k.told.Epoch == cp.Epoch && k.told.Fence == cp.Fence
	if k.told.Epoch > cp.Epoch || k.told.Fence > cp.Fence || k.spoken && same {
		return
	}
	k.spoken = false
	k.told = event.Status{
		Epoch: cp.Epoch, Fence: cp.Fence, Seq: cp.Seq, Ledger: cp.Ledger, State: event.StateRecovering,
		Reason: "read from a checkpoint; its subscriber has not spoken yet",
	}
	if cp.State == event.StateStale || cp.State == event.StateGone {
		k.told.State, k.told.Reason = cp.State, cp.Reason
	}
}

func (o *oracle) tell(st *event.Status) {
	k := o.source(st.Source)
	k.told, k.spoken, k.toldAt = *st, true, o.now
}

func (k *known) state(now time.Time) (event.State, string) {
	silent := min(now.Sub(k.toldAt), now.Sub(k.appliedAt))
	switch {
	case !k.told.State.Answers():
		return k.told.State, k.told.Reason
	case k.doubt != "":
		return event.StateStale, k.doubt + "; waiting for a checkpoint"
	case silent > time.Minute:
		return event.StateStale, fmt.Sprintf("no word from its subscriber for %v", silent)
	default:
		return k.told.State, k.told.Reason
	}
}

// dead reports whether the publisher told of a life that nothing came of yet.
func (k *known) dead() bool { return k.told.Epoch > k.life.epoch }

// serves reports whether some source is of a model.
func (o *oracle) serves(model string) bool {
	return slices.ContainsFunc(o.sources, func(k *known) bool { return k.source.Model == model })
}

// answer is what the index should answer.
func (o *oracle) answer(r *prefix.Request) *prefix.Answer {
	a := &prefix.Answer{Model: r.Model, Blocks: len(r.Hashes), Tokens: len(r.Tokens), Matches: []prefix.Match{}}
	for _, k := range o.sources {
		if k.source.Model != r.Model || r.Cluster != "" && k.source.Cluster != r.Cluster {
			continue
		}
		state, reason := k.state(o.now)
		if !state.Answers() {
			a.LeftOut = append(a.LeftOut, prefix.LeftOut{Source: k.source, State: state, Reason: reason})
			continue
		}
		m := prefix.Match{Source: k.source, State: state, Reason: reason, Epoch: k.told.Epoch, Tiers: []prefix.Tier{}}
		if !k.dead() {
			m.Epoch, m.Seq = k.life.epoch, k.life.seq
			k.walk(r, &m)
		}
		if k.source.Origin == event.Engine {
			o.reach(r, k, &m)
		}
		a.Matches = append(a.Matches, m)
	}
	slices.SortStableFunc(a.Matches, func(p, q prefix.Match) int {
		return cmp.Or(reached(&q)-reached(&p), int(p.Source.Origin)-int(q.Source.Origin), q.Tokens-p.Tokens, q.DeviceTokens-p.DeviceTokens)
	})
	return a
}

func reached(m *prefix.Match) int {
	if m.Reach != nil {
		return m.Reach.Tokens
	}
	return m.Tokens
}

// stores returns the stores that an engine's connector names and that can be counted on.
func (o *oracle) stores(k *known) []*known {
	var stores []*known
	at := k.source
	at.Origin = event.Connector
	for _, c := range o.sources {
		if state, _ := c.state(o.now); c.source != at || !state.Answers() {
			continue
		}
		for _, name := range c.told.Stores {
			for _, s := range o.sources {
				state, _ := s.state(o.now)
				if s.source == (event.Source{Cluster: at.Cluster, Model: at.Model, Instance: name, Origin: event.Store}) && state.Answers() &&
					!s.dead() && !slices.Contains(stores, s) {
					stores = append(stores, s)
				}
			}
		}
	}
	return stores
}

// groups returns the groups that hold prefixes in a source's present life.
func (k *known) groups() (groups []event.GroupInfo) {
	for _, g := range k.life.groups {
		if g.Spec.HoldsPrefix() && !k.dead() {
			groups = append(groups, g)
		}
	}
	return groups
}

// reach goes on in the stores that an engine's connector names, block by block.
func (o *oracle) reach(r *prefix.Request, k *known, m *prefix.Match) {
	stores := o.stores(k)
	if len(stores) == 0 {
		return
	}
	m.Reach = &prefix.Reach{Tiers: []prefix.Tier{}}
	groups, own := k.groups(), len(k.groups()) > 0
	for _, s := range stores {
		state, _ := s.state(o.now)
		m.Reach.Stores = append(m.Reach.Stores, prefix.StoreShare{Source: s.source, State: state})
		if len(groups) == 0 {
			groups = s.groups()
		}
	}
	if len(groups) == 0 {
		return
	}
	step := 1
	for _, g := range groups {
		for first := step; step%int(g.BlockSize) != 0; {
			step += first
		}
	}
	m.BlockSize = uint32(step)
	inTier := make(map[event.Tier]int)
	for ; ; m.Reach.Blocks++ {
		coldest, from := event.Tier(""), -1
		for _, g := range groups {
			each := step / int(g.BlockSize)
			for i := m.Reach.Blocks * each; i < (m.Reach.Blocks+1)*each; i++ {
				best, where := event.Tier(""), -1
				if own {
					best, _ = k.holds(r, &g, i)
				}
				for n, s := range stores {
					for _, other := range s.groups() {
						if other.BlockSize != g.BlockSize || other.Eagle != g.Eagle {
							continue
						}
						if tier, ok := s.holds(r, &other, i); ok && (best == "" || colder(best, tier)) {
							best, where = tier, n
						}
					}
				}
				if best == "" {
					o.finish(m, inTier, step)
					return
				}
				if coldest == "" || colder(best, coldest) || best == coldest && where > from {
					coldest, from = best, where
				}
			}
		}
		inTier[coldest]++
		if from >= 0 {
			m.Reach.Stores[from].Blocks++
		}
	}
}

func (*oracle) finish(m *prefix.Match, inTier map[event.Tier]int, step int) {
	m.Reach.Tokens = m.Reach.Blocks * step
	for i := range m.Reach.Stores {
		m.Reach.Stores[i].Tokens = m.Reach.Stores[i].Blocks * step
	}
	for _, tier := range warmFirst {
		if n := inTier[tier]; n > 0 {
			m.Reach.Tiers = append(m.Reach.Tiers, prefix.Tier{Tier: tier, Blocks: n, Tokens: n * step})
		}
	}
}

// warmFirst are all tiers of the tests, from warm to cold.
var warmFirst = []event.Tier{event.GPU, event.CPU, event.Storage, "ATTIC", "TAPE"}

// walk goes as far as all groups that hold prefixes go together.
func (k *known) walk(r *prefix.Request, m *prefix.Match) {
	var groups []event.GroupInfo
	step := 1
	for _, g := range k.life.groups {
		if g.Spec.HoldsPrefix() {
			groups = append(groups, g)
			for first := step; step%int(g.BlockSize) != 0; {
				step += first
			}
		}
	}
	if len(groups) == 0 {
		return
	}
	m.BlockSize = uint32(step)
	var tiers []event.Tier
	for {
		coldest, all := event.Tier(""), true
		for _, g := range groups {
			each := step / int(g.BlockSize)
			for i := len(tiers) * each; i < (len(tiers)+1)*each && all; i++ {
				tier, holds := k.holds(r, &g, i)
				all = all && holds
				if coldest == "" || colder(tier, coldest) {
					coldest = tier
				}
			}
		}
		if !all {
			break
		}
		tiers = append(tiers, coldest)
	}
	for len(tiers) > 0 && !k.continues(r, len(tiers)*step) {
		tiers = tiers[:len(tiers)-1]
	}
	m.Blocks = len(tiers)
	inTier := make(map[event.Tier]int)
	device := true
	for _, tier := range tiers {
		inTier[tier]++
		if device = device && tier == event.GPU; device {
			m.DeviceBlocks++
		}
	}
	m.Tokens, m.DeviceTokens = m.Blocks*step, m.DeviceBlocks*step
	for _, tier := range warmFirst {
		if n := inTier[tier]; n > 0 {
			m.Tiers = append(m.Tiers, prefix.Tier{Tier: tier, Blocks: n, Tokens: n * step})
		}
	}
}

// continues reports whether what the next token behind a prefix looks at is there: the tokens that its windows show it, and the state.
func (k *known) continues(r *prefix.Request, tokens int) bool {
	for _, g := range k.life.groups {
		seen := 0
		switch g.Spec {
		case event.SpecMamba:
			seen = 1
		case event.SpecSlidingWindow, event.SpecSlidingWindowMLA:
			seen = int(g.Window) - 1
		}
		if seen <= 0 {
			continue
		}
		if tokens%int(g.BlockSize) != 0 {
			return false
		}
		for at := max(0, tokens-seen); at < tokens; at++ {
			if _, ok := k.holds(r, &g, at/int(g.BlockSize)); !ok {
				return false
			}
		}
	}
	return true
}

// holds returns the warmest tier in which a group holds block i of what is asked for.
func (k *known) holds(r *prefix.Request, g *event.GroupInfo, i int) (event.Tier, bool) {
	if k.held == nil {
		k.held = make(map[holding]event.Tier)
		for at := range k.life.copies {
			n, named := k.life.name(at.block)
			if !named {
				continue
			}
			for _, h := range []holding{{at.group, n}, {at.group, name{hash: n.hash}}} {
				if other, ok := k.held[h]; !ok || colder(other, at.tier) {
					k.held[h] = at.tier
				}
			}
		}
	}
	size := int(g.BlockSize)
	if len(r.Hashes) > 0 {
		if i >= len(r.Hashes) || r.BlockSize != 0 && r.BlockSize != g.BlockSize {
			return "", false
		}
		tier, ok := k.held[holding{g.Group.Index(), name{hash: r.Hashes[i]}}]
		return tier, ok
	}
	end := (i + 1) * size
	if g.Eagle {
		end++
	}
	if end > len(r.Tokens) {
		return "", false
	}
	hashes := event.Prefixes(nil, r.Tokens[:end], size, event.Hasher{}.Seed(r.LoRA, r.Salt), g.Eagle)
	n := name{text: spell(r.Tokens[:end]), lora: r.LoRA, salt: r.Salt, hash: hashes[len(hashes)-1]}
	tier, ok := k.held[holding{g.Group.Index(), n}]
	return tier, ok
}

func colder(p, q event.Tier) bool {
	return p.Warmth() > q.Warmth() || p.Warmth() == q.Warmth() && p > q
}

// resident is what the source should be listed to hold.
func (k *known) resident() map[string]uint32 {
	all := make(map[string]uint32)
	for at, copies := range k.life.copies {
		n, _ := k.life.name(at.block)
		all[row(at.hash, at.group, at.tier, n.hash)] = copies
	}
	return all
}

func row(h event.BlockHash, group uint32, tier event.Tier, prefix event.PrefixHash) string {
	return fmt.Sprintf("%v %d %s %v", h, group, tier, prefix)
}
