package subscriber_test

import (
	"context"
	"testing"
	"time"

	"kvstrata/bus"
	"kvstrata/event"
	"kvstrata/subscriber"
)

// keeper is a sink that remembers: it notes how far it was told that the stream was handed over.
type keeper struct {
	*recorder
	from    event.Position
	marks   map[event.Source]event.Mark
	resume  chan struct{} // Resume waits for it; nil = it does not
	asked   chan struct{} // closed by Resume
	reached []uint64
	after   []int // batches that were applied by then
}

func (k *keeper) Resume(ctx context.Context) (event.Position, map[event.Source]event.Mark, error) {
	if k.resume != nil {
		close(k.asked)
		select {
		case <-k.resume:
		case <-ctx.Done():
			return event.Position{}, nil, ctx.Err()
		}
	}
	return k.from, k.marks, nil
}

func (k *keeper) Reached(at event.Position) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.reached = append(k.reached, at.Sequence)
	k.after = append(k.after, len(k.seqs))
}

func (k *keeper) Dropped(*event.Message) {}

var _ subscriber.Rememberer = (*keeper)(nil)

// A sink with a backlog is told how far it got, not how far the stream is: what it was not given yet must be read again
// after a restart.
func TestReachedIsWhatWasHandedOver(t *testing.T) {
	r := newRoad(t)
	s := newStory(t, r)
	const messages = 50
	for n := range event.Seq(messages) {
		s.send(bus.Head{Epoch: 5, Fence: 1, First: n, Last: n}, nil)
	}
	k := &keeper{recorder: newRecorder()}
	consume(r, k, 0)
	eventually(t, "the backlog", func() bool { return len(k.applied()) == messages })
	k.mu.Lock()
	defer k.mu.Unlock()
	for i, at := range k.reached {
		if at > uint64(k.after[i]) {
			t.Fatalf("told of %d after %d of %d messages", at, k.after[i], messages)
		}
	}
}

// A sink goes on behind what it has.
func TestAKeeperGoesOnWhereItStood(t *testing.T) {
	r := newRoad(t)
	s := newStory(t, r)
	for n := range event.Seq(4) {
		s.send(bus.Head{Epoch: 5, Fence: 1, First: n, Last: n}, nil)
	}
	at, err := r.bus.Position(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	at.Sequence = 2
	k := &keeper{recorder: newRecorder(), from: at, marks: map[event.Source]event.Mark{s.source: {Fence: 1, Epoch: 5, Started: true, Seq: 2}}}
	for i := range 3 {
		if err := k.set.Apply(&s.all[i]); err != nil {
			t.Fatal(err)
		}
	}
	k.epoch = 5
	consume(r, k, 0)
	wantApplied(t, k.recorder, 3) // message 3 is at or below the mark
}

// While a sink could not say where it stood, the stream was lost and made anew: what it holds now is read whole.
func TestTheStreamChangesWhileASinkComesUp(t *testing.T) {
	r := newRoad(t)
	s := newStory(t, r)
	for n := range event.Seq(10) {
		s.send(bus.Head{Epoch: 5, Fence: 1, First: n, Last: n}, nil)
	}
	at, err := r.bus.Position(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	k := &keeper{recorder: newRecorder(), from: at, resume: make(chan struct{}), asked: make(chan struct{})}
	consume(r, k, 0)
	<-k.asked
	r.srv.Shutdown()
	r.srvCfg.Dir = t.TempDir()
	r.startNATS()
	s.all, s.judge = nil, newStory(t, r).judge
	eventually(t, "the stream is there again", func() bool {
		now, err := r.bus.Position(t.Context())
		return err == nil && !now.SameStream(at)
	})
	for n := range event.Seq(12) {
		s.send(bus.Head{Epoch: 6, Fence: 2, First: n, Last: n}, nil)
	}
	close(k.resume)
	wantApplied(t, k.recorder, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11)
}

// What was lost with a stream is not waited for: the source is made anew at once.
func TestWhatAStreamTookWithItIsResyncedAtOnce(t *testing.T) {
	r := newRoad(t)
	s := newStory(t, r)
	s.send(bus.Head{Epoch: 5, Fence: 1, First: 3, Last: 5}, nil) // the first that the new stream has
	s.answer(5, 1)
	k := &keeper{
		recorder: newRecorder(), from: event.Position{Stream: bus.EventStream, Created: 1, Sequence: 9},
		marks: map[event.Source]event.Mark{s.source: {Fence: 1, Epoch: 5, Started: true, Seq: 1}},
	}
	consume(r, k, time.Hour)
	eventually(t, "a resync", func() bool { return k.restores() == 1 && k.digest() == s.judge.Digest() })
}
