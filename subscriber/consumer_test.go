package subscriber_test

import (
	"bytes"
	"context"
	"io"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/nats-io/nats.go"

	"kvstrata/bus"
	"kvstrata/event"
	"kvstrata/event/resident"
	"kvstrata/subscriber"
)

// recorder is a sink that notes what it is given, and follows with a resident set.
type recorder struct {
	mu       sync.Mutex
	set      *resident.Set
	epoch    event.Epoch
	seqs     []event.Seq // applied, in order
	restored []event.Seq
	told     []event.Status
	agreed   []bool
}

func newRecorder() *recorder { return &recorder{set: resident.New(resident.Config{})} }

func (r *recorder) Restore(ctx context.Context, object io.Reader) (*event.Checkpoint, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	cp, err := r.set.Load(object)
	if err == nil {
		r.epoch = cp.Epoch
		r.restored = append(r.restored, cp.Seq)
	}
	return cp, err
}

func (r *recorder) Apply(ctx context.Context, m *event.Message) (event.Digest, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if m.Epoch != r.epoch {
		r.set.Reset()
		r.epoch = m.Epoch
	}
	for i := range m.Batches {
		if err := r.set.Apply(&m.Batches[i]); err != nil {
			return 0, err
		}
		r.seqs = append(r.seqs, m.Batches[i].First)
	}
	return r.set.Digest(), nil
}

func (r *recorder) Tell(st *event.Status) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.told = append(r.told, *st)
}

func (r *recorder) Compared(_ event.Source, agreed bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.agreed = append(r.agreed, agreed)
}

func (r *recorder) applied() []event.Seq {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.seqs)
}

func (r *recorder) restores() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.restored)
}

func (r *recorder) digest() event.Digest {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.set.Digest()
}

// story writes a source's messages by hand: batch n stores block n+1.
type story struct {
	t      *testing.T
	road   *road
	source event.Source
	judge  *resident.Set
	all    []event.Batch
}

func newStory(t *testing.T, r *road) *story {
	return &story{
		t: t, road: r, judge: resident.New(resident.DefaultConfig()),
		source: event.Source{Cluster: "c", Model: "m", Instance: "story", Origin: event.Engine},
	}
}

// judged judges batches up to a sequence.
func (s *story) judged(last event.Seq) {
	for n := event.Seq(len(s.all)); n <= last; n++ {
		b := storing(int(n)+1, int(n)+1)
		b.First, b.Last, b.Way = n, n, event.Live
		s.judge.Judge(b)
		s.all = append(s.all, *b)
	}
}

// send sends a range of batches as one message.
func (s *story) send(head bus.Head, change func(*nats.Msg)) {
	s.t.Helper()
	s.judged(head.Last)
	var enc event.Encoder
	for n := head.First; n <= head.Last; n++ {
		enc.Append(&s.all[n])
	}
	head.Blocks = enc.Blocks()
	msg := &nats.Msg{Subject: bus.Subject(bus.Events, s.source), Header: head.Header(), Data: enc.Encode(nil)}
	if change != nil {
		change(msg)
	}
	future, err := s.road.bus.PublishAsync(msg)
	if err != nil {
		s.t.Fatal(err)
	}
	select {
	case <-future.Ok():
	case err := <-future.Err():
		s.t.Fatal(err)
	}
}

// checkpoint stores a checkpoint of everything judged so far.
func (s *story) checkpoint(epoch event.Epoch, fence event.Fence, at uint64) {
	s.t.Helper()
	if err := s.stand().store(s.t.Context(), epoch, fence, at); err != nil {
		s.t.Fatal(err)
	}
}

// stand is a story as it was at one moment.
type stand struct {
	*story
	snap *resident.Snapshot
	last event.Seq
}

func (s *story) stand() stand {
	return stand{story: s, snap: s.judge.Snapshot(), last: event.Seq(len(s.all) - 1)}
}

func (s stand) store(ctx context.Context, epoch event.Epoch, fence event.Fence, at uint64) error {
	position, err := s.road.bus.Position(ctx)
	if err != nil {
		return err
	}
	if at > 0 {
		position.Sequence = at
	}
	cp := &event.Checkpoint{
		Source: s.source, Epoch: epoch, Fence: fence, Seq: s.last, State: event.StateLive, Written: event.UnixTime(time.Now()),
		Digest: s.snap.Digest, Ledger: event.Ledger{Started: true, Last: s.last, Live: uint64(s.last) + 1}, Position: position,
		Groups: s.snap.Groups, Entries: s.snap.Len, Fullest: s.snap.Fullest,
	}
	return s.road.bus.PutCheckpoint(ctx, cp, s.snap.Entries())
}

// answer writes a checkpoint of what is judged now each time that one is asked for, as a source's publisher does.
func (s *story) answer(epoch event.Epoch, fence event.Fence) {
	s.t.Helper()
	asked, done := make(chan struct{}, 1), make(chan struct{})
	sub, err := s.road.bus.HandleControl(s.source, func(string) string {
		select {
		case asked <- struct{}{}:
		default: // one is on its way
		}
		return "ok"
	})
	if err != nil {
		s.t.Fatal(err)
	}
	now := s.stand()
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		defer close(done)
		for {
			select {
			case <-asked:
				if err := now.store(ctx, epoch, fence, 0); err != nil && ctx.Err() == nil {
					s.t.Error(err)
				}
			case <-ctx.Done():
				return
			}
		}
	}()
	s.t.Cleanup(func() {
		_ = sub.Unsubscribe()
		cancel()
		<-done
	})
}

func consume(r *road, sink subscriber.Sink, holdFor time.Duration) {
	cfg := subscriber.DefaultConsumerConfig()
	cfg.HoldFor, cfg.ResyncRetry = holdFor, 100*time.Millisecond
	r.run(subscriber.NewConsumer(cfg, r.bus, sink, "recorder", quiet(), nil).Run)
}

func wantApplied(t *testing.T, sink *recorder, want ...event.Seq) {
	t.Helper()
	eventually(t, "the batches", func() bool { return len(sink.applied()) >= len(want) })
	if diff := cmp.Diff(want, sink.applied()); diff != "" {
		t.Errorf("applied: %s", diff)
	}
}

func TestEachBatchIsAppliedOnce(t *testing.T) {
	r := newRoad(t)
	s, sink := newStory(t, r), newRecorder()
	consume(r, sink, time.Minute)
	s.send(bus.Head{Epoch: 1, Fence: 1, First: 0, Last: 2}, nil)
	s.send(bus.Head{Epoch: 1, Fence: 1, First: 0, Last: 2}, nil) // sent again
	s.send(bus.Head{Epoch: 1, Fence: 1, First: 1, Last: 4}, nil) // and in other cuts
	s.send(bus.Head{Epoch: 1, Fence: 1, First: 5, Last: 5}, nil)
	wantApplied(t, sink, 0, 1, 2, 3, 4, 5)
}

func TestWhoLostTheLeaseIsNotHeard(t *testing.T) {
	r := newRoad(t)
	s, sink := newStory(t, r), newRecorder()
	consume(r, sink, time.Minute)
	s.send(bus.Head{Epoch: 1, Fence: 5, First: 0, Last: 0}, nil)
	s.send(bus.Head{Epoch: 1, Fence: 7, First: 1, Last: 1}, nil)
	s.send(bus.Head{Epoch: 1, Fence: 5, First: 2, Last: 2}, nil) // the old holder goes on
	s.send(bus.Head{Epoch: 9, Fence: 6, First: 0, Last: 0}, nil) // even with a new epoch
	s.send(bus.Head{Epoch: 1, Fence: 7, First: 2, Last: 3}, nil)
	wantApplied(t, sink, 0, 1, 2, 3)
}

func TestABatchBehindAHoleWaits(t *testing.T) {
	r := newRoad(t)
	s, sink := newStory(t, r), newRecorder()
	consume(r, sink, time.Minute)
	s.send(bus.Head{Epoch: 1, Fence: 1, First: 0, Last: 0}, nil)
	s.send(bus.Head{Epoch: 1, Fence: 1, First: 2, Last: 3}, nil)
	s.send(bus.Head{Epoch: 1, Fence: 1, First: 1, Last: 3}, nil) // the publisher sends everything from the failed one on
	s.send(bus.Head{Epoch: 1, Fence: 1, First: 4, Last: 4}, nil)
	wantApplied(t, sink, 0, 1, 2, 3, 4)
	if sink.restores() > 0 {
		t.Error("no resync was needed")
	}
}

func TestAHoleThatStaysIsResynced(t *testing.T) {
	r := newRoad(t)
	s, sink := newStory(t, r), newRecorder()
	consume(r, sink, 300*time.Millisecond)
	s.send(bus.Head{Epoch: 1, Fence: 1, First: 0, Last: 0}, nil)
	s.send(bus.Head{Epoch: 1, Fence: 1, First: 3, Last: 4}, nil)
	s.answer(1, 1)
	eventually(t, "a resync", func() bool { return sink.restores() == 1 })
	s.send(bus.Head{Epoch: 1, Fence: 1, First: 5, Last: 5}, nil)
	wantApplied(t, sink, 0, 5)
	if sink.digest() != s.judge.Digest() {
		t.Error("the resident sets have come apart")
	}
}

func TestADigestThatDiffersResyncs(t *testing.T) {
	r := newRoad(t)
	s, sink := newStory(t, r), newRecorder()
	consume(r, sink, time.Minute)
	s.judged(0)
	s.send(bus.Head{Epoch: 1, Fence: 1, First: 0, Last: 0, HasDigest: true, Digest: s.judge.Digest()}, nil)
	wantApplied(t, sink, 0)
	s.send(bus.Head{Epoch: 1, Fence: 1, First: 1, Last: 1, HasDigest: true, Digest: 12345}, nil)
	s.answer(1, 1)
	eventually(t, "a resync", func() bool { return sink.restores() == 1 })
	if diff := cmp.Diff([]bool{true, false}, sink.agreed); diff != "" {
		t.Error(diff)
	}
	if sink.digest() != s.judge.Digest() {
		t.Error("the resident sets have come apart")
	}
}

func TestADropResyncs(t *testing.T) {
	r := newRoad(t)
	s, sink := newStory(t, r), newRecorder()
	consume(r, sink, time.Minute)
	s.send(bus.Head{Epoch: 1, Fence: 1, First: 0, Last: 0}, nil)
	s.judged(3)
	s.all[1] = event.Batch{First: 1, Last: 1, Way: event.Dropped, Reason: "no room", Rank: -1} // block 2 was judged, not sent
	s.send(bus.Head{Epoch: 1, Fence: 1, First: 1, Last: 2}, nil)
	s.answer(1, 1)
	eventually(t, "a resync", func() bool { return sink.restores() == 1 })
	s.send(bus.Head{Epoch: 1, Fence: 1, First: 3, Last: 4}, nil)
	eventually(t, "step", func() bool { return sink.digest() == s.judge.Digest() })
}

func TestBytesThatAreNoMessageResync(t *testing.T) {
	for name, change := range map[string]func(*nats.Msg){
		"payload":  func(m *nats.Msg) { m.Data = m.Data[:len(m.Data)-3] },
		"headers":  func(m *nats.Msg) { m.Header.Set("Kv-Last", "17") },
		"no heads": func(m *nats.Msg) { m.Header = nil },
	} {
		t.Run(name, func(t *testing.T) {
			r := newRoad(t)
			s, sink := newStory(t, r), newRecorder()
			consume(r, sink, 300*time.Millisecond)
			s.send(bus.Head{Epoch: 1, Fence: 1, First: 0, Last: 0}, nil)
			s.send(bus.Head{Epoch: 1, Fence: 1, First: 1, Last: 1}, change)
			s.send(bus.Head{Epoch: 1, Fence: 1, First: 2, Last: 2}, nil)
			s.answer(1, 1)
			eventually(t, "step", func() bool { return sink.digest() == s.judge.Digest() })
		})
	}
}

func TestALateConsumerBeginsFromCheckpointAndTail(t *testing.T) {
	r := newRoad(t)
	s, sink := newStory(t, r), newRecorder()
	s.send(bus.Head{Epoch: 3, Fence: 2, First: 0, Last: 4}, nil)
	s.checkpoint(3, 2, 1)
	s.send(bus.Head{Epoch: 3, Fence: 2, First: 5, Last: 6}, nil)
	consume(r, sink, time.Minute)
	wantApplied(t, sink, 5, 6)
	if sink.digest() != s.judge.Digest() {
		t.Error("the resident sets have come apart")
	}
}

func TestABrokenCheckpointGivesWayToTheOneBefore(t *testing.T) {
	r := newRoad(t)
	s := newStory(t, r)
	s.send(bus.Head{Epoch: 3, Fence: 2, First: 0, Last: 1}, nil)
	s.checkpoint(3, 2, 1)
	s.send(bus.Head{Epoch: 3, Fence: 2, First: 2, Last: 3}, nil)
	s.checkpoint(3, 2, 2)
	sink := &picky{recorder: newRecorder()}
	consume(r, sink, time.Minute)
	eventually(t, "step", func() bool { return sink.digest() == s.judge.Digest() })
	if diff := cmp.Diff([]event.Seq{2, 3}, sink.applied()); diff != "" {
		t.Error(diff)
	}
}

// picky takes no checkpoint of sequence 3.
type picky struct{ *recorder }

func (p *picky) Restore(ctx context.Context, object io.Reader) (*event.Checkpoint, error) {
	data, err := io.ReadAll(object)
	if err != nil {
		return nil, err
	}
	cp, err := event.ReadCheckpoint(bytes.NewReader(data), func(*event.Entry) {})
	if err == nil && cp.Seq == 3 {
		return nil, io.ErrUnexpectedEOF
	}
	return p.recorder.Restore(ctx, bytes.NewReader(data))
}
