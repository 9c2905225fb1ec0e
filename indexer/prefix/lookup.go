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
	// ID, Session and Tenant are of the request that the prompt is of, as far as the asker tells; they go into the record of the lookup.
	ID      string `json:"request_id,omitempty"`
	Session string `json:"session,omitempty"`
	Tenant  string `json:"tenant,omitempty"`
	// Anywhere says that the hashes may begin in the middle of a prompt. Such a lookup searches all blocks for the first one.
	Anywhere bool `json:"anywhere,omitempty"`
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
	if r.Anywhere && len(r.Hashes) == 0 {
		errs = append(errs, errors.New("anywhere: goes with prefix_hashes; tokens begin a prompt"))
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
	m, err := x.serving(r.Model)
	if err != nil {
		return nil, err
	}
	covers := make(map[coverKey]*cover)
	now := x.cfg.Clock()
	beyond := x.reaches(m, r, now)
	unnamed := x.unnamed(m, r, now)
	if beyond != nil {
		beyond.ask(unnamed)
	}
	asked := &prompts{index: x, request: r, cuts: make(map[variant][]event.PrefixHash)}
	smallest := uint32(0)
	for v, f := range unnamed.variants(m) {
		if smallest == 0 || v.blockSize < smallest {
			smallest = v.blockSize
		}
		prefixes := asked.cut(v)
		x.cover(r, f, v, prefixes, covers)
		for _, u := range unnamed[v] {
			covers[u.key] = x.coverUnnamed(r, u, covers[u.key], f, prefixes)
		}
		if beyond != nil {
			beyond.walk(x, r, f, v, prefixes)
		}
	}
	a := &Answer{Model: r.Model, Blocks: len(r.Hashes), Tokens: len(r.Tokens), Matches: []Match{}}
	for _, s := range m.sources {
		if r.Cluster != "" && s.name.Cluster != r.Cluster {
			continue
		}
		state, reason := x.state(s, now)
		if !state.Answers() {
			a.LeftOut = append(a.LeftOut, LeftOut{Source: s.name, State: state, Reason: reason})
			continue
		}
		match := x.match(s, asked, covers)
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
	if t := x.cfg.Lookups; t.picks(r) {
		t.Tell(t.record(r, a, smallest, asked.cuts, event.UnixTime(now)))
	}
	return a, nil
}

// serving returns a model that some source serves.
func (x *Index) serving(name string) (*model, error) {
	all := *x.models.Load()
	if m := all[name]; m != nil {
		return m, nil
	}
	known := cmp.Or(strings.Join(slices.Sorted(maps.Keys(all)), ", "), "none yet")
	return nil, fmt.Errorf("model %q: %w; known: %s", name, ErrUnknownModel, known)
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
	lane    uint32
	variant variant
}

// cover is the warmest tier of each block, from the first on, as far as the group holds them without a break.
type cover struct {
	key  coverKey
	runs []coverRun

	next    int // up to where it goes on, while the owners of some blocks are looked at
	warmest uint16

	byHash bool // some blocks have no name and were found by engine hash
	named  int  // blocks before the first of those
}

// coverRun is blocks in one tier, up to one.
type coverRun struct {
	to   int
	tier uint16
}

// len returns how many blocks are covered.
func (c *cover) len() int {
	if len(c.runs) == 0 {
		return 0
	}
	return c.runs[len(c.runs)-1].to
}

// add covers further blocks, up to one.
func (c *cover) add(to int, tier uint16) {
	if n := len(c.runs); n > 0 && c.runs[n-1].tier == tier {
		c.runs[n-1].to = to
		return
	}
	c.runs = append(c.runs, coverRun{to, tier})
}

// from returns the runs from the one that has a block on.
func (c *cover) from(i int) []coverRun {
	n, _ := slices.BinarySearchFunc(c.runs, i+1, func(r coverRun, i int) int { return cmp.Compare(r.to, i) })
	return c.runs[n:]
}

// cover goes along a prompt, and stops at the first block that nobody holds together with all before it.
func (x *Index) cover(r *Request, f *forest, v variant, prefixes []event.PrefixHash, covers map[coverKey]*cover) {
	if f == nil {
		return
	}
	shelves := *x.shelves.Load()
	w := walker{forest: f, owners: x.owners, hint: f.start(r, prefixes)}
	var held []*cover
	for i := 0; i < len(prefixes); {
		to, set := w.next(prefixes, i)
		if set == nil {
			return
		}
		reached := false
		for _, id := range set.shelves {
			h := shelves[id]
			if !h.shown.Load() {
				continue
			}
			k := coverKey{h.lane, v}
			c := covers[k]
			if c == nil {
				if i > 0 {
					continue
				}
				c = &cover{key: k}
				covers[k] = c
			}
			switch {
			case c.next == to: // it is in another tier, too
				if compareTiers(x.tiers[h.tier], x.tiers[c.warmest]) < 0 {
					c.warmest = h.tier
				}
			case c.len() == i:
				c.next, c.warmest, reached = to, h.tier, true
				held = append(held, c)
			}
		}
		for _, c := range held {
			c.add(to, c.warmest)
		}
		held = held[:0]
		if !reached {
			return
		}
		i = to
	}
}

// match adds up what the groups of a source hold. With several groups that hold prefixes a block counts where all of
// them have it, in the coldest tier that serves it; groups of different block sizes are compared in steps that are
// whole blocks of each. Of these steps as many count as leave the windows of its other groups whole.
func (x *Index) match(s *source, asked *prompts, covers map[coverKey]*cover) Match {
	epoch, seq, _ := s.life()
	match := Match{Source: s.name, Epoch: epoch, Seq: seq, Tiers: []Tier{}}
	if epoch != s.epoch {
		return match
	}
	var groups []*cover
	var sizes []int
	step := 1
	for _, g := range s.prefixGroups() {
		c := new(cover)
		if own := s.group(g.Group); own != nil && covers[coverKey{own.lane, variant{g.BlockSize, g.Eagle}}] != nil {
			c = covers[coverKey{own.lane, variant{g.BlockSize, g.Eagle}}]
		}
		groups, sizes = append(groups, c), append(sizes, int(g.BlockSize))
		step = lcm(step, int(g.BlockSize))
	}
	if len(groups) == 0 {
		return match
	}
	match.BlockSize = uint32(step)
	most := groups[0].len() * sizes[0] / step
	for i, c := range groups {
		most = min(most, c.len()*sizes[i]/step)
	}
	most = x.usable(s, asked, step, most)
	onDevice := true
	counts := make([]int, len(x.tiers)) // by tier
	for match.Blocks < most {
		steps, tier := x.steps(groups, sizes, step, match.Blocks)
		steps = min(steps, most-match.Blocks)
		match.Blocks += steps
		counts[tier] += steps
		if onDevice = onDevice && x.tiers[tier].Warmth() == 0; onDevice {
			match.DeviceBlocks += steps
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

// steps returns the coldest of the tiers that serve step n, and how many steps from there on are alike; none when not all groups hold
// all of it.
func (x *Index) steps(groups []*cover, sizes []int, step, n int) (alike int, coldest uint16) {
	first := true
	for g, c := range groups {
		each := step / sizes[g]
		if (n+1)*each > c.len() {
			return 0, 0
		}
		for i, r := range c.from(n * each) {
			if first && i == 0 || r.tier != coldest && compareTiers(x.tiers[r.tier], x.tiers[coldest]) > 0 {
				coldest = r.tier
			}
			if r.to >= (n+1)*each {
				if within := r.to/each - n; first || within < alike {
					alike = within
				}
				if i > 0 { // the step is not in one tier
					alike = 1
				}
				break
			}
		}
		first = false
	}
	return alike, coldest
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
