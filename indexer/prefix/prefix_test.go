package prefix_test

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"testing"

	"kvstrata/event"
	"kvstrata/event/resident"
	"kvstrata/indexer/prefix"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
)

// blocks asks for a prompt and returns how much of it the one source of the model holds; −1 when it is left out.
func blocks(t tb, x *prefix.Index, p chain) int {
	t.Helper()
	a := lookup(t, x, &prefix.Request{Model: "m", Tokens: p.tokens, LoRA: p.lora, Salt: p.salt})
	if len(a.Matches) == 0 {
		return -1
	}
	return a.Matches[0].Blocks
}

// stateOf returns the state of the one source, and why.
func stateOf(x *prefix.Index) (event.State, string) {
	s := x.Sources()[0]
	return s.State, s.Reason
}

func TestARestartedEngineGetsNoCredit(t *testing.T) {
	p := prompt(1, 4)
	for _, c := range []struct {
		name string
		then func(*publisher, *prefix.Index)
		want int
	}{
		{"told by the first batch", func(pub *publisher, x *prefix.Index) {
			pub.tell(t, x, p.stored(event.GPU, 0, 1))
		}, 1},
		{"told by a batch without events", func(pub *publisher, x *prefix.Index) { pub.tell(t, x) }, 0},
		{"told by a status, before any batch", func(pub *publisher, x *prefix.Index) {
			x.Tell(pub.status(event.StateLive, ""))
		}, 0},
		{"told by a status and by a batch", func(pub *publisher, x *prefix.Index) {
			x.Tell(pub.status(event.StateLive, ""))
			pub.tell(t, x, p.stored(event.GPU, 0, 2))
		}, 2},
		{"told by a checkpoint", func(pub *publisher, x *prefix.Index) { restore(t, x, pub.checkpoint(t)) }, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			x, _ := newIndex()
			pub := newPublisher(engine("e1"), false)
			pub.tell(t, x, p.stored(event.GPU, 0, 4))
			pub.restart(0)
			c.then(pub, x)
			if got := blocks(t, x, p); got != c.want {
				t.Errorf("%d blocks, want %d", got, c.want)
			}
			if got := x.Sources()[0].Epoch; got != 2 {
				t.Errorf("epoch %d, want 2", got)
			}
		})
	}
}

// A status overtakes batches that its consumer holds back; the old life's end still counts until the new one begins.
func TestAStatusOfANewLifeOvertakesTheOldOnesBatches(t *testing.T) {
	x, _ := newIndex()
	pub := newPublisher(engine("e1"), false)
	p := prompt(1, 4)
	pub.tell(t, x, p.stored(event.GPU, 0, 4))
	late := pub.message(t, []event.Event{p.evicted(event.GPU, 0, 1)})
	pub.restart(0)
	x.Tell(pub.status(event.StateLive, ""))
	apply(t, x, late)
	if got := blocks(t, x, p); got != 0 {
		t.Errorf("%d blocks of a life that ended", got)
	}
	pub.tell(t, x, p.stored(event.GPU, 0, 3))
	if got := blocks(t, x, p); got != 3 {
		t.Errorf("%d blocks, want 3", got)
	}
}

func TestRestoreReplaces(t *testing.T) {
	x, _ := newIndex()
	pub := newPublisher(engine("e1"), false)
	old, fresh := prompt(1, 4), prompt(1000, 4)
	pub.tell(t, x, old.stored(event.GPU, 0, 4))
	pub.message(t, []event.Event{old.evicted(event.GPU, 0, 4)}) // never reaches the index
	pub.message(t, []event.Event{fresh.stored(event.GPU, 0, 3), fresh.offloaded(event.CPU, 0, 3)})
	restore(t, x, pub.checkpoint(t))
	if got := blocks(t, x, old); got != 0 {
		t.Errorf("%d blocks of what was replaced", got)
	}
	if got := blocks(t, x, fresh); got != 3 {
		t.Errorf("%d blocks, want 3", got)
	}
	pub.tell(t, x, fresh.stored(event.GPU, 3, 4)) // and it goes on from there
	if got := blocks(t, x, fresh); got != 4 {
		t.Errorf("%d blocks, want 4", got)
	}
	if epoch, seq, started := x.Seq(pub.source); epoch != 1 || seq != 3 || !started {
		t.Errorf("epoch %d, sequence %d, started %v", epoch, seq, started)
	}
}

func TestABatchThatDoesNotFit(t *testing.T) {
	p := prompt(1, 4)
	for _, c := range []struct {
		name string
		miss int // batches that the index misses
		ok   bool
	}{{"evicts what is not there", 1, false}, {"does not follow", 2, false}, {"follows", 0, true}} {
		t.Run(c.name, func(t *testing.T) {
			x, _ := newIndex()
			pub := newPublisher(engine("e1"), false)
			pub.tell(t, x, p.stored(event.GPU, 0, 4))
			x.Tell(pub.status(event.StateLive, ""))
			m := pub.message(t, []event.Event{p.evicted(event.GPU, 2, 3)})
			switch c.miss {
			case 1: // the effect of one is applied twice
				apply(t, x, m)
				m.Batches[0].First++
				m.Batches[0].Last++
				pub.next++
				pub.ledger.Live++
				pub.ledger.Last++
			case 2:
				m = pub.message(t, []event.Event{p.stored(event.GPU, 2, 3)})
			}
			_, err := x.Apply(t.Context(), m)
			if (err == nil) != c.ok {
				t.Fatalf("got %v", err)
			}
			if c.ok {
				return
			}
			var broken *resident.InvariantError
			if errors.As(err, &broken) != (c.miss == 1) {
				t.Errorf("error is %T", err)
			}
			// What the index holds is in doubt until a checkpoint comes.
			if got := blocks(t, x, p); got != -1 {
				t.Errorf("%d blocks answered from a set in doubt", got)
			}
			if state, reason := stateOf(x); state != event.StateStale || !strings.Contains(reason, "waiting for a checkpoint") {
				t.Errorf("state %v: %s", state, reason)
			}
			want := 4
			if c.miss == 1 {
				want = 2
			}
			restore(t, x, pub.checkpoint(t))
			if got := blocks(t, x, p); got != want {
				t.Errorf("%d blocks after the checkpoint, want %d", got, want)
			}
			pub.tell(t, x, p.evicted(event.GPU, 1, 4))
			if got := blocks(t, x, p); got != 1 {
				t.Errorf("%d blocks after one more batch, want 1", got)
			}
		})
	}
}

func TestANewLifeEndsADoubt(t *testing.T) {
	x, _ := newIndex()
	pub := newPublisher(engine("e1"), false)
	p := prompt(1, 2)
	pub.tell(t, x, p.stored(event.GPU, 0, 2))
	x.Compared(pub.source, false)
	if got := blocks(t, x, p); got != -1 {
		t.Errorf("%d blocks answered though the digests differ", got)
	}
	pub.restart(5)
	pub.tell(t, x, p.stored(event.GPU, 0, 1))
	if got := blocks(t, x, p); got != 1 {
		t.Errorf("%d blocks, want 1", got)
	}
}

func TestACheckpointThatCannotBeLoaded(t *testing.T) {
	p := prompt(1, 4)
	for _, c := range []struct {
		name string
		harm func(*publisher) *bytes.Buffer
		gone bool // what was known is given up too
	}{
		{"empty", func(*publisher) *bytes.Buffer { return new(bytes.Buffer) }, false},
		{"truncated", func(pub *publisher) *bytes.Buffer {
			object := pub.checkpoint(t)
			object.Truncate(object.Len() - 3)
			return object
		}, false},
		{"with another digest", func(pub *publisher) *bytes.Buffer {
			snap := pub.judge.Snapshot()
			return pub.object(t, &event.Checkpoint{Digest: snap.Digest + 1, Entries: snap.Len}, snap)
		}, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			x, _ := newIndex()
			pub := newPublisher(engine("e1"), false)
			pub.tell(t, x, p.stored(event.GPU, 0, 4))
			if _, err := x.Restore(t.Context(), c.harm(pub)); err == nil {
				t.Fatal("want an error")
			}
			if got := blocks(t, x, p); c.gone != (got == -1) {
				t.Errorf("%d blocks", got)
			}
			restore(t, x, pub.checkpoint(t))
			if got := blocks(t, x, p); got != 4 {
				t.Errorf("%d blocks, want 4", got)
			}
		})
	}
	t.Run("unreadable", func(t *testing.T) {
		x, _ := newIndex()
		if _, err := x.Restore(t.Context(), brokenReader{}); !errors.Is(err, errBroken) {
			t.Errorf("got %v", err)
		}
	})
}

var errBroken = errors.New("disk fell off")

type brokenReader struct{}

func (brokenReader) Read([]byte) (int, error) { return 0, errBroken }

func TestStateAfterARestore(t *testing.T) {
	unspoken := "read from a checkpoint; its subscriber has not spoken yet"
	for _, c := range []struct {
		name   string
		told   event.State // before; 0 = nothing
		saved  event.State
		later  bool // the checkpoint is of a later life than what was told
		want   event.State
		reason string
	}{
		{"of an unknown source", 0, event.StateLive, false, event.StateRecovering, unspoken},
		{"of a source that is gone", 0, event.StateGone, false, event.StateGone, "saved"},
		{"of a source that is stale", 0, event.StateStale, false, event.StateStale, "saved"},
		{"what was told of this life stays", event.StateLive, event.StatePartial, false, event.StateLive, "told"},
		{"gone stays gone", event.StateGone, event.StateLive, false, event.StateGone, "told"},
		{"what was told of an earlier life does not", event.StateGone, event.StateLive, true, event.StateRecovering, unspoken},
	} {
		t.Run(c.name, func(t *testing.T) {
			x, _ := newIndex()
			pub := newPublisher(engine("e1"), false)
			if c.told != 0 {
				x.Tell(pub.status(c.told, "told"))
			}
			if c.later {
				pub.restart(0)
			}
			snap := pub.judge.Snapshot()
			restore(t, x, pub.object(t, &event.Checkpoint{State: c.saved, Reason: "saved", Digest: snap.Digest}, snap))
			if state, reason := stateOf(x); state != c.want || reason != c.reason {
				t.Errorf("state %v: %s, want %v: %s", state, reason, c.want, c.reason)
			}
		})
	}
}

func TestResidentListsEntries(t *testing.T) {
	x, _ := newIndex()
	pub := newPublisher(engine("e1"), false)
	p := prompt(1, 3)
	pub.tell(t, x, p.stored(event.GPU, 0, 3), p.stored(event.GPU, 0, 1), p.offloaded(event.CPU, 1, 2), p.evicted(event.GPU, 2, 3))
	got := make(map[string]uint32)
	for e := range x.Resident(pub.source) {
		got[fmt.Sprintf("%v %v %s", e.Hash, e.Prefix, e.Tier)] = e.Copies
	}
	names := p.hashes()
	want := map[string]uint32{
		fmt.Sprintf("%v %v GPU", p.hash(0), names[0]): 2,
		fmt.Sprintf("%v %v GPU", p.hash(1), names[1]): 1,
		fmt.Sprintf("%v %v CPU", p.hash(1), names[1]): 1,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	for range x.Resident(pub.source) {
		break // the index is free again, or the next call would wait for ever
	}
	pub.tell(t, x, p.stored(event.GPU, 2, 3))
	for e := range x.Resident(engine("nobody")) {
		t.Errorf("an unknown source holds %v", e.Hash)
	}
	if _, _, started := x.Seq(engine("nobody")); started {
		t.Error("an unknown source has begun")
	}
}

// An engine's words and a source's names may be any bytes; metrics take text only.
func TestMetricsOfNamesThatAreNotText(t *testing.T) {
	x, _ := newIndex()
	reg := prometheus.NewPedanticRegistry()
	reg.MustRegister(x)
	pub := newPublisher(event.Source{Cluster: "c", Model: "m\xff", Instance: "i\xfe", Origin: event.Engine}, false)
	pub.tell(t, x, prompt(1, 2).stored("tape\xff", 0, 2))
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, f := range families {
		names = append(names, f.GetName())
	}
	want := []string{
		"kvstrata_prefix_behind_sequences", "kvstrata_prefix_block_operations_total", "kvstrata_prefix_left_out_copies", "kvstrata_prefix_lookup_duration_seconds", "kvstrata_prefix_memory_bytes",
		"kvstrata_prefix_resident_blocks", "kvstrata_prefix_resident_copies", "kvstrata_prefix_source_state",
		"kvstrata_prefix_visible_lag_seconds",
	}
	if diff := cmp.Diff(want, names); diff != "" {
		t.Error(diff)
	}
}
