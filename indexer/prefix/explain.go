package prefix

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"kvstrata/event"
)

// ExplainRequest asks why matches end where they do.
type ExplainRequest struct {
	Request
	Tier   event.Tier `json:"tier,omitempty"`   // count this tier's blocks only
	Device bool       `json:"device,omitempty"` // count blocks on the device only, whatever it is called
}

// Validate reports every problem at once.
func (r *ExplainRequest) Validate() error {
	err := r.Request.Validate()
	if r.Tier != "" && r.Device {
		err = errors.Join(err, errors.New("tier, device: give one of them"))
	}
	return err
}

// counts reports whether a block in a tier counts.
func (r *ExplainRequest) counts(t event.Tier) bool {
	return r.Tier == "" && !r.Device || r.Device && t.Warmth() == 0 || r.Tier != "" && t == r.Tier
}

// Explanation has one ending a source, in the order of their ids.
type Explanation struct {
	Model   string   `json:"model"`
	Endings []Ending `json:"endings"`
	// EvictionsSince is the time in Unix ms of the oldest eviction that is remembered; 0 while none was forgotten.
	EvictionsSince int64       `json:"evictions_since,omitempty"`
	Unknown        []CauseKind `json:"unknown,omitempty"` // what the request leaves unknown
}

// Ending is where the match of one source ends, and why.
type Ending struct {
	Source event.Source `json:"source"`
	State  event.State  `json:"state"`
	Reason string       `json:"reason,omitempty"` // why not live

	BlockSize uint32            `json:"block_size"`     // tokens a block; 0 = nothing is known of how it cuts
	Asked     int               `json:"asked_blocks"`   // full blocks of the prompt
	Blocks    int               `json:"matched_blocks"` // in the tier asked for
	Tokens    int               `json:"matched_tokens"`
	Complete  bool              `json:"complete"`         // every full block is matched
	Prefix    *event.PrefixHash `json:"prefix,omitempty"` // of the first block that is not
	Causes    []Cause           `json:"causes"`           // the reason first, then what else is known
	Text      string            `json:"text"`             // for people
}

// CauseKind is why a block is not matched.
type CauseKind uint8

// The causes. They stand as numbers in prefixpb.
const (
	NeverStored CauseKind = 1 + iota // not known here since the source's story is
	WasEvicted                       // it was here
	OtherTier                        // held, but not in the tier asked for
	OtherSalt                        // the same tokens are resident under another cache salt
	OtherLoRA                        // the same tokens are resident under another adapter
	OtherGroup                       // held in a cache group, but not in one that is needed
	Gap                              // later blocks of the prompt are there
	IsLeftOut                        // the source is stale or gone
)

var causeNames = []string{
	NeverStored: "never_stored", WasEvicted: "evicted", OtherTier: "other_tier", OtherSalt: "other_salt", OtherLoRA: "other_lora",
	OtherGroup: "other_group", Gap: "gap", IsLeftOut: "left_out",
}

func (k CauseKind) String() string {
	if int(k) < len(causeNames) && k > 0 {
		return causeNames[k]
	}
	return fmt.Sprintf("CauseKind(%d)", k)
}

// MarshalText writes the kind's name.
func (k CauseKind) MarshalText() ([]byte, error) { return []byte(k.String()), nil }

// UnmarshalText reads a kind's name.
func (k *CauseKind) UnmarshalText(text []byte) error {
	if i := slices.Index(causeNames, string(text)); i > 0 {
		*k = CauseKind(i)
		return nil
	}
	return fmt.Errorf("cause %q: unknown", text)
}

// Cause is one fact about the first block that is not matched. What does not go with its kind is 0 or empty.
type Cause struct {
	Kind   CauseKind    `json:"kind"`
	Tiers  []event.Tier `json:"tiers,omitempty"`     // evicted from, or held in
	Time   int64        `json:"time,omitempty"`      // Unix ms: evicted when; never stored since when
	Group  uint32       `json:"group"`               // that lacks the block
	Groups []uint32     `json:"in_groups,omitempty"` // that hold it
	Blocks int          `json:"blocks,omitempty"`    // later ones that are there; leading ones under another salt or adapter
	LoRA   string       `json:"lora_name,omitempty"` // under which; empty = without one
}

// explaining is one explanation in the making.
type explaining struct {
	index   *Index
	request *ExplainRequest
	model   *model
	now     time.Time
	cuts    map[variant][]event.PrefixHash
	tiers   map[groupKey][][]event.Tier // of each block of the prompt
	others  map[uint32]other            // by source
	evicted map[evictedKey][]eviction
}

// other is how much of the prompt a source holds under another seed.
type other struct {
	tokens, blocks int
	seed           seed
}

// Explain tells of each source of a model why its match ends where it does.
func (x *Index) Explain(r *ExplainRequest) (*Explanation, error) {
	if err := r.Validate(); err != nil {
		return nil, err
	}
	x.mu.RLock()
	defer x.mu.RUnlock()
	m, err := x.serving(r.Model)
	if err != nil {
		return nil, err
	}
	e := &explaining{
		index: x, request: r, model: m, now: x.cfg.Clock(), cuts: make(map[variant][]event.PrefixHash),
		tiers: make(map[groupKey][][]event.Tier), others: make(map[uint32]other), evicted: make(map[evictedKey][]eviction),
	}
	e.find()
	e.findOthers()
	var stops []*stop
	for _, s := range x.byID {
		if s.model == m && (r.Cluster == "" || s.name.Cluster == r.Cluster) {
			stops = append(stops, e.stop(s))
		}
	}
	x.service.gone.collect(e.evicted)
	out := &Explanation{Model: r.Model, Endings: []Ending{}}
	if since := x.service.gone.since(); since != 0 {
		out.EvictionsSince = since.Std().UnixMilli()
	}
	if len(r.Hashes) > 0 {
		out.Unknown = []CauseKind{OtherSalt, OtherLoRA}
	}
	for _, st := range stops {
		e.causes(st)
		st.Text = st.sentence(e)
		out.Endings = append(out.Endings, st.Ending)
	}
	slices.SortFunc(out.Endings, func(a, b Ending) int { return cmp.Compare(a.Source.Tokens(), b.Source.Tokens()) })
	return out, nil
}

// find enters the tiers of each block of the prompt in each group of each source, whatever comes before it.
func (e *explaining) find() {
	x, r := e.index, &e.request.Request
	unnamed := x.unnamed(e.model, r, e.now)
	for v := range unnamed.variants(e.model) {
		e.cuts[v] = nil
	}
	for _, s := range x.byID { // a source that holds nothing any more still cuts prompts
		if s.model == e.model && !s.isDead() {
			for _, g := range s.prefixGroups() {
				e.cuts[variant{g.BlockSize, g.Eagle}] = nil
			}
		}
	}
	for v := range e.cuts {
		e.cuts[v] = x.prefixes(r, v)
		way := x.trail(r, e.model.forest(v), e.cuts[v])
		for i := range e.cuts[v] {
			for h := range way.places(i) {
				e.enter(groupKey{h.source, h.group, v}, i, h.tier)
			}
			for _, u := range unnamed[v] {
				if tier, ok := u.at(i); ok {
					e.enter(groupKey{u.source.id, u.group.Index(), u.key.variant}, i, x.tiers[tier])
				}
			}
		}
	}
}

func (e *explaining) enter(k groupKey, i int, tier event.Tier) {
	all := e.tiers[k]
	for len(all) <= i {
		all = append(all, nil)
	}
	if !slices.Contains(all[i], tier) {
		all[i] = append(all[i], tier)
	}
	e.tiers[k] = all
}

// at returns the tiers of block i of a group, and those of them that count.
func (e *explaining) at(k groupKey, i int) (all, counted []event.Tier) {
	if list := e.tiers[k]; i < len(list) {
		all = list[i]
	}
	for _, t := range all {
		if e.request.counts(t) {
			counted = append(counted, t)
		}
	}
	return all, counted
}

// findOthers hashes the prompt under the other seeds of the model, as far as some source holds it.
func (e *explaining) findOthers() {
	x, r := e.index, &e.request.Request
	known := x.service.seeds[r.Model]
	if known == nil || len(r.Tokens) == 0 {
		return
	}
	own := x.hasher.Seed(r.LoRA, r.Salt)
	for _, one := range known.list {
		open := x.hasher.Open(one.sealed)
		if open == own {
			continue
		}
		for _, v := range e.model.cuts() {
			for source, blocks := range e.lead(v, open) {
				if tokens := blocks * int(v.blockSize); tokens > e.others[source].tokens {
					e.others[source] = other{tokens, blocks, one}
				}
			}
		}
	}
}

// lead returns how many leading blocks of the prompt each source holds under a seed.
func (e *explaining) lead(v variant, seed uint64) map[uint32]int {
	tokens, window := e.request.Tokens, int(v.blockSize)
	if v.eagle {
		window++
	}
	lead := make(map[uint32]int)
	way := trail{index: e.index, forest: e.model.forest(v)}
	var parent event.PrefixHash
	for i, at := 0, 0; v.blockSize > 0 && at+window <= len(tokens); i, at = i+1, at+int(v.blockSize) {
		parent = event.Chain(parent, event.LocalHash(tokens[at:at+window], seed))
		way.prefixes = append(way.prefixes, parent)
		reached := false
		for h := range way.places(i) {
			if lead[h.source] == i {
				lead[h.source], reached = i+1, true
			}
		}
		if !reached {
			break
		}
	}
	return lead
}

// groupKey is one cache group of one source, under one way of cutting.
type groupKey struct {
	source  uint32
	group   uint32
	variant variant
}

// stop is an ending in the making: the block at which the match stops.
type stop struct {
	Ending
	source *source
	group  event.GroupInfo // that lacks it
	block  int             // of the group's
	found  bool            // there is such a block
}

func (st *stop) variant() variant { return variant{st.group.BlockSize, st.group.Eagle} }

func (st *stop) key() groupKey { return groupKey{st.source.id, st.group.Group.Index(), st.variant()} }

func (st *stop) evictedKey() evictedKey {
	return evictedKey{*st.Prefix, st.source.id, st.group.Group.Index()}
}

// stop finds where the match of a source ends.
func (e *explaining) stop(s *source) *stop {
	st := &stop{source: s, Ending: Ending{Source: s.name, Causes: []Cause{}}}
	st.State, st.Reason = e.index.state(s, e.now)
	if !st.State.Answers() || s.isDead() {
		return st
	}
	groups := s.prefixGroups()
	if len(groups) == 0 {
		return st
	}
	step := 1
	for _, g := range groups {
		step = lcm(step, int(g.BlockSize))
	}
	st.BlockSize = uint32(step)
	for i, g := range groups {
		n := len(e.cuts[variant{g.BlockSize, g.Eagle}]) / (step / int(g.BlockSize))
		if i == 0 || n < st.Asked {
			st.Asked = n
		}
	}
	for st.Blocks < st.Asked && !e.lacks(st, groups, step) {
		st.Blocks++
	}
	st.Tokens, st.Complete = st.Blocks*step, st.Blocks == st.Asked
	if st.found {
		p := e.cuts[st.variant()][st.block]
		st.Prefix = &p
		e.evicted[st.evictedKey()] = []eviction{}
	}
	return st
}

// lacks reports whether a group lacks a block of the next step, and notes which.
func (e *explaining) lacks(st *stop, groups []event.GroupInfo, step int) bool {
	for _, g := range groups {
		each := step / int(g.BlockSize)
		k := groupKey{st.source.id, g.Group.Index(), variant{g.BlockSize, g.Eagle}}
		for i := st.Blocks * each; i < (st.Blocks+1)*each; i++ {
			if _, counted := e.at(k, i); len(counted) == 0 {
				st.group, st.block, st.found = g, i, true
				return true
			}
		}
	}
	return false
}

// causes enters why a match ends, the reason first.
func (e *explaining) causes(st *stop) {
	switch {
	case !st.State.Answers():
		st.Causes = append(st.Causes, Cause{Kind: IsLeftOut})
		return
	case st.Complete:
		return
	case !st.found: // nothing is resident, nor known of how the source cuts
		st.Causes = append(st.Causes, e.others[st.source.id].cause(e, 0)...)
		st.Causes = append(st.Causes, e.never(st))
		return
	}
	group := st.group.Group.Index()
	held, _ := e.at(st.key(), st.block)
	list := e.evicted[st.evictedKey()]
	for i := len(list) - 1; i >= 0; i-- {
		if tier := e.index.tiers[list[i].tier]; e.request.counts(tier) {
			st.Causes = append(st.Causes, Cause{Kind: WasEvicted, Group: group, Tiers: []event.Tier{tier}, Time: millis(list[i].time.Std())})
			break
		}
	}
	if len(held) > 0 {
		tiers := slices.Clone(held)
		slices.SortFunc(tiers, compareTiers)
		st.Causes = append(st.Causes, Cause{Kind: OtherTier, Group: group, Tiers: tiers})
	} else if others := e.otherGroups(st); len(others) > 0 {
		st.Causes = append(st.Causes, Cause{Kind: OtherGroup, Group: group, Groups: others})
	}
	st.Causes = append(st.Causes, e.others[st.source.id].cause(e, st.Tokens)...)
	if len(st.Causes) == 0 || isElsewhere(st.Causes[0].Kind) {
		st.Causes = append(st.Causes, e.never(st))
	}
	if later := e.later(st); later > 0 {
		st.Causes = append(st.Causes, Cause{Kind: Gap, Group: group, Blocks: later})
	}
}

// isElsewhere reports whether a cause says nothing of the block itself.
func isElsewhere(k CauseKind) bool { return k == OtherSalt || k == OtherLoRA }

func (e *explaining) never(st *stop) Cause {
	return Cause{Kind: NeverStored, Group: st.group.Group.Index(), Time: millis(st.source.story.since)}
}

// otherGroups returns the groups of the source that hold the block.
func (e *explaining) otherGroups(st *stop) (groups []uint32) {
	for k := range e.tiers {
		if k.source != st.source.id || k.variant != st.variant() || k.group == st.group.Group.Index() {
			continue
		}
		if _, counted := e.at(k, st.block); len(counted) > 0 {
			groups = append(groups, k.group)
		}
	}
	slices.Sort(groups)
	return groups
}

// later returns how many later blocks of the prompt the group holds.
func (e *explaining) later(st *stop) (n int) {
	k := st.key()
	for i := st.block + 1; i < len(e.tiers[k]); i++ {
		if _, counted := e.at(k, i); len(counted) > 0 {
			n++
		}
	}
	return n
}

// cause tells that a source holds more of the prompt under another seed than these tokens.
func (o other) cause(e *explaining, tokens int) []Cause {
	if o.tokens <= tokens {
		return nil
	}
	open, hasher := e.index.hasher.Open(o.seed.sealed), e.index.hasher
	lora, known := o.seed.lora, o.seed.known
	if open == hasher.Seed("", "") {
		lora, known = "", true
	}
	if known && lora != e.request.LoRA {
		return []Cause{{Kind: OtherLoRA, Blocks: o.blocks, LoRA: lora}}
	}
	return []Cause{{Kind: OtherSalt, Blocks: o.blocks}}
}

func millis(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixMilli()
}

// sentence tells an ending to people.
func (st *stop) sentence(e *explaining) string {
	switch {
	case !st.State.Answers():
		return "Left out of lookups: the source is " + st.State.String() + because(st.Reason) + "."
	case st.Complete && st.Asked == 0:
		return fmt.Sprintf("The prompt has no full block of %d tokens as this source cuts it.", st.BlockSize)
	case st.Complete:
		return fmt.Sprintf("All %d blocks are matched.", st.Asked)
	}
	parts := make([]string, 0, len(st.Causes))
	for _, c := range st.Causes {
		parts = append(parts, c.phrase(e))
	}
	if !st.found {
		return "Nothing is matched: " + strings.Join(parts, "; ") + "."
	}
	return fmt.Sprintf("%d of %d blocks are matched; the next one: %s.", st.Blocks, st.Asked, strings.Join(parts, "; "))
}

func because(reason string) string {
	if reason == "" {
		return ""
	}
	return ", " + reason
}

// phrase tells a cause to people.
func (c *Cause) phrase(e *explaining) string {
	switch c.Kind {
	case NeverStored:
		if c.Time == 0 {
			return "nothing of this source was told yet"
		}
		return "not stored in the " + e.ago(c.Time) + " that are known here"
	case WasEvicted:
		if c.Time == 0 {
			return "evicted from " + tierNames(c.Tiers)
		}
		return "evicted from " + tierNames(c.Tiers) + " " + e.ago(c.Time) + " ago"
	case OtherTier:
		return "held in " + tierNames(c.Tiers) + " only"
	case OtherGroup:
		return fmt.Sprintf("held in cache group %s, but not in group %d", strings.Trim(fmt.Sprint(c.Groups), "[]"), c.Group)
	case OtherSalt:
		return fmt.Sprintf("the first %d blocks of these tokens are there under another cache salt", c.Blocks)
	case OtherLoRA:
		if c.LoRA == "" {
			return fmt.Sprintf("the first %d blocks of these tokens are there without an adapter", c.Blocks)
		}
		return fmt.Sprintf("the first %d blocks of these tokens are there under adapter %q", c.Blocks, c.LoRA)
	case Gap:
		return fmt.Sprintf("%d later blocks are there", c.Blocks)
	default:
		return c.Kind.String()
	}
}

func (e *explaining) ago(ms int64) string {
	return max(0, e.now.Sub(time.UnixMilli(ms))).Round(time.Millisecond).String()
}

func tierNames(tiers []event.Tier) string {
	names := make([]string, 0, len(tiers))
	for _, t := range tiers {
		names = append(names, cmp.Or(string(t), "the device"))
	}
	return strings.Join(names, ", ")
}
