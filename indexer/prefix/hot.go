package prefix

import (
	"cmp"
	"math"
	"slices"
	"time"

	"kvstrata/event"
)

// maxHot bounds the prefixes whose heat is kept; beyond it the coldest half is forgotten.
const maxHot = 8192

// halfLife is how fast heat fades.
const halfLife = 5 * time.Minute

// hotKey is a prefix of a model's prompts.
type hotKey struct {
	model  *model
	prefix event.PrefixHash
	cut    variant
}

// heat is how often stored runs continued a prefix. Engines report no hits: a run that continues a prefix is what a
// partly cached request leaves behind, and one that was cached whole leaves nothing.
type heat struct {
	score float64 // at the time of last
	first time.Time
	last  time.Time

	blocks uint32 // length of the prefix; 0 = unknown
}

func (h *heat) at(now time.Time) float64 {
	return h.score * math.Exp2(-now.Sub(h.last).Seconds()/halfLife.Seconds())
}

// parent is a prefix that a run of a batch continues, and its length in blocks; 0 = unknown.
type parent struct {
	hotKey
	blocks uint32
	forest *forest
	id     uint32 // in it, when the run was applied
}

// admitted is how many prefixes that are not watched yet it takes for one to be, once half of all places are taken: each decoded block
// continues a prefix that nothing else does.
const admitted = 32

// heatUp counts the prefixes that the runs of the last batch continue. The caller holds the write lock.
func (x *Index) heatUp(now time.Time) {
	for i := range x.parents {
		p := &x.parents[i]
		var h *heat
		if p.forest.kept.has(p.prefix) { // as all that are watched
			h = x.hot[p.hotKey]
		}
		if h == nil {
			if len(x.hot) >= maxHot/2 {
				if x.passed++; x.passed%admitted != 0 {
					continue
				}
			}
			if len(x.hot) >= maxHot {
				x.coolDown(now)
			}
			h = &heat{first: now, last: now}
			x.hot[p.hotKey] = h
			p.forest.keep(p.prefix, p.id)
		}
		h.score, h.last = h.at(now)+1, now
		if p.blocks != 0 {
			h.blocks = p.blocks
		}
	}
}

// coolDown forgets the coldest half.
func (x *Index) coolDown(now time.Time) {
	scores := make([]float64, 0, len(x.hot))
	for _, h := range x.hot {
		scores = append(scores, h.at(now))
	}
	slices.Sort(scores)
	median := scores[len(scores)/2]
	for _, m := range *x.models.Load() {
		for _, f := range *m.forests.Load() {
			f.kept = nil
		}
	}
	for k, h := range x.hot {
		if h.at(now) <= median {
			delete(x.hot, k)
		} else {
			k.model.forest(k.cut).kept.add(k.prefix)
		}
	}
}

// HotPrefix is a prefix that stored runs continued, as GET /v1/prefixes shows it. Times are Unix milliseconds.
type HotPrefix struct {
	Prefix         event.PrefixHash `json:"prefix"`
	Model          string           `json:"model"`
	Blocks         uint32           `json:"blocks"` // length; 0 = unknown, since an ancestor is gone
	Tokens         uint32           `json:"tokens"`
	BlockSize      uint32           `json:"block_size"`
	Continued      float64          `json:"continued"` // runs, fading with a half-life of five minutes
	Copies         uint32           `json:"copies"`
	Owners         []HotOwner       `json:"owners"`
	ResidentTokens uint64           `json:"resident_tokens"`
	First          int64            `json:"first"` // since when it is watched: from the first run that continued it
	Last           int64            `json:"last"`
}

// HotOwner is a source that holds the last block of a prefix in a tier.
type HotOwner struct {
	ID       string     `json:"id"`
	Instance string     `json:"instance"`
	Tier     event.Tier `json:"tier"`
	Copies   uint32     `json:"copies"` // of the block, under all of the engine's names for it
}

// Hot returns the hottest prefixes, at most n.
func (x *Index) Hot(n int) []HotPrefix {
	x.mu.RLock()
	defer x.mu.RUnlock()
	now := x.cfg.Clock()
	type scored struct {
		key   hotKey
		heat  *heat
		score float64
	}
	all := make([]scored, 0, len(x.hot))
	for k, h := range x.hot {
		all = append(all, scored{k, h, h.at(now)})
	}
	slices.SortFunc(all, func(a, b scored) int {
		return cmp.Or(cmp.Compare(b.score, a.score), cmp.Compare(a.key.prefix, b.key.prefix))
	})
	if len(all) > n {
		all = all[:n]
	}
	rows := make([]HotPrefix, 0, len(all))
	for _, s := range all {
		rows = append(rows, x.hotPrefix(s.key, s.heat, s.score))
	}
	return rows
}

func (x *Index) hotPrefix(k hotKey, h *heat, score float64) HotPrefix {
	row := HotPrefix{
		Prefix: k.prefix, Model: k.model.name, BlockSize: k.cut.blockSize, Continued: math.Round(score*100) / 100,
		Owners: []HotOwner{}, First: h.first.UnixMilli(), Last: h.last.UnixMilli(),
	}
	row.Blocks = h.blocks
	row.Tokens = row.Blocks * k.cut.blockSize
	f := k.model.forest(k.cut)
	id := f.table.find(k.prefix, f)
	for _, o := range x.holders(f, k.prefix) {
		copies := 1 + o.twins[id]
		row.Owners = append(row.Owners, HotOwner{
			ID: o.source.name.Tokens(), Instance: o.source.name.Instance, Tier: x.tiers[o.tier], Copies: copies,
		})
		row.Copies += copies
	}
	slices.SortFunc(row.Owners, func(a, b HotOwner) int {
		return cmp.Or(cmp.Compare(a.Instance, b.Instance), cmp.Compare(a.ID, b.ID), cmp.Compare(a.Tier, b.Tier))
	})
	row.ResidentTokens = uint64(row.Tokens) * uint64(len(row.Owners))
	return row
}
