package subscriber_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"testing"
	"time"

	"kvstrata/bus"
	"kvstrata/event"
	"kvstrata/event/resident"
	"kvstrata/indexer/prefix"
	"kvstrata/subscriber"
)

// gate is an index whose Restore of one source waits.
type gate struct {
	*prefix.Index
	instance string
	reached  chan struct{} // holds a token when somebody waits
	open     chan struct{}
}

func newGate(instance string) *gate {
	return &gate{Index: prefix.New(prefix.DefaultConfig()), instance: instance, reached: make(chan struct{}, 1), open: make(chan struct{})}
}

func (g *gate) Restore(ctx context.Context, object io.Reader) (*event.Checkpoint, error) {
	data, err := io.ReadAll(object)
	if err != nil {
		return nil, err
	}
	if cp, err := event.ReadCheckpoint(bytes.NewReader(data), func(*event.Entry) {}); err == nil && cp.Source.Instance == g.instance {
		select {
		case g.reached <- struct{}{}:
		default:
		}
		select {
		case <-g.open:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	return g.Index.Restore(ctx, bytes.NewReader(data))
}

// matches returns how many blocks of the prompt the index finds in each source that answers.
func matches(t *testing.T, x *prefix.Index) map[string]int {
	t.Helper()
	var text []uint32
	for n := 1; n <= 64; n++ {
		text = append(text, tokens(n)...)
	}
	all := make(map[string]int)
	answer, err := x.Lookup(&prefix.Request{Model: "m", Tokens: text})
	if err != nil {
		return all // the first checkpoint is yet to come
	}
	for _, m := range answer.Matches {
		all[m.Source.Instance] = m.Blocks
	}
	return all
}

// start runs a consumer for which checkpoints are late soon.
func start(r *road, sink subscriber.Sink) *subscriber.Consumer {
	cfg := subscriber.DefaultConsumerConfig()
	cfg.ResyncRetry, cfg.LateAfter = 100*time.Millisecond, 200*time.Millisecond
	c := subscriber.NewConsumer(cfg, r.bus, sink, "gate", quiet(), nil)
	r.run(c.Run)
	return c
}

// Two hundred sources start from checkpoints. One has a broken one, and is read from the stream; one comes late. The others
// answer meanwhile, and go on.
func TestSourcesAnswerWhileOthersAreLoaded(t *testing.T) {
	const sources = 200
	r := newRoad(t)
	stories := make([]*story, sources)
	for i := range stories {
		s := newStory(t, r)
		s.source.Instance = fmt.Sprint("e", i)
		s.send(bus.Head{Epoch: 1, Fence: 1, First: 0, Last: event.Seq(3)}, nil)
		stories[i] = s
	}
	defer r.bus.Hurry()()
	for i, s := range stories {
		s.answer(1, 1) // on a busy machine any of them may be late
		if i == 7 {
			snap := s.judge.Snapshot()
			snap.Digest++
			if err := (stand{s, snap, 3}).store(t.Context(), 1, 1, 0); err != nil {
				t.Fatal(err)
			}
			continue
		}
		s.checkpoint(1, 1, 0)
	}
	g := newGate("e11")
	c := start(r, g)
	whole := func(blocks int, but ...string) func() bool {
		return func() bool {
			all := matches(t, g.Index)
			for _, instance := range but {
				if all[instance] > 0 {
					t.Fatalf("%s answers before it is loaded", instance)
				}
				all[instance] = blocks
			}
			for _, n := range all {
				if n != blocks {
					return false
				}
			}
			return len(all) == sources
		}
	}
	eventually(t, "all but the late one", whole(4, "e11"))
	for _, s := range stories {
		s.send(bus.Head{Epoch: 1, Fence: 1, First: 4, Last: 5}, nil)
	}
	eventually(t, "what the others told meanwhile", whole(6, "e11"))
	if c.CaughtUp() {
		t.Error("caught up while a checkpoint is still being loaded")
	}
	close(g.open)
	eventually(t, "the late one", whole(6))
	eventually(t, "having caught up", c.CaughtUp)
}

// A checkpoint of the start that comes so late that the stream was already read behind it does not count: another is asked for.
func TestALateCheckpointBehindWhatWasReadIsNotTrusted(t *testing.T) {
	r := newRoad(t)
	late, other := newStory(t, r), newStory(t, r)
	other.source.Instance = "other"
	late.send(bus.Head{Epoch: 1, Fence: 1, First: 0, Last: 1}, nil)
	late.checkpoint(1, 1, 1)
	late.send(bus.Head{Epoch: 1, Fence: 1, First: 2, Last: 2}, nil)
	other.send(bus.Head{Epoch: 1, Fence: 1, First: 0, Last: 0}, nil)
	other.checkpoint(1, 1, 3) // so that the stream is read from 4 on
	g := newGate("story")
	c := start(r, g)
	<-g.reached
	other.send(bus.Head{Epoch: 1, Fence: 1, First: 1, Last: 1}, nil)
	eventually(t, "the other", func() bool { return matches(t, g.Index)["other"] == 2 })
	late.answer(1, 1)
	close(g.open)
	eventually(t, "the late one, with what was not read", func() bool { return matches(t, g.Index)["story"] == 3 })
	late.send(bus.Head{Epoch: 1, Fence: 1, First: 3, Last: 4}, nil)
	eventually(t, "going on", func() bool { return matches(t, g.Index)["story"] == 5 && c.CaughtUp() })
}

// A resync whose checkpoint does not come to its end holds up nobody else.
func TestAResyncHoldsUpNobody(t *testing.T) {
	r := newRoad(t)
	stuck, other := newStory(t, r), newStory(t, r)
	other.source.Instance = "other"
	stuck.send(bus.Head{Epoch: 1, Fence: 1, First: 0, Last: 0}, nil)
	other.send(bus.Head{Epoch: 1, Fence: 1, First: 0, Last: 0}, nil)
	g := newGate("story")
	start(r, g)
	eventually(t, "both", func() bool { m := matches(t, g.Index); return m["story"] == 1 && m["other"] == 1 })
	stuck.judged(1)
	stuck.send(bus.Head{Epoch: 1, Fence: 1, First: 1, Last: 1, HasDigest: true, Digest: 12345}, nil)
	stuck.answer(1, 1)
	<-g.reached
	stuck.send(bus.Head{Epoch: 1, Fence: 1, First: 2, Last: 3}, nil)
	for n := range event.Seq(10) {
		other.send(bus.Head{Epoch: 1, Fence: 1, First: n + 1, Last: n + 1}, nil)
	}
	eventually(t, "the other's batches", func() bool { return matches(t, g.Index)["other"] == 11 })
	close(g.open)
	eventually(t, "the one that was stuck", func() bool { return matches(t, g.Index)["story"] == 4 })
}

// Sources of models that are not asked for are not there.
func TestOnlyTheModelsAskedFor(t *testing.T) {
	r := newRoad(t)
	ours, saved, others := newStory(t, r), newStory(t, r), newStory(t, r)
	saved.source.Model, others.source.Model = "elsewhere", "elsewhere"
	others.source.Instance = "others"
	saved.send(bus.Head{Epoch: 1, Fence: 1, First: 0, Last: 0}, nil)
	saved.checkpoint(1, 1, 0)
	cfg := subscriber.DefaultConsumerConfig()
	cfg.Models = []string{"m"}
	x := prefix.New(prefix.DefaultConfig())
	c := subscriber.NewConsumer(cfg, r.bus, x, "models", quiet(), nil)
	r.run(c.Run)
	others.send(bus.Head{Epoch: 1, Fence: 1, First: 0, Last: 0}, nil)
	ours.send(bus.Head{Epoch: 1, Fence: 1, First: 0, Last: 0}, nil)
	eventually(t, "ours", func() bool { return matches(t, x)["story"] == 1 })
	others.send(bus.Head{Epoch: 1, Fence: 1, First: 1, Last: 1}, nil)
	eventually(t, "having caught up", c.CaughtUp)
	if all := x.Sources(); len(all) != 1 {
		t.Errorf("%d sources are known, want one: %v", len(all), all)
	}
}

// BenchmarkRestart starts a consumer and an index anew over a million blocks in checkpoints.
func BenchmarkRestart(b *testing.B) {
	const blocks = 1_000_000
	for _, sources := range []int{16, 200} {
		b.Run(fmt.Sprint("sources=", sources), func(b *testing.B) {
			r := newRoad(b)
			defer r.bus.Hurry()()
			bytes := int64(0)
			for i := range sources {
				bytes += storeBlocks(b, r, i, blocks/sources)
			}
			b.ReportAllocs()
			for b.Loop() {
				x := prefix.New(prefix.DefaultConfig())
				c := subscriber.NewConsumer(subscriber.DefaultConsumerConfig(), r.bus, x, "bench", quiet(), nil)
				ctx, cancel := context.WithCancel(b.Context())
				done := make(chan error)
				go func() { done <- c.Run(ctx) }()
				for !c.CaughtUp() {
					<-time.After(time.Millisecond)
				}
				cancel()
				if err := <-done; err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64(bytes)/blocks, "B/block")
			b.ReportMetric(b.Elapsed().Seconds()/float64(b.N), "s/restart")
		})
	}
}

// storeBlocks stores a checkpoint of blocks with names of their own, and returns its size.
func storeBlocks(b *testing.B, r *road, source, blocks int) int64 {
	b.Helper()
	set := resident.New(resident.DefaultConfig())
	for at := 0; at < blocks; at += 64 {
		ev := event.Event{
			Kind: event.Stored, Tier: event.GPU, Group: event.NoGroup, BlockSize: 16, LoRAID: event.NoLoRAID, Spec: event.SpecFull,
		}
		for n := at; n < min(at+64, blocks); n++ {
			ev.Blocks = append(ev.Blocks, event.Block{Hash: event.IntHash(event.LocalHash([]uint32{uint32(source), uint32(n)}, 7)), Copies: -1, Age: -1})
			for range 16 {
				ev.Tokens = append(ev.Tokens, uint32(source*blocks+n))
			}
		}
		set.Judge(&event.Batch{Time: event.Time(clock + int64(at)), Events: []event.Event{ev}})
	}
	snap := set.Snapshot()
	position, err := r.bus.Position(b.Context())
	if err != nil {
		b.Fatal(err)
	}
	cp := &event.Checkpoint{
		Source: event.Source{Cluster: "c", Model: "m", Instance: fmt.Sprint("e", source), Origin: event.Engine}, Epoch: 1, Fence: 1,
		State: event.StateLive, Written: event.UnixTime(time.Now()), Digest: snap.Digest, Ledger: event.Ledger{Started: true, Live: 1},
		Position: position, Groups: snap.Groups, Entries: snap.Len, Fullest: snap.Fullest,
	}
	var size count
	if err := event.WriteCheckpoint(&size, cp, snap.Entries()); err != nil {
		b.Fatal(err)
	}
	if err := r.bus.PutCheckpoint(b.Context(), cp, snap.Entries()); err != nil {
		b.Fatal(err)
	}
	return int64(size)
}

// count counts what is written.
type count int64

func (c *count) Write(p []byte) (int, error) {
	*c += count(len(p))
	return len(p), nil
}
