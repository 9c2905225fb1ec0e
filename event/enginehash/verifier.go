package enginehash

import (
	"cmp"
	"fmt"

	"kvstrata/event"
)

// Config bounds what a verifier does.
type Config struct {
	// Seed is what the engine's PYTHONHASHSEED is known to be, or a root ([ParseRecipe]); empty = not told. The default
	// of vLLM, "0" and "random" are tried in any case.
	Seed string
	// Burst is how many blocks may be hashed at first, and at most between two rests.
	Burst int
	// Every is how many blocks must be seen for one to be hashed beyond the burst; 1 hashes all.
	Every int
	// Digests bounds how many digests are remembered, so that runs that continue others can be compared; the oldest go
	// first.
	Digests int
}

// DefaultConfig returns the configuration that costs an engine's subscriber next to nothing.
func DefaultConfig() Config { return Config{Burst: 4096, Every: 64, Digests: 1 << 12} }

// minTried is how many first blocks no scheme must explain before that is a verdict.
const minTried = 3

// candidate is a recipe that might explain a source, and what its seed is called.
type candidate struct {
	Recipe
	seed string // as ParseRecipe reads it
	name string
}

// Verifier finds out how a source names its blocks, from the STORED runs that it tells, and goes on comparing. A life of a
// source has one: another life may have another root. One goroutine owns it.
//
// It hashes no more blocks than [Config] allows, and compares a run only if it knows the digest before it: of a root, or of
// a run that it compared, or where events carry whole digests. In models with several cache groups of different block
// sizes blocks are hashed at a size that events do not tell; what differs there counts as skipped.
type Verifier struct {
	cfg        Config
	candidates []candidate
	hashers    map[hasherKey]*Hasher

	found    *candidate // nil: none yet
	form     Form       // of extra keys; 0: not known yet
	rootless bool       // the scheme is known, the root is not: it was found by whole digests alone
	credit   int
	rest     int // seen blocks that earned nothing yet
	known    memory
	tried    int // first blocks of text that no candidate explained
	groups   map[event.Group]uint32
	contract event.HashContract
	skip     string // why blocks were skipped that no budget would allow
	first    string // difference
	keys     []Key
}

type hasherKey struct {
	scheme Scheme
	form   Form
	same   bool
	pairs  bool
}

// NewVerifier returns a verifier that has seen nothing. It refuses a seed that it can't read.
func NewVerifier(cfg Config) (*Verifier, error) {
	v := &Verifier{cfg: cfg, hashers: make(map[hasherKey]*Hasher)}
	for _, s := range Schemes() {
		if s == SGLang {
			v.candidates = append(v.candidates, candidate{Recipe{Scheme: s}, "", ""})
			continue
		}
		seeds := []candidate{{seed: DefaultSeed, name: "default"}, {seed: "0", name: "0"}, {seed: "random", name: `"random"`}}
		if cfg.Seed != "" {
			seeds = append([]candidate{{seed: cfg.Seed, name: "configured"}}, seeds...)
		}
		for _, c := range seeds {
			r, err := ParseRecipe(s.String(), c.seed)
			if err != nil {
				return nil, err
			}
			v.candidates = append(v.candidates, candidate{r, c.seed, c.name})
		}
	}
	v.Reset()
	return v, nil
}

// Reset forgets everything: a new life begins.
func (v *Verifier) Reset() {
	v.found, v.form, v.rootless, v.tried = nil, 0, false, 0
	v.credit, v.rest = v.cfg.Burst, 0
	v.known = memory{most: v.cfg.Digests, digests: make(map[uint64]Digest)}
	v.groups = make(map[event.Group]uint32)
	v.contract, v.skip, v.first = event.HashContract{Verdict: event.HashesUnknown}, "", ""
}

// Recipe returns the scheme and the seed by which hashes can be computed, as [ParseRecipe] reads them, once a block was
// explained by them.
func (v *Verifier) Recipe() (scheme, seed string, ok bool) {
	if v.found == nil || v.rootless {
		return "", "", false
	}
	return v.found.Scheme.String(), v.found.seed, true
}

// Contract returns what is known by now.
func (v *Verifier) Contract() event.HashContract {
	c := v.contract
	c.Reason = v.skip
	if v.found != nil {
		c.Scheme, c.Seed, c.Verdict = v.found.Scheme.String(), v.found.name, event.HashesVerified
		if v.form != 0 {
			c.Keys = v.form.String()
		}
		if v.rootless {
			c.Seed = "unknown"
			c.Reason = "the root hash is unknown, so prompts can't be hashed: set PYTHONHASHSEED on the engine, or tell what it is"
		}
	}
	switch {
	case v.found == nil && v.tried >= minTried:
		c.Verdict = event.HashesDiffer
		c.Reason = "block hashes match no known scheme: PYTHONHASHSEED is not set on a vLLM before #51875 or under an xxhash algorithm, " +
			"or set to what was not told here; or blocks are hashed at a smaller size than they have"
		if v.isMixed() {
			c.Reason = mixedGroups
		}
	case c.Differ > 0:
		c.Verdict = event.HashesDiffer
		seed := ""
		if c.Seed != "" {
			seed = " with seed " + c.Seed
		}
		c.Reason = fmt.Sprintf("scheme %s%s explains %d of %d blocks; first difference: %s", c.Scheme, seed, c.Verified,
			c.Verified+c.Differ, v.first)
	}
	return c
}

const mixedGroups = "cache groups of several block sizes: blocks are hashed at a size that events do not tell"

// note keeps the first reason why blocks are skipped.
func (v *Verifier) note(reason string) { v.skip = cmp.Or(v.skip, reason) }

// Observe takes one event as an engine told it, with its tokens, extra keys and salt, in the order of the stream.
func (v *Verifier) Observe(seq event.Seq, ev *event.Event) {
	if ev.Kind != event.Stored || len(ev.Blocks) == 0 {
		return
	}
	n := len(ev.Blocks)
	v.earn(n)
	if !v.fits(ev) {
		v.contract.Skipped += uint64(n)
		return
	}
	if v.found == nil || v.rootless && !ev.HasParent {
		v.detect(ev)
	}
	if v.found == nil {
		v.contract.Skipped += uint64(n)
		return
	}
	parent, ok := v.parent(ev)
	if !ok || v.credit < n {
		v.contract.Skipped += uint64(n)
		return
	}
	v.credit -= n
	v.compare(seq, ev, parent)
}

// earn adds to what may be hashed for n blocks seen.
func (v *Verifier) earn(n int) {
	every := max(v.cfg.Every, 1)
	v.rest += n
	v.credit = min(v.credit+v.rest/every, max(v.cfg.Burst, n))
	v.rest %= every
}

// fits reports whether a run brings what its hashes are made of.
func (v *Verifier) fits(ev *event.Event) bool {
	if ev.BlockSize > 0 && len(v.groups) < maxGroups {
		v.groups[event.Group(ev.Group.Index())] = ev.BlockSize
	}
	switch {
	case len(ev.Tokens) == 0 || ev.BlockSize == 0:
		v.note("runs without tokens can't be compared")
	case len(ev.Tokens) != (len(ev.Blocks)-1)*int(ev.BlockSize)+window(ev):
		v.note("tokens that do not fill their blocks can't be compared")
	default:
		return true
	}
	return false
}

// window returns how many tokens a block's hash is made of.
func window(ev *event.Event) int {
	if ev.Eagle {
		return int(ev.BlockSize) + 1
	}
	return int(ev.BlockSize)
}

// maxGroups bounds how many cache groups are told apart.
const maxGroups = 64

// isMixed reports whether the source has cache groups of several block sizes.
func (v *Verifier) isMixed() bool {
	var size uint32
	for _, s := range v.groups {
		if size != 0 && s != size {
			return true
		}
		size = s
	}
	return false
}

// parent returns the digest before a run under the recipe found.
func (v *Verifier) parent(ev *event.Event) (d Digest, ok bool) {
	if !ev.HasParent {
		if v.rootless {
			return Digest{}, false
		}
		d, _ = v.found.start(ev.Salt)
		return d, true
	}
	if d, ok = v.found.Scheme.digestOf(ev.Parent); ok {
		return d, true
	}
	n, _ := ev.Parent.Int()
	return v.known.get(n)
}

// detect looks for the recipe that explains a run's first block. Where events carry whole digests, any two blocks in a
// row tell the scheme, if not the root.
func (v *Verifier) detect(ev *event.Event) {
	if v.credit < 1 {
		return
	}
	if !ev.HasParent {
		v.credit -= min(v.credit, 8) // about what trying all of them costs
		for i := range v.candidates {
			c := &v.candidates[i]
			root, _ := c.start(ev.Salt)
			if v.matches(c.Scheme, root, ev, 0) {
				v.found, v.rootless = c, false
				return
			}
		}
		if ev.LoRA == "" && v.blockKeys(SHA256, ev, 0) == nil && len(v.keys) == 0 {
			v.tried++
		}
	}
	if v.rootless {
		return
	}
	at, before := 0, ev.Parent
	if !ev.HasParent {
		if len(ev.Blocks) < 2 {
			return
		}
		at, before = 1, ev.Blocks[0].Hash
	}
	for _, s := range Schemes() {
		parent, whole := s.digestOf(before)
		if whole && v.matches(s, parent, ev, at) {
			v.found, v.rootless = &candidate{Recipe: Recipe{Scheme: s}}, true
			return
		}
	}
}

// matches reports whether block i of a run has the hash that a scheme gives it, under any form of its extra keys.
func (v *Verifier) matches(s Scheme, parent Digest, ev *event.Event, i int) bool {
	if v.blockKeys(s, ev, i) != nil {
		return false
	}
	_, _, found := v.try(s, parent, ev, i)
	return found == explained
}

// blockKeys reads the extra keys of block i of a run into v.keys. What SGLang's events have of them is in its root.
func (v *Verifier) blockKeys(s Scheme, ev *event.Event, i int) (err error) {
	v.keys = v.keys[:0]
	if s == SGLang {
		if ev.LoRA != "" {
			return ErrKeys // an adapter is hashed by a number that events do not tell
		}
		return nil
	}
	root := i == 0 && !ev.HasParent
	if i < len(ev.ExtraKeys) {
		v.keys, err = DecodeKeys(v.keys, ev.ExtraKeys[i], ev.LoRA, root)
		return err
	}
	if ev.LoRA != "" { // releases that tell no extra keys
		v.keys = append(v.keys, Key{Kind: KeyLoRA, Text: ev.LoRA})
	}
	if root && ev.Salt != "" {
		v.keys = append(v.keys, Key{Kind: KeySalt, Text: ev.Salt})
	}
	return nil
}

// finding is what comes of hashing one block.
type finding uint8

const (
	unhashable  finding = iota // it can't be hashed in any way that is open
	unexplained                // it has another hash
	explained
)

// try hashes block i of a run with the extra keys in v.keys, in every way that is open, until one gives the hash.
func (v *Verifier) try(s Scheme, parent Digest, ev *event.Event, i int) (d Digest, form Form, found finding) {
	if ev.Eagle && s != SGLang {
		return Digest{}, 0, unhashable
	}
	start := i * int(ev.BlockSize)
	tokens := ev.Tokens[start : start+window(ev)]
	forms := []Form{Plain, Tagged}
	switch {
	case len(v.keys) == 0 || v.form == Plain:
		forms = forms[:1]
	case v.form == Tagged:
		forms = forms[1:]
	}
	for _, form := range forms {
		for _, same := range []bool{false, true} {
			if same && !hasTwins(v.keys) {
				continue
			}
			d, err := v.hasher(hasherKey{s, form, same, ev.Eagle}).Block(parent, tokens, v.keys)
			switch {
			case err != nil:
			case s.Is(ev.Blocks[i].Hash, d):
				return d, form, explained
			default:
				found = unexplained
			}
		}
	}
	return Digest{}, 0, found
}

func (v *Verifier) hasher(k hasherKey) *Hasher {
	h := v.hashers[k]
	if h == nil {
		h = NewHasher(k.scheme, k.form)
		h.SameObject, h.Pairs = k.same, k.pairs
		v.hashers[k] = h
	}
	return h
}

// hasTwins reports whether two multimodal items have one identifier. What counts as a salt may be an identifier, too.
func hasTwins(keys []Key) bool {
	if len(keys) > maxTwins {
		return false
	}
	for i := range keys {
		for j := range keys[:i] {
			if keys[i].Text == keys[j].Text && keys[i].isItem() && keys[j].isItem() {
				return true
			}
		}
	}
	return false
}

// maxTwins bounds how many extra keys are compared with one another.
const maxTwins = 64

func (k *Key) isItem() bool { return k.Kind == KeyItem || k.Kind == KeyIdentifier || k.Kind == KeySalt }

const cantHash = "blocks that can't be hashed: extra keys of another kind, pairs of tokens (EAGLE) outside SGLang, or too long for one frame of pickle"

// compare hashes a run block by block, up to the first that differs.
func (v *Verifier) compare(seq event.Seq, ev *event.Event, parent Digest) {
	s := v.found.Scheme
	for i := range ev.Blocks {
		left := uint64(len(ev.Blocks) - i)
		if err := v.blockKeys(s, ev, i); err != nil {
			v.note(cantHash)
			v.contract.Skipped += left
			return
		}
		h := ev.Blocks[i].Hash
		d, form, found := v.try(s, parent, ev, i)
		switch found {
		case unhashable:
			v.note(cantHash)
			v.contract.Skipped += left
			return
		case unexplained:
			v.differs(seq, ev, left)
			return
		}
		if len(v.keys) > 0 && s != SGLang {
			v.form = form
		}
		v.contract.Verified++
		if n, isInt := h.Int(); isInt {
			v.known.put(n, d)
		}
		parent = d
	}
}

// differs enters a block that has another hash than was computed, and those behind it, which can't be compared.
func (v *Verifier) differs(seq event.Seq, ev *event.Event, left uint64) {
	switch {
	case v.isMixed():
		v.note(mixedGroups)
	case v.form != Plain && hasAdapter(v.keys):
		v.note("adapters are hashed with their path since vLLM 0.31, which events do not tell")
	default:
		v.contract.Differ++
		left--
		if v.first == "" {
			v.first = fmt.Sprintf("%s in batch %d", describe(ev, v.keys), seq)
		}
	}
	v.contract.Skipped += left
}

func hasAdapter(keys []Key) bool {
	for i := range keys {
		if keys[i].Kind == KeyLoRA && keys[i].Path == "" {
			return true
		}
	}
	return false
}

// describe says what kind of run it is, without a word of the prompt.
func describe(ev *event.Event, keys []Key) string {
	what := "text"
	for i := range keys {
		switch keys[i].Kind {
		case KeyItem, KeyIdentifier:
			return "multimodal run"
		case KeyEmbeds:
			return "run of prompt embeddings"
		case KeySalt:
			what = "salted"
		case KeyLoRA:
			what = "adapter's"
		}
	}
	if ev.ExtraKeys == nil && what == "text" {
		return "run (the engine tells no extra keys: an image or a salt would look so)"
	}
	return what + " run"
}

// memory maps the integers by which events name blocks to their digests, and forgets the oldest.
type memory struct {
	most    int
	digests map[uint64]Digest
	order   []uint64 // a ring once it is full
	next    int
}

func (m *memory) get(n uint64) (Digest, bool) {
	d, ok := m.digests[n]
	return d, ok
}

func (m *memory) put(n uint64, d Digest) {
	if m.most <= 0 {
		return
	}
	if _, known := m.digests[n]; known {
		return
	}
	if len(m.order) < m.most {
		m.order = append(m.order, n)
	} else {
		delete(m.digests, m.order[m.next])
		m.order[m.next] = n
		m.next = (m.next + 1) % m.most
	}
	m.digests[n] = d
}
