package recovery_test

import (
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"

	"kvstrata/event"
	"kvstrata/event/resident"
	"kvstrata/subscriber/recovery"
)

// batch makes a batch that stores, or, where lost, a range that never came.
func batch(seq event.Seq, way event.Way) []event.Batch {
	b := event.Batch{First: seq, Last: seq, Way: way, Payload: uint64(seq), Rank: -1}
	switch way {
	case event.Lost:
		b.Reason = "no replay endpoint"
		b.Events = []event.Event{{Kind: event.Cleared, Cause: event.ByResync, Group: event.NoGroup, LoRAID: event.NoLoRAID}}
	case event.Live:
		b.Events = []event.Event{{
			Kind: event.Stored, Tier: event.GPU, Group: event.NoGroup, LoRAID: event.NoLoRAID, BlockSize: blockSize,
			Blocks: []event.Block{{Hash: event.IntHash(uint64(seq) + 1), Copies: 1, Effect: 1, Age: -1}},
		}}
	}
	return []event.Batch{b}
}

// sent is a message of the stream, as Follow takes it.
type sent struct {
	fence event.Fence
	epoch event.Epoch
	seq   event.Seq
	way   event.Way
}

// Of two holders that both sent, the later one's fence rules from its first message on: what the earlier one still got in
// behind it counts for nothing, a life that it began included.
func TestPastFollowsTheLaterHolder(t *testing.T) {
	for _, c := range []struct {
		name   string
		stream []sent
		last   event.Seq
		epoch  event.Epoch
		fence  event.Fence
		state  event.State
		reason string
		blocks int
		lives  []string
		err    error
	}{
		{
			name: "one holder", stream: []sent{{1, 5, 0, event.Live}, {1, 5, 1, event.Live}},
			last: 1, epoch: 5, fence: 1, state: event.StateLive, blocks: 2,
		},
		{
			name: "the earlier one is late", stream: []sent{{1, 5, 0, event.Live}, {2, 5, 1, event.Live}, {1, 5, 2, event.Live}, {2, 5, 2, event.Live}},
			last: 2, epoch: 5, fence: 2, state: event.StateLive, blocks: 3,
		},
		{
			name: "and sends what the later one sent", stream: []sent{{1, 5, 0, event.Live}, {2, 5, 1, event.Live}, {1, 5, 1, event.Live}},
			last: 1, epoch: 5, fence: 2, state: event.StateLive, blocks: 2,
		},
		{
			name: "and begins a life", stream: []sent{{1, 5, 0, event.Live}, {2, 5, 1, event.Live}, {1, 6, 0, event.Live}, {2, 5, 2, event.Live}},
			last: 2, epoch: 5, fence: 2, state: event.StateLive, blocks: 3,
		},
		{
			name: "the later one begins a life", stream: []sent{{1, 5, 0, event.Live}, {2, 6, 3, event.Live}, {1, 5, 1, event.Live}},
			last: 3, epoch: 6, fence: 2, state: event.StatePartial, reason: "first heard at sequence 3", blocks: 1,
			lives: []string{"5: 0 to 0, 0 lost, tail unknown: true"},
		},
		{
			name: "the later one repeats what is known", stream: []sent{{1, 5, 0, event.Live}, {1, 5, 1, event.Live}, {2, 5, 1, event.Live}, {2, 5, 2, event.Live}},
			last: 2, epoch: 5, fence: 2, state: event.StateLive, blocks: 3,
		},
		{
			name: "a range was lost", stream: []sent{{1, 5, 0, event.Live}, {1, 5, 1, event.Lost}, {1, 5, 2, event.Live}},
			last: 2, epoch: 5, fence: 1, state: event.StatePartial, reason: "lost 1 to 1: no replay endpoint", blocks: 1,
		},
		{
			name: "a batch is missing", stream: []sent{{1, 5, 0, event.Live}, {1, 5, 2, event.Live}},
			last: 0, epoch: 5, fence: 1, state: event.StateLive, blocks: 1, err: recovery.ErrHole,
		},
		{
			name: "a publish was dropped", stream: []sent{{1, 5, 0, event.Live}, {1, 5, 1, event.Dropped}},
			last: 0, epoch: 5, fence: 1, state: event.StateLive, blocks: 1, err: recovery.ErrHole,
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			set := resident.New(resident.DefaultConfig())
			p := recovery.NewPast(0, nil)
			var err error
			for _, m := range c.stream {
				if err = errors.Join(err, p.Follow(set, m.fence, m.epoch, batch(m.seq, m.way))); err != nil {
					break
				}
			}
			if !errors.Is(err, c.err) {
				t.Errorf("error %v, want %v", err, c.err)
			}
			if p.Ledger.Last != c.last || p.Epoch != c.epoch || p.Fence != c.fence || p.State != c.state || p.Reason != c.reason {
				t.Errorf("%d of epoch %d, fence %d, %v (%s)", p.Ledger.Last, p.Epoch, p.Fence, p.State, p.Reason)
			}
			if got := len(of(set)); got != c.blocks {
				t.Errorf("%d blocks, want %d", got, c.blocks)
			}
			if diff := cmp.Diff(c.lives, spans(p.Lives)); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// A status counts where the batches have got to, and from who holds the source.
func TestPastHearsWhatFits(t *testing.T) {
	const unproved = "same life by sequence only: no replay proved it"
	for _, c := range []struct {
		name   string
		status event.Status
		reason string
		fence  event.Fence
	}{
		{"here", event.Status{Fence: 2, Epoch: 5, Seq: 0, State: event.StatePartial, Reason: unproved}, unproved, 2},
		{"of a life before", event.Status{Fence: 2, Epoch: 4, Seq: 0, State: event.StatePartial, Reason: unproved}, "", 2},
		{"further on", event.Status{Fence: 2, Epoch: 5, Seq: 1, State: event.StatePartial, Reason: unproved}, "", 2},
		{"of another life", event.Status{Fence: 2, Epoch: 6, Seq: 0, State: event.StatePartial, Reason: unproved}, "", 2},
		{"of an earlier holder", event.Status{Fence: 0, Epoch: 5, Seq: 0, State: event.StatePartial, Reason: unproved}, "", 1},
		{"that says nothing of the data", event.Status{Fence: 1, Epoch: 5, Seq: 0, State: event.StateRecovering, Reason: "replay"}, "", 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			set := resident.New(resident.DefaultConfig())
			p := recovery.NewPast(0, nil)
			if err := p.Follow(set, 1, 5, batch(0, event.Live)); err != nil {
				t.Fatal(err)
			}
			c.status.Ledger.Started = true
			p.Hear(&c.status)
			if p.Reason != c.reason || p.Fence != c.fence {
				t.Errorf("%q, fence %d; want %q, %d", p.Reason, p.Fence, c.reason, c.fence)
			}
		})
	}
}

// A cleared cache does not say whose it is.
func TestPastStaysUnproved(t *testing.T) {
	const unproved = "same life by sequence only: no replay proved it"
	set := resident.New(resident.DefaultConfig())
	p := recovery.NewPast(0, nil)
	follow := func(batches []event.Batch) {
		t.Helper()
		if err := p.Follow(set, 1, 5, batches); err != nil {
			t.Fatal(err)
		}
	}
	follow(batch(3, event.Live))
	p.Hear(&event.Status{
		Fence: 1, Epoch: 5, Seq: 3, State: event.StatePartial, Reason: unproved + "; first heard at sequence 3", Ledger: event.Ledger{Started: true},
	})
	cleared := batch(4, event.Live)
	cleared[0].Events = []event.Event{{Kind: event.Cleared, Cause: event.ByEngine, Group: event.NoGroup, LoRAID: event.NoLoRAID}}
	follow(cleared)
	if p.State != event.StatePartial || p.Reason != unproved {
		t.Errorf("%v (%s)", p.State, p.Reason)
	}
	follow(batch(5, event.Lost))
	if want := unproved + "; lost 5 to 5: no replay endpoint"; p.State != event.StatePartial || p.Reason != want {
		t.Errorf("%v (%s)", p.State, p.Reason)
	}
}

// Of the lives that ended the newest are remembered, without their holes.
func TestPastLivesAreBounded(t *testing.T) {
	set := resident.New(resident.DefaultConfig())
	p := recovery.NewPast(0, nil)
	for epoch := range event.Epoch(12) {
		for _, m := range []sent{{1, epoch + 1, 0, event.Live}, {1, epoch + 1, 1, event.Lost}} {
			if err := p.Follow(set, m.fence, m.epoch, batch(m.seq, m.way)); err != nil {
				t.Fatal(err)
			}
		}
	}
	if len(p.Lives) != event.MaxPastLives || p.Lives[0].Epoch != 4 || p.Lives[7].Epoch != 11 {
		t.Fatalf("%+v", p.Lives)
	}
	if l := p.Lives[7].Ledger; l.Lost != 1 || l.Holes != nil {
		t.Errorf("%+v", l)
	}
}
