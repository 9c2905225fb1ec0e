package interop_test

import (
	"cmp"
	"maps"
	"slices"

	"kvstrata/event"
)

// truth judges a story from what was published alone, slowly and naively: nothing of it is shared with package resident
// but the definitions of event.Prefixes and event.Mix64.
type truth struct {
	held    map[place]holding
	chains  map[block]chain // of every block whose prefix is known
	orphans []orphan
}

// place is where copies of a block are counted; block is what prefixes are known of.
type place struct {
	hash  event.BlockHash
	group uint32
	tier  event.Tier
}

type block struct {
	hash  event.BlockHash
	group uint32
}

type holding struct {
	Copies int
	Since  event.Time
	Prefix event.PrefixHash
}

// chain is all that stands before the end of a block.
type chain struct {
	lora, salt string
	size       int
	tokens     []uint32
	terms      []uint64 // one a block
}

// orphan is a block whose parent is unknown so far.
type orphan struct {
	block, parent block
	own           chain // of the block alone
}

func newTruth() *truth {
	return &truth{held: make(map[place]holding), chains: make(map[block]chain)}
}

// prefix names a chain by event.Prefixes, or, when its extra keys add to it, block by block.
func (c chain) prefix() event.PrefixHash {
	seed := event.Hasher{}.Seed(c.lora, c.salt)
	if !slices.ContainsFunc(c.terms, func(term uint64) bool { return term != 0 }) {
		all := event.Prefixes(nil, c.tokens, c.size, seed, false)
		return all[len(all)-1]
	}
	var p event.PrefixHash
	for i, term := range c.terms {
		p = event.Chain(p, event.LocalHash(c.tokens[i*c.size:(i+1)*c.size], seed+term))
	}
	return p
}

func (c chain) then(next chain) chain {
	next.salt = c.salt // told with the first block only
	next.tokens, next.terms = slices.Concat(c.tokens, next.tokens), slices.Concat(c.terms, next.terms)
	return next
}

// judge returns a batch's events as they must arrive, and the names that must be told behind them: of blocks whose
// parent became known, or that were stored without tokens.
func (u *truth) judge(b told) (events []event.Event, names map[block]event.PrefixHash) {
	names = make(map[block]event.PrefixHash)
	for _, ev := range b.events {
		ev.Blocks = slices.Clone(ev.Blocks)
		switch ev.Kind {
		case event.Stored:
			u.store(b, &ev, names)
		case event.Evicted:
			u.evict(b, &ev)
		case event.Cleared:
			u.clear()
		}
		if ev.Tier == "" && ev.Kind != event.Cleared {
			ev.Tier = event.GPU
		}
		ev.Salt, ev.Terms = "", nil
		events = append(events, ev)
	}
	for u.adopt(names) {
	}
	return events, names
}

func (u *truth) store(b told, ev *event.Event, names map[block]event.PrefixHash) {
	before := chain{lora: ev.LoRA, salt: ev.Salt}
	parent := block{ev.Parent, ev.Group.Index()}
	known := true
	if ev.HasParent {
		before, known = u.chains[parent]
	}
	tier := event.Tier(cmp.Or(string(ev.Tier), string(event.GPU)))
	for i := range ev.Blocks {
		bl := &ev.Blocks[i]
		id := block{bl.Hash, ev.Group.Index()}
		if ev.Locality.Here() {
			bl.Effect = +1
			at := place{bl.Hash, ev.Group.Index(), tier}
			h := u.held[at]
			if h.Copies++; h.Copies == 1 {
				h.Since = b.time
			}
			u.held[at] = h
		}
		if len(ev.Tokens) == 0 {
			if c, ok := u.chains[id]; ok {
				names[id] = c.prefix()
			}
			continue
		}
		n := int(ev.BlockSize)
		own := chain{lora: ev.LoRA, size: n, tokens: ev.Tokens[i*n : (i+1)*n], terms: []uint64{0}}
		if i < len(ev.Terms) {
			own.terms[0] = ev.Terms[i]
		}
		if !known {
			bl.Prefix = event.PrefixHash(event.LocalHash(own.tokens, event.Hasher{}.Seed(own.lora, "")+own.terms[0]))
			u.orphans = append(u.orphans, orphan{id, parent, own})
			parent = id
			continue
		}
		before = before.then(own)
		bl.Prefix = before.prefix()
		u.chains[id] = before
	}
	if len(ev.Tokens) > 0 {
		ev.Unrooted = !known
		ev.Seed = event.Hasher{}.Seed(ev.LoRA, before.salt)
	}
}

func (u *truth) evict(b told, ev *event.Event) {
	tier := event.Tier(cmp.Or(string(ev.Tier), string(event.GPU)))
	for i := range ev.Blocks {
		bl := &ev.Blocks[i]
		if c, ok := u.chains[block{bl.Hash, ev.Group.Index()}]; ok {
			bl.Prefix = c.prefix()
		}
		at := place{bl.Hash, ev.Group.Index(), tier}
		h, ok := u.held[at]
		if !ok || !ev.Locality.Here() {
			continue
		}
		h.Copies--
		bl.Effect, bl.Copies, bl.Age = -1, int32(h.Copies), event.Age(h.Since, b.time)
		if u.held[at] = h; h.Copies == 0 {
			delete(u.held, at)
		}
	}
}

// adopt names the orphans whose parent is known by now, and reports whether there were any.
func (u *truth) adopt(names map[block]event.PrefixHash) bool {
	before := len(u.orphans)
	u.orphans = slices.DeleteFunc(u.orphans, func(o orphan) bool {
		c, ok := u.chains[o.parent]
		if !ok {
			return false
		}
		c = c.then(o.own)
		u.chains[o.block] = c
		names[o.block] = c.prefix()
		return true
	})
	return len(u.orphans) < before
}

// clear empties all tiers; what a hash names stays known.
func (u *truth) clear() { clear(u.held) }

// resident returns what must be held, named.
func (u *truth) resident() map[place]holding {
	all := maps.Clone(u.held)
	for at, h := range all {
		if c, ok := u.chains[block{at.hash, at.group}]; ok {
			h.Prefix = c.prefix()
		}
		all[at] = h
	}
	return all
}

func (u *truth) digest() (sum event.Digest) {
	for at, h := range u.held {
		sum += event.Digest(h.Copies) * event.Mix64(at.hash, event.Group(at.group), at.tier)
	}
	return sum
}
