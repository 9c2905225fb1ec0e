package prefix_test

import (
	"strings"
	"testing"
	"time"

	"kvstrata/event"
	"kvstrata/indexer/prefix"

	"github.com/google/go-cmp/cmp"
)

// Why a match ends: each cause, and the sentence that tells it.
func TestExplain(t *testing.T) {
	p := prompt(1, 4)
	with := func(edit func(*chain)) chain { return p.with(edit) }
	salted, adapted := with(func(c *chain) { c.salt = "s" }), with(func(c *chain) { c.lora = "l" })
	full, other := with(func(c *chain) { c.group, c.spec = 0, event.SpecFull }), with(func(c *chain) { c.group, c.spec = 1, event.SpecMLA })
	evictedAt := began.Add(2 * time.Millisecond).UnixMilli() // the second batch's reception
	since := began.UnixMilli()
	for _, c := range []struct {
		name    string
		told    [][]event.Event
		request prefix.ExplainRequest
		blocks  int
		causes  []prefix.Cause
		text    string
	}{
		{"all of it", [][]event.Event{{p.stored(event.GPU, 0, 4)}}, prefix.ExplainRequest{}, 4, []prefix.Cause{}, "All 4 blocks are matched."},
		{"nothing told", [][]event.Event{{}}, prefix.ExplainRequest{}, 0, []prefix.Cause{{Kind: prefix.NeverStored, Time: since}}, "Nothing is matched: not stored in the 1s that are known here."},
		{
			"never stored",
			[][]event.Event{{p.stored(event.GPU, 0, 2)}},
			prefix.ExplainRequest{},
			2,
			[]prefix.Cause{{Kind: prefix.NeverStored, Time: since}},
			"2 of 4 blocks are matched; the next one: not stored in the 1s that are known here.",
		},
		{
			"evicted",
			[][]event.Event{{p.stored(event.GPU, 0, 4)}, {p.evicted(event.GPU, 2, 4)}},
			prefix.ExplainRequest{},
			2,
			[]prefix.Cause{{Kind: prefix.WasEvicted, Tiers: []event.Tier{event.GPU}, Time: evictedAt}},
			"evicted from GPU 998ms ago",
		},
		{
			"evicted in the middle",
			[][]event.Event{{p.stored(event.GPU, 0, 4)}, {p.evicted(event.GPU, 1, 2)}},
			prefix.ExplainRequest{},
			1,
			[]prefix.Cause{{Kind: prefix.WasEvicted, Tiers: []event.Tier{event.GPU}, Time: evictedAt}, {Kind: prefix.Gap, Blocks: 2}},
			"2 later blocks are there",
		},
		{
			"cleared: the ring holds evictions, not clears",
			[][]event.Event{{p.stored(event.GPU, 0, 4)}, {cleared(event.ByEngine)}},
			prefix.ExplainRequest{},
			0,
			[]prefix.Cause{{Kind: prefix.NeverStored, Time: since}},
			"not stored",
		},
		{
			"a gap",
			[][]event.Event{{p.stored(event.GPU, 0, 1), with(func(*chain) {}).stored(event.GPU, 1, 4)}, {}, {p.evicted(event.GPU, 0, 1)}},
			prefix.ExplainRequest{},
			0,
			[]prefix.Cause{{Kind: prefix.WasEvicted, Tiers: []event.Tier{event.GPU}, Time: evictedAt + 1}, {Kind: prefix.Gap, Blocks: 3}},
			"3 later blocks",
		},
		{
			"on the device only",
			[][]event.Event{{p.stored(event.GPU, 0, 4), p.offloaded(event.CPU, 0, 4)}, {p.evicted(event.GPU, 3, 4)}},
			prefix.ExplainRequest{Device: true},
			3,
			[]prefix.Cause{{Kind: prefix.WasEvicted, Tiers: []event.Tier{event.GPU}, Time: evictedAt}, {Kind: prefix.OtherTier, Tiers: []event.Tier{event.CPU}}},
			"held in CPU only",
		},
		{
			"in a tier",
			[][]event.Event{{p.stored(event.GPU, 0, 4), p.offloaded(event.CPU, 0, 1)}},
			prefix.ExplainRequest{Tier: event.CPU},
			1,
			[]prefix.Cause{{Kind: prefix.OtherTier, Tiers: []event.Tier{event.GPU}}},
			"held in GPU only",
		},
		{
			"another salt",
			[][]event.Event{{salted.stored(event.GPU, 0, 3)}},
			prefix.ExplainRequest{},
			0,
			[]prefix.Cause{{Kind: prefix.OtherSalt, Blocks: 3}, {Kind: prefix.NeverStored, Time: since}},
			"the first 3 blocks of these tokens are there under another cache salt",
		},
		{
			"another adapter",
			[][]event.Event{{adapted.stored(event.GPU, 0, 3), p.stored(event.GPU, 0, 1)}},
			prefix.ExplainRequest{},
			1,
			[]prefix.Cause{{Kind: prefix.OtherLoRA, Blocks: 3, LoRA: "l"}, {Kind: prefix.NeverStored, Time: since}},
			`under adapter "l"`,
		},
		{
			"without an adapter",
			[][]event.Event{{p.stored(event.GPU, 0, 3)}},
			prefix.ExplainRequest{Request: prefix.Request{LoRA: "l"}},
			0,
			[]prefix.Cause{{Kind: prefix.OtherLoRA, Blocks: 3}, {Kind: prefix.NeverStored, Time: since}},
			"without an adapter",
		},
		{
			"another group",
			[][]event.Event{{full.stored(event.GPU, 0, 4), other.stored(event.GPU, 0, 2)}},
			prefix.ExplainRequest{},
			2,
			[]prefix.Cause{{Kind: prefix.OtherGroup, Group: 1, Groups: []uint32{0}}},
			"held in cache group 0, but not in group 1",
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			x, now := newIndex()
			pub := newPublisher(engine("e"), false)
			for _, events := range c.told {
				pub.tell(t, x, events...)
			}
			x.Tell(pub.status(event.StateLive, ""))
			now.now = began.Add(time.Second)
			r := c.request
			r.Model, r.Tokens = "m", p.tokens
			got, err := x.Explain(&r)
			if err != nil {
				t.Fatal(err)
			}
			e := got.Endings[0]
			if e.Blocks != c.blocks || !strings.Contains(e.Text, c.text) {
				t.Errorf("%d blocks: %s", e.Blocks, e.Text)
			}
			if diff := cmp.Diff(c.causes, e.Causes); diff != "" {
				t.Errorf("%s\n%s", e.Text, diff)
			}
			if r.Tier == "" && !r.Device {
				if want := lookup(t, x, &r.Request).Matches[0].Blocks; e.Blocks != want {
					t.Errorf("the match has %d blocks, its explanation %d", want, e.Blocks)
				}
			}
		})
	}
}

func TestExplainWhatCannotBeKnown(t *testing.T) {
	x, _ := newIndex()
	pub := newPublisher(engine("e"), false)
	p := prompt(1, 4)
	pub.tell(t, x, p.stored(event.GPU, 0, 2))
	x.Tell(pub.status(event.StateStale, "two publishers"))
	got, err := x.Explain(&prefix.ExplainRequest{Request: prefix.Request{Model: "m", Hashes: p.hashes()}})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]prefix.CauseKind{prefix.OtherSalt, prefix.OtherLoRA}, got.Unknown); diff != "" {
		t.Error(diff)
	}
	e := got.Endings[0]
	if len(e.Causes) != 1 || e.Causes[0].Kind != prefix.IsLeftOut || !strings.Contains(e.Text, "stale, two publishers") {
		t.Errorf("%+v", e)
	}
	if asked := x.Asked(); asked.Lookups != 0 {
		t.Errorf("an explanation counts as a lookup: %+v", asked)
	}
}
