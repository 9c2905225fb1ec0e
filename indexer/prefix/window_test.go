package prefix_test

import (
	"testing"

	"kvstrata/event"
	"kvstrata/indexer/prefix"
)

// TestLookupWindow tells of a model with full attention and a sliding window as vLLM does: the window's blocks come without tokens of their
// own, under the hashes of the full group.
func TestLookupWindow(t *testing.T) {
	p := chain{tokens: text(1, 320), size: 32, group: 1, spec: event.SpecFull} // 10 blocks
	full := p
	window := p.with(func(c *chain) { c.group, c.spec, c.behind = 0, event.SpecSlidingWindow, 64 })
	mamba := p.with(func(c *chain) { c.group, c.spec = 0, event.SpecMamba })
	fine := window.with(func(c *chain) { c.size = 16 })
	bare := func(c chain, from, to int) event.Event {
		ev := c.stored(event.GPU, from, to)
		ev.Tokens, ev.HasParent, ev.Parent = nil, false, event.BlockHash{}
		return ev
	}
	late := bare(window, 8, 10)
	late.Spec, late.Window, late.BlockSize = event.SpecUnknown, 0, 0
	type events = []event.Event
	for _, c := range []struct {
		name         string
		events       []events
		want, device int
	}{
		{"the window's group told nothing", []events{{full.stored(event.GPU, 0, 10)}}, 10, 10},
		{"the last two blocks", []events{{full.stored(event.GPU, 0, 10)}, {bare(window, 8, 10)}}, 10, 10},
		{"told before the full group", []events{{bare(window, 8, 10)}, {full.stored(event.GPU, 0, 10)}}, 10, 10},
		{"told before it was described", []events{
			{late}, {full.stored(event.GPU, 0, 10)}, {bare(window, 0, 1)}, {window.evicted(event.GPU, 0, 1)},
		}, 10, 10},
		{"only the last", []events{{full.stored(event.GPU, 0, 10)}, {bare(window, 9, 10)}}, 0, 0},
		{"the first alone is a whole window of one block", []events{{full.stored(event.GPU, 0, 10)}, {bare(window, 0, 1)}}, 1, 1},
		{"the window moved on, and its old blocks stayed", []events{
			{full.stored(event.GPU, 0, 10)}, {bare(window, 2, 4), bare(window, 8, 10)}, {window.evicted(event.GPU, 9, 10)},
		}, 4, 4},
		{"both ends evicted", []events{
			{full.stored(event.GPU, 0, 10)}, {bare(window, 8, 10)}, {window.evicted(event.GPU, 8, 9)}, {window.evicted(event.GPU, 9, 10)},
		}, 0, 0},
		{"the full group is shorter", []events{
			{full.stored(event.GPU, 0, 10)}, {bare(window, 5, 10)}, {full.evicted(event.GPU, 8, 10)},
		}, 8, 8},
		{"a name outlives the block that it was taken from", []events{
			{full.stored(event.GPU, 0, 10)}, {bare(window, 8, 10)}, {full.evicted(event.GPU, 8, 10)}, {full.stored(event.GPU, 8, 10)},
		}, 10, 10},
		{"the full group lies in two tiers", []events{
			{full.stored(event.GPU, 0, 10), full.offloaded(event.CPU, 0, 10), full.evicted(event.GPU, 3, 10)}, {bare(window, 5, 7)},
		}, 7, 3},
		{"the device's prefix ends at the cut", []events{
			{full.stored(event.GPU, 0, 10), full.offloaded(event.CPU, 9, 10), full.evicted(event.GPU, 9, 10)}, {bare(window, 5, 7)},
		}, 7, 7},
		{"blocks of another size", []events{{full.stored(event.GPU, 0, 10)}, {fine.stored(event.GPU, 0, 20)}, {fine.evicted(event.GPU, 11, 20)}}, 5, 5},
		{"a state", []events{{full.stored(event.GPU, 0, 10)}, {bare(mamba, 6, 7)}}, 7, 7},
	} {
		t.Run(c.name, func(t *testing.T) {
			x, _ := newIndex()
			pub := newPublisher(engine("e1"), false)
			for _, evs := range c.events {
				pub.tell(t, x, evs...)
			}
			x.Tell(pub.status(event.StateLive, ""))
			check := func() {
				t.Helper()
				for _, r := range []*prefix.Request{{Model: "m", Tokens: p.tokens}, {Model: "m", Hashes: p.hashes(), BlockSize: 32}} {
					if r.Tokens == nil && c.name == "blocks of another size" {
						continue // they have other hashes
					}
					m := lookup(t, x, r).Matches[0]
					tiers := 0
					for _, in := range m.Tiers {
						tiers += in.Blocks
					}
					if m.Blocks != c.want || m.Tokens != 32*c.want || m.DeviceBlocks != c.device || tiers != c.want {
						t.Errorf("%d blocks, %d tokens, %d on the device, %v; want %d and %d", m.Blocks, m.Tokens, m.DeviceBlocks, m.Tiers, c.want, c.device)
					}
				}
			}
			check()
			restore(t, x, pub.checkpoint(t))
			x.Tell(pub.status(event.StateLive, ""))
			check()
		})
	}
}
