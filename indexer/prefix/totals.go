package prefix

import (
	"sync/atomic"

	"kvstrata/event"
)

// Totals are what a source told since this index began to read it, in blocks: stored and evicted count what changed
// copies, whatever was told again.
type Totals struct {
	Stored  uint64 `json:"stored"`
	Evicted uint64 `json:"evicted"`
	Loaded  uint64 `json:"loaded"`
	Cleared uint64 `json:"cleared"` // resets, not blocks
}

func (t *Totals) add(b *event.Batch) {
	for i := range b.Events {
		ev := &b.Events[i]
		switch ev.Kind {
		case event.Loaded:
			t.Loaded += uint64(len(ev.Blocks))
		case event.Cleared:
			t.Cleared++
		case event.Stored, event.Evicted:
			for j := range ev.Blocks {
				switch effect := ev.Blocks[j].Effect; {
				case effect > 0:
					t.Stored++
				case effect < 0:
					t.Evicted++
				}
			}
		}
	}
}

// Asked is what lookups asked for and found with the best source, its stores included, since the index began. It is the one hit rate that
// an index can tell: of what routers asked, not of what engines served.
type Asked struct {
	Lookups       uint64 `json:"lookups"`
	AskedBlocks   uint64 `json:"asked_blocks"` // full blocks
	MatchedBlocks uint64 `json:"matched_blocks"`
	AskedTokens   uint64 `json:"asked_tokens"`
	MatchedTokens uint64 `json:"matched_tokens"`
}

// asked counts lookups, which run side by side.
type asked struct{ lookups, askedBlocks, matchedBlocks, askedTokens, matchedTokens atomic.Uint64 }

// Asked returns what was asked so far.
func (x *Index) Asked() Asked {
	return Asked{
		Lookups: x.asked.lookups.Load(), AskedBlocks: x.asked.askedBlocks.Load(), MatchedBlocks: x.asked.matchedBlocks.Load(),
		AskedTokens: x.asked.askedTokens.Load(), MatchedTokens: x.asked.matchedTokens.Load(),
	}
}

// count enters an answer, whose best match comes first. size is how many tokens a block has where no match tells: the
// model's smallest.
func (c *asked) count(r *Request, a *Answer, size int) {
	blocks, tokens := len(r.Hashes), len(r.Tokens)
	c.lookups.Add(1)
	for i := range a.Matches {
		best := &a.Matches[i]
		if best.BlockSize == 0 {
			continue // it holds no prefixes at all
		}
		size = int(best.BlockSize)
		found, ofTokens := best.reached()
		c.matchedBlocks.Add(uint64(found))
		c.matchedTokens.Add(uint64(ofTokens))
		break
	}
	if size > 0 && tokens > 0 {
		blocks = tokens / size
	} else {
		tokens = blocks * size
	}
	c.askedBlocks.Add(uint64(blocks))
	c.askedTokens.Add(uint64(tokens))
}
