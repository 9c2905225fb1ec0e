package prefix

import (
	"iter"
	"time"

	"kvstrata/event"
	"kvstrata/event/enginehash"
)

// byEngineHash is the MatchedBy of what was found by what engines call their blocks.
const byEngineHash = "engine_hash"

// recipeOf returns how a source names its blocks by its status; the zero recipe where that is not known.
func recipeOf(st *event.Status) enginehash.Recipe {
	if st.HashScheme == "" {
		return enginehash.Recipe{}
	}
	// A scheme of a later release is as good as none.
	r, _ := enginehash.ParseRecipe(st.HashScheme, st.HashSeed)
	return r
}

// unnamed returns how many blocks in tiers have no name.
func (s *source) unnamed() uint64 { return s.set.Blocks() - s.named }

// numberTiers gives every tier that holds blocks without a name a number, as change does for the others, so that lookups
// need not.
func (x *Index) numberTiers(s *source) {
	if s.unnamed() == 0 {
		return
	}
	for _, t := range s.set.Tiers() {
		x.tier(t.Tier)
	}
}

// unnamed is a cache group of a source that holds blocks without a name: they are found by their engine hashes.
type unnamed struct {
	index  *Index
	source *source
	group  event.Group
	key    coverKey
	names  *engineNames
	room   []event.Tier
}

// unnamedBlocks are the groups of a model's sources that are to be asked by engine hash.
type unnamedBlocks map[variant][]*unnamed

// engineNames are a prompt's digests under one recipe and one way of cutting, computed as far as they are asked for. Under
// a salt there are several chains: which form the engine's release gives its extra keys is not told, and a hash that is
// there proves its own.
type engineNames struct {
	scheme  enginehash.Scheme
	chains  []*enginehash.Chain
	digests [][]enginehash.Digest // of each chain
}

func newEngineNames(r enginehash.Recipe, req *Request, cut variant) *engineNames {
	n := &engineNames{scheme: r.Scheme}
	forms := []enginehash.Form{enginehash.Plain}
	if req.Salt != "" && r.Scheme != enginehash.SGLang {
		forms = append(forms, enginehash.Tagged)
	}
	for _, form := range forms {
		if c, ok := r.Chain(form, req.Tokens, int(cut.blockSize), req.LoRA, req.Salt); ok && (!cut.eagle || c.Pairs()) {
			n.chains = append(n.chains, c)
		}
	}
	n.digests = make([][]enginehash.Digest, len(n.chains))
	return n
}

// at yields the digests of block i, none behind the last full one.
func (n *engineNames) at(i int) iter.Seq[enginehash.Digest] {
	return func(yield func(enginehash.Digest) bool) {
		for c := range n.chains {
			for len(n.digests[c]) <= i {
				d, ok := n.chains[c].Next()
				if !ok {
					break
				}
				n.digests[c] = append(n.digests[c], d)
			}
			if i < len(n.digests[c]) && !yield(n.digests[c][i]) {
				return
			}
		}
	}
}

// unnamed returns which groups of a model's sources are to be asked by engine hash for a prompt given as tokens.
func (x *Index) unnamed(m *model, r *Request, now time.Time) unnamedBlocks {
	if len(r.Tokens) == 0 {
		return nil
	}
	type cut struct {
		recipe  enginehash.Recipe
		variant variant
	}
	var all unnamedBlocks
	var names map[cut]*engineNames
	for _, s := range x.byID {
		if s.model != m || s.recipe.Scheme == 0 || s.isDead() || s.unnamed() == 0 || r.Cluster != "" && s.name.Cluster != r.Cluster ||
			!x.answers(s, now) {
			continue
		}
		for _, g := range s.prefixGroups() {
			if all == nil {
				all, names = make(unnamedBlocks), make(map[cut]*engineNames)
			}
			v := variant{g.BlockSize, g.Eagle}
			k := cut{s.recipe, v}
			if names[k] == nil {
				names[k] = newEngineNames(s.recipe, r, v)
			}
			all[v] = append(all[v], &unnamed{
				index: x, source: s, group: g.Group, key: coverKey{s.id, g.Group.Index(), v}, names: names[k],
			})
		}
	}
	return all
}

// variants yields every way in which a model's prompts are cut, by blocks with names and by others.
func (all unnamedBlocks) variants(m *model) iter.Seq[variant] {
	return func(yield func(variant) bool) {
		for v := range m.tables {
			if !yield(v) {
				return
			}
		}
		for v := range all {
			if m.tables[v] == nil && !yield(v) {
				return
			}
		}
	}
}

// at returns the warmest tier that block i of the prompt lies in under its engine hash, an integer or a whole digest.
func (u *unnamed) at(i int) (tier uint16, held bool) {
	for d := range u.names.at(i) {
		u.room = u.source.set.AppendTiers(u.room[:0], u.names.scheme.Name(d), u.group)
		if len(u.room) == 0 {
			u.room = u.source.set.AppendTiers(u.room, d.FullName(), u.group)
		}
		for _, name := range u.room {
			t := u.index.numberOf(name)
			if !held || compareTiers(name, u.index.tiers[tier]) < 0 {
				tier, held = t, true
			}
		}
	}
	return tier, held
}

// cover goes on behind c, what the group holds by name from the first block on (nil for nothing), as long as it holds the
// next block by engine hash or by name. A block with a name needs no more: its engine hash leads to the same record.
func (x *Index) cover(u *unnamed, c *cover, t table, prefixes []event.PrefixHash) *cover {
	if c == nil {
		c = &cover{key: u.key}
	}
	for i := len(c.tiers); i < len(prefixes); i++ {
		tier, held := u.at(i)
		isNamed := false
		h := t[prefixes[i]]
		for o := range h.all {
			if o.source != u.key.source || o.group != u.key.group {
				continue
			}
			isNamed = true
			if !held || compareTiers(x.tiers[o.tier], x.tiers[tier]) < 0 {
				tier, held = o.tier, true
			}
		}
		if !held {
			break
		}
		if !isNamed && !c.byHash {
			c.byHash, c.named = true, i
		}
		c.tiers = append(c.tiers, tier)
	}
	return c
}
