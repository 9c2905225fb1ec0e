package interop_test

import (
	"context"
	"encoding/hex"
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"kvstrata/event"
	"kvstrata/publisher"
)

// heard is a line of subscribe.py.
type heard struct {
	Kind   string
	Frames int
	Topic  *string
	Seq    uint64
	Hex    any // of an end mark a list
	TS     float64
	Rank   *int `json:"dp_rank"`
	Events []map[string]any
	Error  string
}

// next reads the next line, which must be of a kind.
func (p *python) next(kind string) heard {
	p.t.Helper()
	var h heard
	p.read(&h)
	if h.Kind != kind {
		p.t.Fatalf("subscribe.py says %+v, want a line of kind %s", h, kind)
	}
	return h
}

// TestVLLMReadsUs has vLLM's decoder read our publisher, live and by replay: every field that the form of its release
// has, byte for byte what we wrote. LOADED does not reach it.
func TestVLLMReadsUs(t *testing.T) {
	eachVersion(t, func(t *testing.T, v version) {
		const topic = "kv@pod-1@" + model
		cfg := publisher.DefaultZMQConfig()
		cfg.Endpoint, cfg.Replay, cfg.Topic, cfg.Form = "tcp://127.0.0.1:0", "tcp://127.0.0.1:0", topic, v.form
		z, err := publisher.NewZMQ(cfg, logTo(t, "publisher.ZMQ"))
		if err != nil {
			t.Fatal(err)
		}
		r := &rig{t: t}
		r.background(z.Run)
		<-z.Ready()

		fields := v.fields(t)
		live := v.start(t, "subscribe.py", "--endpoint", z.Endpoint(), "--topic", "kv@", "--count", "1000000", "--timeout", fmt.Sprint(patience.Seconds()))
		live.next("ready")
		// A subscription takes effect a little after the handshake: batches are sent until one is heard.
		warm := &event.Batch{Time: 1_500_000_000, Rank: -1, Events: []event.Event{cleared()}}
		stop := r.background(func(ctx context.Context) error {
			for ctx.Err() == nil {
				if err := z.Publish(warm); err != nil {
					return err
				}
				select {
				case <-ctx.Done():
				case <-time.After(20 * time.Millisecond):
				}
			}
			return nil
		})
		first := live.next("live").Seq
		stop()

		batches := everyEvent()
		start := z.Seq()
		for i := range batches {
			if err := z.Publish(&batches[i]); err != nil {
				t.Fatal(err)
			}
		}
		for first++; first < start; first++ {
			if h := live.next("live"); h.Seq != first {
				t.Fatalf("heard %d, want %d", h.Seq, first)
			}
		}
		for i := range batches {
			h := live.next("live")
			checkHeard(t, h, start+uint64(i), topic, &batches[i], v.form, fields)
			if h.Frames != 3 {
				t.Errorf("a live batch has %d frames, want 3", h.Frames)
			}
		}

		replay := v.start(t, "subscribe.py", "--replay-endpoint", z.ReplayEndpoint(), "--replay-start", fmt.Sprint(start))
		for i := range batches {
			h := replay.next("replay")
			checkHeard(t, h, start+uint64(i), topic, &batches[i], v.form, fields)
			if h.Frames != 4 {
				t.Errorf("a replayed batch has %d frames, want 4", h.Frames)
			}
		}
		end := replay.next("end")
		if diff := cmp.Diff([]any{"", "", "ffffffffffffffff", ""}, end.Hex); diff != "" {
			t.Errorf("end mark: -want +got\n%s", diff)
		}
		replay.next("done")
		if err := replay.cmd.Wait(); err != nil {
			t.Errorf("subscribe.py: %v", err)
		}
	})
}

// checkHeard compares what vLLM decoded with what we published.
func checkHeard(t *testing.T, h heard, seq uint64, topic string, b *event.Batch, form publisher.Form, fields map[string][]string) {
	t.Helper()
	if h.Seq != seq || h.Topic == nil || *h.Topic != topic {
		t.Fatalf("heard %s %d under %v, want %d under %s", h.Kind, h.Seq, h.Topic, seq, topic)
	}
	if event.Seconds(h.TS) != b.Time || (h.Rank == nil) != (b.Rank < 0) || h.Rank != nil && *h.Rank != int(b.Rank) {
		t.Errorf("%s %d: time %v, rank %v; want %d, %d", h.Kind, seq, h.TS, h.Rank, b.Time, b.Rank)
	}
	if want := hex.EncodeToString(publisher.AppendVLLM(nil, b, form)); h.Hex != want {
		t.Errorf("%s %d: bytes %v, want %s", h.Kind, seq, h.Hex, want)
	}
	want := []map[string]any{}
	for _, ev := range b.Events {
		if ev.Kind != event.Loaded {
			want = append(want, plain(docOf(ev, fields)))
		}
	}
	if diff := cmp.Diff(want, h.Events); diff != "" {
		t.Errorf("%s %d: -want +got\n%s", h.Kind, seq, diff)
	}
}

// everyEvent makes batches in which every field of every event is set, and left out, somewhere.
func everyEvent() []event.Batch {
	parent := digest(9)
	full := stored(run{tokens: prompt(1, 48), parent: &parent, lora: "my-lora"}, event.IntHash(1<<63+7), digest(1), event.IntHash(0))
	full.Group, full.LoRAID, full.Spec, full.Window = 3, 7, event.SpecSlidingWindow, 4096
	full.Locality, full.Ownership, full.Session = event.Local, "tier-1", "s-42"
	full.ExtraKeys = [][]byte{keys("my-lora", []any{"image-1", 3}, "salt"), nil, keys([]any{"image-1", -29}, []byte("\x00\xffembeds"))}
	full.Tier = event.Storage
	bare := stored(run{tokens: prompt(2, 16)}, event.IntHash(5))
	bare.Tier = ""
	empty := stored(run{tokens: prompt(3, 16)}, ints(6)...)
	empty.ExtraKeys = [][]byte{}
	out := evicted(event.CPU, digest(2), event.IntHash(1<<64-1))
	out.Group, out.Locality, out.Ownership = 3, event.Remote, "tier-2"
	loaded := event.Event{Kind: event.Loaded, Tier: event.GPU, Group: event.NoGroup, Blocks: blocksOf(ints(5)), LoRAID: event.NoLoRAID}
	at := event.Seconds(1_789_095_808.8378847)
	return []event.Batch{
		{Time: at, Rank: 2, Events: []event.Event{full, out}},
		{Time: at + 1e9, Rank: -1, Events: []event.Event{bare, loaded, evicted("", event.IntHash(5)), cleared()}},
		{Time: at + 2e9, Rank: 0, Events: []event.Event{empty, offloaded(event.CPU, digest(1))}},
		{Time: at + 3e9, Rank: 0},
	}
}

// fields asks a release for the fields of its event classes.
func (v version) fields(t *testing.T) map[string][]string {
	t.Helper()
	return startVLLM(t, v, nil).fields
}
