package interop_test

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"kvstrata/event"
	"kvstrata/subscriber"
)

// TestEngineRestart restarts vLLM: it counts from 0 again, and all of its blocks are gone.
func TestEngineRestart(t *testing.T) {
	eachVersion(t, func(t *testing.T, v version) {
		e, r := startVLLM(t, v, nil), newRig(t)
		r.listen(quiet(), e)
		p := newPool(1)
		for range 20 {
			e.publish(p.batch()...)
		}
		old := r.settle(e, event.StateLive)
		r.verify(e, old, false)

		e.restart()
		p = newPool(2)
		e.publish(p.batch()...) // before we are back: only replay has it
		e.await()
		for range 5 {
			e.publish(p.batch()...)
		}
		r.verifyNewLife(e, old)
	})
}

// verifyNewLife waits for the engine's present life, of which everything must have come, under a later epoch.
func (r *rig) verifyNewLife(e *vllm, old *event.Status) {
	r.t.Helper()
	st := r.settle(e, event.StateLive)
	if st.Epoch <= old.Epoch {
		r.t.Errorf("epoch %d after %d", st.Epoch, old.Epoch)
	}
	if diff := cmp.Diff([]event.Epoch{old.Epoch, st.Epoch}, r.sink.epochs()); diff != "" {
		r.t.Errorf("lives: -want +got\n%s", diff)
	}
	r.verify(e, st, false)
}

// TestEngineRestartWhileAway cuts us off while vLLM restarts and passes the sequence that we had: by its numbers alone
// the new life would go on where the old one was.
func TestEngineRestartWhileAway(t *testing.T) {
	for _, how := range []struct {
		name string
		pace time.Duration // of the replay
		wait bool          // for the replay, before the next live frame
	}{
		{"silent", 0, true},
		{"live frame before the answer", 0, false},
		{"answer in one piece", 20 * time.Millisecond, true},
	} {
		t.Run(how.name, func(t *testing.T) {
			eachVersion(t, func(t *testing.T, v version) {
				e, r := startVLLM(t, v, nil), newRig(t)
				live, replay := newLink(t, e.endpoint, 0), newLink(t, e.replay, how.pace)
				r.subscribe(quiet(), e.engineFlag(live.endpoint(), replay.endpoint()))
				e.await()
				p := newPool(1)
				for range 5 {
					e.publish(p.batch()...)
				}
				old := r.settle(e, event.StateLive)

				live.sever()
				replay.sever()
				e.restart()
				p = newPool(2)
				for range 12 {
					e.publish(p.batch()...)
				}
				replay.mend(e.replay)
				live.mend(e.endpoint)
				if how.wait {
					r.settle(e, event.StateLive)
				}
				e.await()
				e.publish(p.batch()...)
				r.verifyNewLife(e, old)
			})
		})
	}
}

// TestEngineHangsThenRestarts asks an engine that hangs, or one that dies before it has answered; when we are back, its
// next life is past the sequence that we had. Nothing of the old life may be taken for the new one's, nor the other way.
func TestEngineHangsThenRestarts(t *testing.T) {
	for _, how := range []struct {
		name string
		gap  bool // a gap is being closed; else the engine is asked because it is silent
		n    int  // batches of the new life before we are back
	}{
		{"silent, then ahead", false, 12},
		{"gap, then ahead", true, 12},
		{"gap, then behind", true, 2},
	} {
		t.Run(how.name, func(t *testing.T) {
			eachVersion(t, func(t *testing.T, v version) {
				e, r := startVLLM(t, v, nil), newRig(t)
				live, replay := newLink(t, e.endpoint, 0), newLink(t, e.replay, 0)
				cfg := subscriber.DefaultConfig()
				cfg.Recovery.ReplayTimeout = 2 * time.Second
				r.subscribe(cfg, e.engineFlag(live.endpoint(), replay.endpoint()))
				e.await()
				p := newPool(1)
				for range 5 {
					e.publish(p.batch()...)
				}
				old := r.settle(e, event.StateLive)

				replay.hang()
				asked := replay.carried()
				if how.gap {
					e.drop(p.batch()...)
					e.publish(p.batch()...)
				}
				eventually(t, "the engine is asked", func() error {
					if replay.carried() == asked {
						return errors.New("it is not")
					}
					return nil
				})
				live.sever()
				replay.sever()
				e.restart()
				p = newPool(2)
				for range how.n {
					e.publish(p.batch()...)
				}
				replay.mend(e.replay)
				live.mend(e.endpoint)
				e.await()
				e.publish(p.batch()...)
				r.verifyNewLife(e, old)
			})
		})
	}
}

// TestBlip cuts us off while vLLM goes on: the same life, with a gap.
func TestBlip(t *testing.T) {
	eachVersion(t, func(t *testing.T, v version) {
		e, r := startVLLM(t, v, nil), newRig(t)
		live, replay := newLink(t, e.endpoint, 0), newLink(t, e.replay, 0)
		r.subscribe(quiet(), e.engineFlag(live.endpoint(), replay.endpoint()))
		e.await()
		r.awaitReason("connected, but no event yet")
		p := newPool(1)
		for range 5 {
			e.publish(p.batch()...)
		}
		before := r.settle(e, event.StateLive)
		live.sever()
		replay.sever()
		for range 30 {
			e.publish(p.batch()...)
		}
		replay.mend(e.replay)
		live.mend(e.endpoint)
		st := r.settle(e, event.StateLive)
		if st.Epoch != before.Epoch || st.Ledger.Recovered != 30 {
			t.Errorf("epoch %d, then %d; ledger %+v", before.Epoch, st.Epoch, st.Ledger)
		}
		r.verify(e, st, false)
	})
}

// TestEngineFirstHeardLate starts us before the engine: we have given up asking when it comes, and it has published when
// we are connected.
func TestEngineFirstHeardLate(t *testing.T) {
	eachVersion(t, func(t *testing.T, v version) {
		e, r := startVLLM(t, v, nil), newRig(t)
		live, replay := newLink(t, e.endpoint, 0), newLink(t, e.replay, 0)
		live.sever()
		replay.sever()
		cfg := quiet()
		cfg.Recovery.ReplayTimeout = 500 * time.Millisecond // three times of which we ask before we give up
		r.subscribe(cfg, e.engineFlag(live.endpoint(), replay.endpoint()))
		p := newPool(1)
		for range 5 {
			e.publish(p.batch()...)
		}
		live.mend(e.endpoint)
		r.awaitReason("connected, but no event yet") // and asking no more
		replay.mend(e.replay)
		e.await()
		e.publish(p.batch()...)
		r.verify(e, r.settle(e, event.StateLive), false)
	})
}

// TestOwnRestart stops the subscriber, and starts another after the engine went on.
func TestOwnRestart(t *testing.T) {
	eachVersion(t, func(t *testing.T, v version) {
		e, r := startVLLM(t, v, nil), newRig(t)
		stop := r.listen(quiet(), e)
		p := newPool(1)
		for range 30 {
			e.publish(p.batch()...)
		}
		before := r.settle(e, event.StateLive)
		stop()
		eventually(t, "the subscriber says that it stops", func() error {
			if st := r.sink.status(); st.State != event.StateRecovering {
				return fmt.Errorf("state %v", st.State)
			}
			return nil
		})
		for range 20 {
			e.publish(p.batch()...)
		}
		stop = r.subscribe(quiet(), e.engineFlag(e.endpoint, e.replay))
		r.verifySameLife(e, before)
		e.await()
		e.publish(p.batch()...)
		r.verifySameLife(e, before)
		stop()

		// Nothing happened meanwhile: the engine's last batch proves its life.
		r.subscribe(quiet(), e.engineFlag(e.endpoint, e.replay))
		r.verifySameLife(e, before)
	})
}

// verifySameLife waits for all of the engine's life, which must be the one known before, and holds a late joiner's index
// against it too.
func (r *rig) verifySameLife(e *vllm, before *event.Status) {
	r.t.Helper()
	st := r.settle(e, event.StateLive)
	if diff := cmp.Diff([]event.Epoch{before.Epoch}, r.sink.epochs()); diff != "" {
		r.t.Errorf("lives: -want +got\n%s", diff)
	}
	u := r.verify(e, st, false)

	late := newRecorder()
	consumer := subscriber.NewConsumer(subscriber.DefaultConsumerConfig(), r.bus, late, "late", r.log, nil)
	stop := r.background(consumer.Run)
	defer stop()
	eventually(r.t, "a late joiner is there", func() error {
		if _, seq, _ := late.index.Seq(e.source()); seq != e.last() || !consumer.CaughtUp() {
			return fmt.Errorf("at %d of %d", seq, e.last())
		}
		return nil
	})
	if diff := cmp.Diff(u.resident(), residentIn(late.index, e), asIndexed...); diff != "" {
		r.t.Errorf("a late joiner's index: -want +got\n%s", diff)
	}
}

// TestKill kills the real binary with batches on their way, and starts it again after the engine went on.
func TestKill(t *testing.T) {
	eachVersion(t, func(t *testing.T, v version) {
		e, r := startVLLM(t, v, nil), newRig(t)
		first := r.process(e)
		e.await()
		p := newPool(1)
		for range 30 {
			e.publish(p.batch()...)
		}
		before := r.settle(e, event.StateLive)
		for i := range 60 {
			e.publish(p.batch()...)
			if i == 40 {
				first.end(os.Kill)
			}
		}
		second := r.process(e)
		r.verifySameLife(e, before)
		e.await()
		e.publish(p.batch()...)
		r.verifySameLife(e, before)
		if err := second.end(syscall.SIGTERM); err != nil {
			t.Errorf("kvstrata run, told to stop: %v", err)
		}
	})
}

// process is a kvstrata that runs on its own.
type process struct {
	cmd *exec.Cmd
}

// process starts the subscriber as a process.
func (r *rig) process(e *vllm) *process {
	r.t.Helper()
	path, err := binary()
	if err != nil {
		r.t.Fatal(err)
	}
	p := &process{}
	p.cmd = exec.Command(path, "run", "--roles", "subscriber", "--nats", r.nats.URL(), "--lease-ttl", leaseTTL.String(),
		"--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--engine", e.engineFlag(e.endpoint, e.replay))
	var said bytes.Buffer
	p.cmd.Stderr = &said
	if err := p.cmd.Start(); err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() {
		_ = p.end(os.Kill)
		if r.t.Failed() {
			r.t.Logf("kvstrata run said:\n%s", &said)
		}
	})
	return p
}

// end signals the process and waits for its end.
func (p *process) end(signal os.Signal) error {
	if p.cmd.ProcessState != nil {
		return nil
	}
	_ = p.cmd.Process.Signal(signal) // it may have ended by itself
	return p.cmd.Wait()
}
