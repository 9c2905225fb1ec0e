package interop_test

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"kvstrata/event"
	"kvstrata/subscriber"
)

// TestDroppedFrames loses frames on the live socket: vLLM's ROUTER has them, with the topic (new) or without (old).
func TestDroppedFrames(t *testing.T) {
	eachVersion(t, func(t *testing.T, v version) {
		e, r := startVLLM(t, v, args{"topic": "kv-events"}), newRig(t)
		r.listen(quiet(), e)
		p := newPool(1)
		for range 5 {
			e.publish(p.batch()...)
		}
		r.settle(e, event.StateLive)
		for range 7 {
			e.drop(p.batch()...)
		}
		e.publish(p.batch()...) // betrays the gap, and is held back until it is closed
		r.settle(e, event.StateLive)
		e.publish(p.batch()...)
		st := r.settle(e, event.StateLive)
		r.verify(e, st, false)
		// The last batch before the gap, which proves the life, and the frame that was held come again by the replay.
		want := event.Ledger{Started: true, Last: 13, Live: 6, Recovered: 7, Held: 1, Duplicates: 2}
		if diff := cmp.Diff(want, st.Ledger); diff != "" {
			t.Errorf("ledger: -want +got\n%s", diff)
		}
	})
}

// TestDroppedTail loses the last frames: only silence betrays it.
func TestDroppedTail(t *testing.T) {
	eachVersion(t, func(t *testing.T, v version) {
		e, r := startVLLM(t, v, nil), newRig(t)
		r.listen(subscriber.DefaultConfig(), e)
		p := newPool(2)
		e.publish(p.batch()...)
		for range 4 {
			e.drop(p.batch()...)
		}
		st := r.settle(e, event.StateLive)
		r.verify(e, st, false)
		if st.Ledger.Asked < 4 {
			t.Errorf("ledger %+v: want 4 asked for", st.Ledger)
		}
	})
}

// TestManyGaps loses frames again and again while the engine goes on without waiting for us.
func TestManyGaps(t *testing.T) {
	eachVersion(t, func(t *testing.T, v version) {
		e, r := startVLLM(t, v, nil), newRig(t)
		r.listen(subscriber.DefaultConfig(), e)
		p := newPool(3)
		e.publish(p.batch()...)
		r.settle(e, event.StateLive)
		dropped := uint64(0)
		for range 400 {
			if p.rand.IntN(3) == 0 {
				e.drop(p.batch()...)
				dropped++
			} else {
				e.publish(p.batch()...)
			}
		}
		e.publish(p.batch()...)
		st := r.settle(e, event.StateLive)
		r.verify(e, st, false)
		if st.Ledger.Recovered+st.Ledger.Asked < dropped || st.Ledger.Lost > 0 {
			t.Errorf("ledger %+v: %d frames were dropped", st.Ledger, dropped)
		}
		checkOddities(t, st)
	})
}

// TestHole makes vLLM use up a sequence for a batch that it cannot encode: nobody can ever have that one.
func TestHole(t *testing.T) {
	eachVersion(t, func(t *testing.T, v version) {
		e, r := startVLLM(t, v, nil), newRig(t)
		r.listen(quiet(), e)
		p := newPool(4)
		for range 3 {
			e.publish(p.batch()...)
		}
		e.hole()
		e.publish(stored(run{tokens: prompt(1, 32)}, ints(1, 2)...))
		st := r.settle(e, event.StatePartial)
		r.verify(e, st, false)
		wantHoles(t, st, event.Hole{First: 3, Last: 3})
		if st.Ledger.Lost != 1 {
			t.Errorf("ledger %+v: want 1 lost", st.Ledger)
		}

		e.publish(cleared())
		e.publish(stored(run{tokens: prompt(1, 32)}, ints(1, 2)...))
		st = r.settle(e, event.StateLive)
		r.verify(e, st, false)
		wantHoles(t, st, event.Hole{First: 3, Last: 3})
	})
}

// TestBufferOverrun loses more than vLLM keeps: it answers from the oldest batch that it has, without a word.
func TestBufferOverrun(t *testing.T) {
	eachVersion(t, func(t *testing.T, v version) {
		e, r := startVLLM(t, v, args{"buffer_steps": 8}), newRig(t)
		r.listen(quiet(), e)
		p := newPool(5)
		for range 4 {
			e.publish(p.batch()...)
		}
		r.settle(e, event.StateLive)
		p.chains = make([][]event.BlockHash, poolPrompts) // what comes later does not build on what is lost
		p.cold = nil
		for range 20 {
			e.drop(p.batch()...)
		}
		e.publish(p.batch()...) // 24: the buffer holds 17 to 24
		st := r.settle(e, event.StatePartial)
		r.verify(e, st, false)
		wantHoles(t, st, event.Hole{First: 4, Last: 16})
		if l := st.Ledger; l.Live != 4 || l.Lost != 13 || l.Recovered != 7 || l.Held != 1 {
			t.Errorf("ledger %+v: want 4 live, 13 lost, 7 recovered, 1 held", l)
		}
	})
}

func wantHoles(t *testing.T, st *event.Status, holes ...event.Hole) {
	t.Helper()
	if diff := cmp.Diff(holes, st.Ledger.Holes, cmpopts.IgnoreFields(event.Hole{}, "Reason")); diff != "" {
		t.Errorf("holes: -want +got\n%s", diff)
	}
	for _, h := range st.Ledger.Holes {
		if h.Reason == "" {
			t.Errorf("hole %d to %d has no reason", h.First, h.Last)
		}
	}
}

// TestFirstFramesDropped loses the very first frames, after an empty replay has told that there were none yet.
func TestFirstFramesDropped(t *testing.T) {
	eachVersion(t, func(t *testing.T, v version) {
		e, r := startVLLM(t, v, nil), newRig(t)
		r.listen(quiet(), e)
		p := newPool(6)
		e.drop(p.batch()...)
		e.drop(p.batch()...)
		e.publish(p.batch()...)
		r.verify(e, r.settle(e, event.StateLive), false)
	})
}

// TestLargeReplay comes late to an engine with 10,000 batches, over a slow line. vLLM's ROUTER drops from its answer
// what its queue cannot take, the end mark too, and says nothing: holes must be asked for until none is left.
func TestLargeReplay(t *testing.T) {
	eachVersion(t, func(t *testing.T, v version) {
		e, r := startVLLM(t, v, nil), newRig(t)
		const n = 10_000
		e.fill(n, 1000) // so long that the answer does not fit the buffers on its way
		cfg := quiet()
		cfg.Recovery.ReplayTimeout = time.Second // an end mark that was dropped is waited for
		replay := newLink(t, e.replay, time.Millisecond)
		r.subscribe(cfg, e.engineFlag(e.endpoint, replay.endpoint()))
		st := r.settle(e, event.StateLive)
		r.verify(e, st, false)
		if st.Ledger.Recovered != n || st.Ledger.Lost > 0 {
			t.Errorf("ledger %+v: want %d recovered and none lost", st.Ledger, n)
		}
		if replay.carried() < oneRequest+10 {
			t.Error("one request was enough: the ROUTER lost nothing, so nothing is proved")
		}
		t.Logf("%d bytes of requests, %d answers from behind a hole", replay.carried(), st.Ledger.Duplicates)
	})
}

// oneRequest is how many bytes ZeroMQ's handshake and one request take: greeting 64, READY 42, frames 2 and 10.
const oneRequest = 118
