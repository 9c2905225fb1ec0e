package prefix

import (
	"iter"
	"slices"
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
func (s *source) unnamed() (n uint64) {
	for _, g := range s.groups {
		for _, h := range g.shelves {
			if h.forest == nil {
				n += uint64(h.len())
			}
		}
	}
	return n
}

// unnamed is a cache group of a source that holds blocks without a name: they are found by their engine hashes.
type unnamed struct {
	index  *Index
	source *source
	group  event.Group
	key    coverKey
	names  *engineNames
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
	for _, s := range m.sources {
		if s.recipe.Scheme == 0 || s.isDead() || s.unnamed() == 0 || r.Cluster != "" && s.name.Cluster != r.Cluster ||
			!x.answers(s, now) {
			continue
		}
		for _, g := range s.prefixGroups() {
			own := s.group(g.Group)
			if own == nil {
				continue
			}
			if all == nil {
				all, names = make(unnamedBlocks), make(map[cut]*engineNames)
			}
			v := variant{g.BlockSize, g.Eagle}
			k := cut{s.recipe, v}
			if names[k] == nil {
				names[k] = newEngineNames(s.recipe, r, v)
			}
			all[v] = append(all[v], &unnamed{
				index: x, source: s, group: g.Group, key: coverKey{own.lane, v}, names: names[k],
			})
		}
	}
	return all
}

// variants yields every way in which a model's prompts are cut, by blocks with names and by others, and the blocks with names.
func (all unnamedBlocks) variants(m *model) iter.Seq2[variant, *forest] {
	return func(yield func(variant, *forest) bool) {
		forests := *m.forests.Load()
		for _, f := range forests {
			if (f.len() > 0 || all[f.cut] != nil) && !yield(f.cut, f) {
				return
			}
		}
		for v := range all {
			if !slices.ContainsFunc(forests, func(f *forest) bool { return f.cut == v }) && !yield(v, nil) {
				return
			}
		}
	}
}

// at returns the warmest tier that block i of the prompt lies in under its engine hash, an integer or a whole digest.
func (u *unnamed) at(i int) (tier uint16, held bool) {
	g := u.source.group(u.group)
	for d := range u.names.at(i) {
		for _, hash := range []event.BlockHash{u.names.scheme.Name(d), d.FullName()} {
			found := false
			for _, h := range g.shelves {
				if h.get(hash) == 0 {
					continue
				}
				found = true
				if !held || compareTiers(u.index.tiers[h.tier], u.index.tiers[tier]) < 0 {
					tier, held = h.tier, true
				}
			}
			if found {
				break
			}
		}
	}
	return tier, held
}

// coverUnnamed goes on behind c, what the group holds by name from the first block on (nil for nothing), as long as it holds the
// next block by engine hash or by name. A block with a name needs no more: its engine hash leads to the same record.
func (x *Index) coverUnnamed(r *Request, u *unnamed, c *cover, f *forest, prefixes []event.PrefixHash) *cover {
	if c == nil {
		c = &cover{key: u.key}
	}
	way := x.trail(r, f, prefixes)
	for i := c.len(); i < len(prefixes); i++ {
		tier, held := u.at(i)
		isNamed := false
		for _, h := range way.holders(i) {
			if h.lane != u.key.lane {
				continue
			}
			isNamed = true
			if !held || compareTiers(x.tiers[h.tier], x.tiers[tier]) < 0 {
				tier, held = h.tier, true
			}
		}
		if !held {
			break
		}
		if !isNamed && !c.byHash {
			c.byHash, c.named = true, i
		}
		c.add(i+1, tier)
	}
	return c
}
