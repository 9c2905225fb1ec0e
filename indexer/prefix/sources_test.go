package prefix_test

import (
	"testing"
	"time"

	"kvstrata/event"
	"kvstrata/indexer/prefix"

	"github.com/google/go-cmp/cmp"
)

func ptr(f float64) *float64 { return &f }

func TestSources(t *testing.T) {
	x, now := newIndex()
	pub := newPublisher(engine("e1"), false)
	pub.next = 7
	p := prompt(1, 3)
	pub.tell(t, x, p.stored(event.GPU, 0, 3), p.stored(event.GPU, 0, 1))
	apply(t, x, pub.lose(t, 2))
	now.now = began.Add(time.Second)
	pub.tell(t, x, p.stored(event.GPU, 0, 2), p.offloaded(event.CPU, 0, 1))
	pub.message(t, nil, nil, nil) // told of, not applied
	st := pub.status(event.StatePartial, "lost 8 to 9: no replay endpoint")
	st.Dialect, st.Endpoint, st.Counters = "vllm", "tcp://e1:5557", []event.Counter{{Name: "parent_unknown", Count: 3, Example: "block 00"}}
	x.Tell(st)
	x.Compared(pub.source, false)
	x.Compared(pub.source, true)
	now.now = began.Add(11 * time.Second)

	other := newPublisher(engine("e0"), false)
	x.Tell(other.status(event.StateGone, "withdrawn"))
	want := []prefix.SourceInfo{
		{
			Source: other.source, State: event.StateGone, Reason: "withdrawn", Resident: []prefix.TierInfo{}, Groups: []event.GroupInfo{},
			Epoch: 1, Fence: 1, Balanced: true, Digest: prefix.DigestInfo{Last: "not compared yet"}, Copies: "counted",
		},
		{
			Source: pub.source, State: event.StatePartial, Reason: "lost 8 to 9: no replay endpoint", Epoch: 1, Fence: 1, Started: true,
			LastSeq: 10, Behind: 3, Lag: ptr(1 - 0.011), Idle: ptr(10), Told: 10,
			Resident: []prefix.TierInfo{{Tier: event.GPU, Blocks: 2, Copies: 2}, {Tier: event.CPU, Blocks: 1, Copies: 1}},
			Groups:   []event.GroupInfo{{Group: event.NoGroup, BlockSize: 16}},
			Totals:   prefix.Totals{Stored: 7, Cleared: 1}, Heard: began.Add(11 * time.Millisecond).UnixMilli(),
			Ledger: event.Ledger{
				Started: true, First: 7, Last: 13, Live: 5, Lost: 2, Holes: []event.Hole{{First: 8, Last: 9, Reason: "no replay endpoint"}},
			},
			Balanced: true, Digest: prefix.DigestInfo{Agreed: 1, Differed: 1, Last: "agreed"}, Dialect: "vllm",
			Endpoint: "tcp://e1:5557", Copies: "counted", Oddities: st.Counters,
		},
	}
	if diff := cmp.Diff(want, x.Sources()); diff != "" {
		t.Error(diff)
	}
}

func TestBehind(t *testing.T) {
	p := prompt(1, 1)
	for _, c := range []struct {
		name string
		feed func(*publisher, *prefix.Index)
		want uint64
	}{
		{"nothing told", func(pub *publisher, x *prefix.Index) { pub.tell(t, x, p.stored(event.GPU, 0, 1)) }, 0},
		{"all applied", func(pub *publisher, x *prefix.Index) {
			pub.tell(t, x, p.stored(event.GPU, 0, 1))
			x.Tell(pub.status(event.StateLive, ""))
		}, 0},
		{"more applied than told", func(pub *publisher, x *prefix.Index) {
			pub.tell(t, x)
			x.Tell(pub.status(event.StateLive, ""))
			pub.tell(t, x)
		}, 0},
		{"nothing applied, nothing published", func(pub *publisher, x *prefix.Index) { x.Tell(pub.status(event.StateLive, "")) }, 0},
		{"nothing applied", func(pub *publisher, x *prefix.Index) {
			pub.message(t, nil, nil)
			x.Tell(pub.status(event.StateLive, ""))
		}, 2},
		{"nothing of a new life applied", func(pub *publisher, x *prefix.Index) {
			pub.tell(t, x)
			pub.restart(3)
			pub.message(t, nil, nil, nil)
			x.Tell(pub.status(event.StateLive, ""))
		}, 3},
		{"told of an older life", func(pub *publisher, x *prefix.Index) {
			pub.message(t, nil, nil)
			st := pub.status(event.StateLive, "")
			pub.restart(0)
			pub.tell(t, x)
			x.Tell(st)
		}, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			x, _ := newIndex()
			c.feed(newPublisher(engine("e1"), false), x)
			if got := x.Sources()[0].Behind; got != c.want {
				t.Errorf("behind %d, want %d", got, c.want)
			}
		})
	}
}
