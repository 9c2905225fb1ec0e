package prefix

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"kvstrata/event"
)

// Request asks who holds the longest prefix of a prompt, given as tokens or as prefix hashes.
type Request struct {
	Model   string `json:"model"`
	Cluster string `json:"cluster,omitempty"` // empty = all
	LoRA    string `json:"lora_name,omitempty"`
	Salt    string `json:"cache_salt,omitempty"`

	Tokens []uint32 `json:"token_ids,omitempty"`

	Hashes    []event.PrefixHash `json:"prefix_hashes,omitempty"`
	BlockSize uint32             `json:"block_size,omitempty"` // of the hashes; 0 = every block size is tried
}

// Answer lists the sources of a model, the longest reach first; of equal ones engines before connectors and stores, which serve
// no requests, and then the longest match.
type Answer struct {
	Model   string    `json:"model"`
	Blocks  int       `json:"blocks,omitempty"` // asked for, when by hashes
	Tokens  int       `json:"tokens,omitempty"` // asked for, when by tokens
	Matches []Match   `json:"matches"`
	LeftOut []LeftOut `json:"left_out,omitempty"`
}

// Match is how much of the prompt one source holds itself, and with Reach, how much an engine has together with its stores.
type Match struct {
	Source event.Source `json:"source"`
	State  event.State  `json:"state"`
	Reason string       `json:"reason,omitempty"`
	Epoch  event.Epoch  `json:"epoch"`
	Seq    event.Seq    `json:"seq"`

	BlockSize    uint32 `json:"block_size"` // tokens a block
	Blocks       int    `json:"matched_blocks"`
	Tokens       int    `json:"matched_tokens"`
	DeviceBlocks int    `json:"device_blocks"` // the prefix that lies on the device without a break
	DeviceTokens int    `json:"device_tokens"`
	Tiers        []Tier `json:"tiers"` // each block counted in its warmest tier

	// MatchedBy is "engine_hash" where blocks were found by what the engine calls them: they have no name, because it told
	// them without tokens.
	MatchedBy string `json:"matched_by,omitempty"`

	Reach *Reach `json:"reach,omitempty"` // of an engine whose connector reads from shared stores
}

// reached returns how much of the prompt need not be computed.
func (m *Match) reached() (blocks, tokens int) {
	if m.Reach != nil {
		return m.Reach.Blocks, m.Reach.Tokens
	}
	return m.Blocks, m.Tokens
}

// Tier is how much of a match one tier serves.
type Tier struct {
	Tier   event.Tier `json:"tier"`
	Blocks int        `json:"blocks"`
	Tokens int        `json:"tokens"`
}

// LeftOut is a source that is not counted, and why.
type LeftOut struct {
	Source event.Source `json:"source"`
	State  event.State  `json:"state"`
	Reason string       `json:"reason,omitempty"`
}

// ErrUnknownModel says that no source serves the model asked for.
var ErrUnknownModel = errors.New("no source serves this model")

// Validate reports every problem of a request at once.
func (r *Request) Validate() error {
	var errs []error
	if r.Model == "" {
		errs = append(errs, errors.New("model: missing"))
	}
	if len(r.Tokens) > 0 && len(r.Hashes) > 0 {
		errs = append(errs, errors.New("token_ids, prefix_hashes: give one of them"))
	}
	if len(r.Hashes) > 0 && (r.LoRA != "" || r.Salt != "") {
		errs = append(errs, errors.New("lora_name, cache_salt: prefix hashes hold them already"))
	}
	if r.BlockSize > 0 && len(r.Tokens) > 0 {
		errs = append(errs, errors.New("block_size: goes with prefix_hashes; tokens are cut as each source cuts them"))
	}
	if n := max(len(r.Tokens), len(r.Hashes)); n > maxPrompt {
		errs = append(errs, fmt.Errorf("token_ids, prefix_hashes: %d of them; want %d at most", n, maxPrompt))
	}
	return errors.Join(errs...)
}

// Lookup answers a request. A source that may know too much (stale, gone) is left out, and named.
func (x *Index) Lookup(r *Request) (*Answer, error) {
	if err := r.Validate(); err != nil {
		return nil, err
	}
	start := time.Now()
	x.mu.RLock()
	defer x.mu.RUnlock()
	m := x.models[r.Model]
	if m == nil {
		known := cmp.Or(strings.Join(slices.Sorted(maps.Keys(x.models)), ", "), "none yet")
		return nil, fmt.Errorf("model %q: %w; known: %s", r.Model, ErrUnknownModel, known)
	}
	covers := make(map[coverKey]*cover)
	now := x.cfg.Clock()
	beyond := x.reaches(m, r, now)
	unnamed := x.unnamed(m, r, now)
	if beyond != nil {
		beyond.ask(unnamed)
	}
	smallest := uint32(0)
	for v := range unnamed.variants(m) {
		if smallest == 0 || v.blockSize < smallest {
			smallest = v.blockSize
		}
		t, prefixes := m.tables[v], x.prefixes(r, v)
		x.walk(t, v, prefixes, covers)
		for _, u := range unnamed[v] {
			covers[u.key] = x.cover(u, covers[u.key], t, prefixes)
		}
		if beyond != nil {
			beyond.walk(t, v, prefixes)
		}
	}
	a := &Answer{Model: r.Model, Blocks: len(r.Hashes), Tokens: len(r.Tokens), Matches: []Match{}}
	for _, s := range x.byID {
		if s.model != m || r.Cluster != "" && s.name.Cluster != r.Cluster {
			continue
		}
		state, reason := x.state(s, now)
		if !state.Answers() {
			a.LeftOut = append(a.LeftOut, LeftOut{Source: s.name, State: state, Reason: reason})
			continue
		}
		match := x.match(s, covers)
		match.State, match.Reason = state, reason
		if beyond != nil && beyond.byEngine[s.id] != nil {
			var step int
			match.Reach, step = x.reach(beyond, beyond.byEngine[s.id])
			match.BlockSize = cmp.Or(match.BlockSize, uint32(step))
		}
		a.Matches = append(a.Matches, match)
	}
	slices.SortStableFunc(a.Matches, func(p, q Match) int {
		_, pTokens := p.reached()
		_, qTokens := q.reached()
		return cmp.Or(cmp.Compare(qTokens, pTokens), cmp.Compare(p.Source.Origin, q.Source.Origin), cmp.Compare(q.Tokens, p.Tokens),
			cmp.Compare(q.DeviceTokens, p.DeviceTokens))
	})
	x.asked.count(r, a, int(smallest))
	x.metrics.lookups.Observe(time.Since(start).Seconds())
	return a, nil
}

// prefixes returns the hashes of a request's blocks under one way of cutting.
func (x *Index) prefixes(r *Request, v variant) []event.PrefixHash {
	if len(r.Hashes) > 0 {
		if r.BlockSize != 0 && r.BlockSize != v.blockSize {
			return nil
		}
		return r.Hashes
	}
	return event.Prefixes(nil, r.Tokens, int(v.blockSize), x.hasher.Seed(r.LoRA, r.Salt), v.eagle)
}

// coverKey is one cache group of one source, under one way of cutting.
type coverKey struct {
	source  uint32
	group   uint32
	variant variant
}

// cover is the warmest tier of each block, from the first on, as far as the group holds them without a break.
type cover struct {
	key   coverKey
	place int // among the owners of the first block
	tiers []uint16

	byHash bool // some blocks have no name and were found by engine hash
	named  int  // blocks before the first of those
}

// walk goes block by block, and stops at the first block that nobody holds together with all before it.
func (x *Index) walk(t table, v variant, prefixes []event.PrefixHash, covers map[coverKey]*cover) {
	var order []*cover // as the owners of the first block stand: mostly those of the others stand likewise
	for i, p := range prefixes {
		reached, next := false, 0
		h := t[p]
		for o := range h.all {
			var c *cover
			k := coverKey{o.source, o.group, v}
			if next < len(order) && order[next].key == k {
				c = order[next]
			} else if c = covers[k]; c == nil {
				if i > 0 {
					continue
				}
				c = &cover{key: k, place: len(order), tiers: make([]uint16, 0, min(len(prefixes), 64))}
				covers[k] = c
				order = append(order, c)
			}
			next = c.place + 1
			switch len(c.tiers) {
			case i:
				c.tiers = append(c.tiers, o.tier)
			case i + 1:
				if compareTiers(x.tiers[o.tier], x.tiers[c.tiers[i]]) < 0 {
					c.tiers[i] = o.tier
				}
			default:
				continue
			}
			reached = true
		}
		if !reached {
			return
		}
	}
}

// match adds up what the groups of a source hold. With several groups that hold prefixes a block counts where all of
// them have it, in the coldest tier that serves it; groups of different block sizes are compared in steps that are
// whole blocks of each.
func (x *Index) match(s *source, covers map[coverKey]*cover) Match {
	epoch, seq, _ := s.life()
	match := Match{Source: s.name, Epoch: epoch, Seq: seq, Tiers: []Tier{}}
	if epoch != s.epoch {
		return match
	}
	var groups []*cover
	var sizes []int
	step := 1
	for _, g := range s.set.Groups() {
		if !g.Spec.HoldsPrefix() || g.BlockSize == 0 {
			continue
		}
		c := covers[coverKey{s.id, g.Group.Index(), variant{g.BlockSize, g.Eagle}}]
		if c == nil {
			c = new(cover)
		}
		groups, sizes = append(groups, c), append(sizes, int(g.BlockSize))
		step = lcm(step, int(g.BlockSize))
	}
	if len(groups) == 0 {
		return match
	}
	match.BlockSize = uint32(step)
	onDevice := true
	counts := make([]int, len(x.tiers)) // by tier
	for n := 0; ; n++ {
		tier, held := x.step(groups, sizes, step, n)
		if !held {
			break
		}
		match.Blocks++
		counts[tier]++
		if onDevice = onDevice && x.tiers[tier].Warmth() == 0; onDevice {
			match.DeviceBlocks++
		}
	}
	for i, c := range groups {
		if c.byHash && match.Blocks*(step/sizes[i]) > c.named {
			match.MatchedBy = byEngineHash
		}
	}
	match.Tokens, match.DeviceTokens = match.Blocks*step, match.DeviceBlocks*step
	for tier, n := range counts {
		if n > 0 {
			match.Tiers = append(match.Tiers, Tier{Tier: x.tiers[tier], Blocks: n, Tokens: n * step})
		}
	}
	slices.SortFunc(match.Tiers, func(p, q Tier) int { return compareTiers(p.Tier, q.Tier) })
	return match
}

// step returns the coldest of the tiers that serve step n, and whether all groups hold all of it.
func (x *Index) step(groups []*cover, sizes []int, step, n int) (coldest uint16, held bool) {
	first := true
	for g, c := range groups {
		each := step / sizes[g]
		if (n+1)*each > len(c.tiers) {
			return 0, false
		}
		for _, tier := range c.tiers[n*each : (n+1)*each] {
			if first || tier != coldest && compareTiers(x.tiers[tier], x.tiers[coldest]) > 0 {
				coldest, first = tier, false
			}
		}
	}
	return coldest, true
}

// compareTiers orders tiers from warm to cold, and equally warm ones by name, so that equal sets give equal answers.
func compareTiers(p, q event.Tier) int {
	return cmp.Or(cmp.Compare(p.Warmth(), q.Warmth()), cmp.Compare(p, q))
}

func lcm(a, b int) int {
	g, r := a, b
	for r != 0 {
		g, r = r, g%r
	}
	return a / g * b
}
