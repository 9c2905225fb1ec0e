package history

import (
	"fmt"
	"strings"
	"time"
)

// Verdict is why a block was not there.
type Verdict string

// The verdicts.
const (
	IsComplete    Verdict = "complete"     // every block was there
	NeverStored   Verdict = "never_stored" // in what history keeps of the source
	WasEvicted    Verdict = "evicted"
	WasReset      Verdict = "reset"        // with everything else there
	InOtherTier   Verdict = "other_tier"   // than the one asked for
	OnOtherEngine Verdict = "other_engine" // and never stored on this one
	UnderOther    Verdict = "other_variant"
)

// WalkEnding is the first block of a prompt that a source did not hold.
type WalkEnding struct {
	ID        string  `json:"id"`
	Instance  string  `json:"instance"`
	BlockSize uint32  `json:"block_size,omitempty"` // tokens a block; 0 = unknown
	Blocks    int     `json:"matched_blocks"`
	Of        int     `json:"asked_blocks"`
	Verdict   Verdict `json:"verdict"`
	Inferred  bool    `json:"inferred"` // history may lack a part of the source's story

	Prefix    string   `json:"prefix,omitempty"` // of the block
	Time      int64    `json:"time,omitempty"`   // evicted or reset when
	Tiers     []string `json:"tiers,omitempty"`  // evicted from, or held in
	Age       *float64 `json:"age,omitempty"`
	Reason    string   `json:"reason,omitempty"`
	Variant   *Variant `json:"variant,omitempty"` // under which the same tokens were there
	Elsewhere []Place  `json:"elsewhere"`         // who else held it

	Next []StoryLine `json:"next"` // what happened to it there afterwards
	Text string      `json:"text"`

	stand   *stand
	evicted *StoryLine
}

// sentence tells an ending to people.
func (e *WalkEnding) sentence() string {
	clock := func(ms int64) string { return time.UnixMilli(ms).UTC().Format("2006-01-02 15:04:05.000 UTC") }
	held := fmt.Sprintf("%d of %s", e.Blocks, plural(e.Of, "block"))
	if e.BlockSize > 0 {
		held += fmt.Sprintf(" (%d tokens)", e.Blocks*int(e.BlockSize))
	}
	text := fmt.Sprintf("%s held %s", e.Instance, held)
	if e.Verdict == IsComplete {
		return text + "."
	}
	text += fmt.Sprintf("; block %d (%s) ", e.Blocks+1, e.Prefix)
	switch e.Verdict {
	case WasEvicted:
		text += fmt.Sprintf("was evicted from %s at %s", e.Tiers[0], clock(e.Time))
		if e.Age != nil {
			text += fmt.Sprintf(" after %s", time.Duration(*e.Age*float64(time.Second)).Round(time.Millisecond))
		}
		text += " (" + e.Reason + ")"
	case WasReset:
		text += fmt.Sprintf("went with a reset at %s: %s", clock(e.Time), e.Reason)
	case InOtherTier:
		text += "was only in " + strings.Join(e.Tiers, ", ")
	case UnderOther:
		text += fmt.Sprintf("was there only under adapter %q and salt %q", e.Variant.LoRA, e.Variant.Salt)
	case OnOtherEngine:
		text += "was never stored there"
	default:
		text += "was never stored there, and nobody held it"
	}
	if len(e.Elsewhere) > 0 {
		var names []string
		for i, p := range e.Elsewhere {
			if i == 3 {
				names = append(names, fmt.Sprintf("%d more", len(e.Elsewhere)-3))
				break
			}
			names = append(names, p.Instance+" ("+p.Tier+")")
		}
		text += "; held by " + strings.Join(names, ", ")
	}
	if len(e.Next) > 0 {
		next := e.Next[0]
		switch next.Op {
		case "STORED":
			text += fmt.Sprintf("; stored in %s at %s", next.Tier, clock(next.Time))
		case "LOADED":
			text += fmt.Sprintf("; loaded into %s at %s", next.Tier, clock(next.Time))
		}
	}
	if e.Inferred {
		text += "; inferred: history knows the engine " + e.stand.known
	}
	return text + "."
}
