package subscriber

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/cenkalti/backoff/v5"
	"github.com/pebbe/zmq4"
	"golang.org/x/sync/errgroup"

	"kvstrata/event"
	"kvstrata/event/resident"
	"kvstrata/subscriber/recovery"
)

// engine turns one engine rank's sockets into judged batches on the bus. Everything but told belongs to the goroutine
// of its session.
type engine struct {
	cfg  EngineConfig
	sub  *Subscriber
	log  *slog.Logger
	told atomic.Pointer[event.Status] // the last status, for metrics

	added   bool            // by Add; guarded by the subscriber's lock, as all its engines are
	removal context.Context // ends when the engine is removed: a signal, as a channel is, that contexts can follow
	remove  func()
	ended   chan struct{} // closed when its goroutine has ended

	edge    edge
	hashing hashing
	decoder *Decoder
	batch   event.Batch

	set     *resident.Set
	machine *recovery.Machine
	ledger  event.Ledger
	epoch   event.Epoch
	lives   []event.PastLife
	stream  Stream

	complained time.Time
	noted      int // oddities told in the log
	breaches   breaches
	refused    string    // why the engine's handshake fails; empty while it does not
	lookedAt   time.Time // the state was compared with what was told
	statusAt   time.Time
	statusSeq  event.Seq
	statusSays string
	wasReady   atomic.Bool
}

func newEngine(s *Subscriber, cfg EngineConfig) *engine {
	removal, remove := context.WithCancel(context.Background())
	return &engine{
		removal: removal, remove: remove, ended: make(chan struct{}),
		cfg: cfg, sub: s, log: s.log.With("source", cfg.Source.String()), decoder: NewDecoder(DecoderConfig{Dialect: cfg.Dialect, BlockSize: cfg.BlockSize}),
		edge: edge{
			keepTokens: s.cfg.KeepTokens, allowInvertible: s.cfg.AllowInvertible || s.cfg.HashKey != "", keyed: s.cfg.HashKey != "",
		},
		hashing: newHashing(&cfg),
	}
}

// run holds sessions until stay ends, which it does with ctx or when the engine is removed. A session that fails is followed by
// another, after a growing pause.
func (e *engine) run(ctx, stay context.Context, zctx *zmq4.Context) error {
	pause := backoff.NewExponentialBackOff()
	pause.InitialInterval, pause.MaxInterval = 200*time.Millisecond, 10*time.Second
	for {
		began := time.Now()
		err := e.session(ctx, stay, zctx)
		if stay.Err() != nil {
			if err != nil && !errors.Is(err, context.Canceled) {
				e.log.Warn("stopped before everything had reached NATS; the engine's replay and the next start close the gap", "err", err)
			}
			return nil
		}
		if time.Since(began) > pause.MaxInterval {
			pause.Reset()
		}
		wait := pause.NextBackOff()
		e.log.Warn("session with the engine ended; beginning anew", "err", err, "in", wait.Round(time.Millisecond))
		select {
		case <-stay.Done():
			return nil
		case <-time.After(wait):
		}
	}
}

var errStopped = errors.New("session stopped")

// session takes the source's lease, loads its past, and hears the engine until stay ends or the lease is lost. An engine that
// is removed has its lease, and its stream, until it has said so.
func (e *engine) session(ctx, stay context.Context, zctx *zmq4.Context) error {
	lease, err := e.sub.bus.Acquire(stay, e.cfg.Source, e.sub.holder)
	if err != nil {
		return err
	}
	e.stream = e.sub.open(e.cfg.Source, lease.Fence)
	group, sessionCtx := errgroup.WithContext(ctx)
	streamCtx, stopStream := context.WithCancel(context.WithoutCancel(ctx))
	defer stopStream()
	group.Go(func() error { return e.stream.Run(streamCtx) })
	group.Go(func() error { return lease.Keep(sessionCtx) })
	group.Go(func() error {
		defer stopStream()
		err := e.hear(sessionCtx, stay, zctx)
		if err == nil {
			err = errStopped // ends the others too
		}
		return err
	})
	err = group.Wait()
	if errors.Is(err, errStopped) {
		err = nil
	}
	release, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()
	if failed := lease.Release(release); failed != nil {
		e.log.Warn("the lease can't be given back; who comes next waits until it ends", "err", failed)
	}
	return err
}

// hear loads the past, opens the sockets and works until ctx or stay ends.
func (e *engine) hear(ctx, stay context.Context, zctx *zmq4.Context) error {
	prior, err := e.load(ctx)
	if err != nil {
		return err
	}
	s, err := openFeed(zctx, e.cfg)
	if err != nil {
		return err
	}
	defer s.close()
	e.wasReady.Store(true)
	listening, stop := context.WithCancel(ctx)
	defer stop()
	defer context.AfterFunc(stay, stop)()
	if err := e.listen(listening, s, prior); err != nil {
		return err
	}
	return e.farewell()
}

// recovery returns the bounds of the engine's machine.
func (e *engine) recovery() recovery.Config {
	cfg := e.sub.cfg.Recovery
	cfg.Replay, cfg.ReplayTimeout = e.cfg.replay(cfg.ReplayTimeout)
	if e.cfg.Dialect == DialectMooncake {
		cfg.First = 1
	}
	return cfg
}

// listen takes what a feed delivers until ctx ends.
func (e *engine) listen(ctx context.Context, s feed, prior *recovery.Prior) error {
	e.machine = recovery.New(e.recovery())
	e.statusSays = "" // tell the state anew under this fence
	e.execute(ctx, s, time.Now(), e.machine.Start(time.Now(), prior))
	e.checkpoint(time.Now())
	for ctx.Err() == nil {
		inputs, err := s.poll(ctx, 50*time.Millisecond)
		if err != nil {
			return err
		}
		now := time.Now()
		e.refused = s.refusal()
		for i := range inputs {
			if !s.current(&inputs[i]) {
				continue
			}
			e.execute(ctx, s, now, e.take(now, &inputs[i]))
		}
		e.execute(ctx, s, now, e.machine.Tick(now))
		if err := e.report(now); err != nil {
			return err
		}
	}
	return nil
}

// take hands one input to the machine.
func (e *engine) take(now time.Time, in *input) []recovery.Action {
	switch in.kind {
	case liveFrame:
		return e.machine.Live(now, in.frame)
	case replayFrame:
		return e.machine.Replayed(now, in.frame)
	case replayEnd:
		return e.machine.ReplayEnd(now)
	case peerRefused:
		e.log.Warn("engine can't be heard", "endpoint", e.cfg.Endpoint, "reason", e.refused)
		return nil
	case peerConnected:
		e.log.Info("engine connected", "endpoint", e.cfg.Endpoint)
		return e.machine.Connected(now)
	case peerDisconnected:
		if e.machine.IsConnected() { // libzmq tells failed attempts too
			e.log.Warn("engine connection lost; reconnecting", "endpoint", e.cfg.Endpoint)
		}
		return e.machine.Disconnected(now)
	default:
		if e.breaches.note(strayMessage, "neither three frames with an 8-byte sequence nor JSON with an event_id") {
			e.log.Warn("a message is not an engine's; is this its event port?", "endpoint", e.cfg.Endpoint)
		}
		return nil
	}
}

// execute does what the machine decided, in order.
func (e *engine) execute(ctx context.Context, s feed, now time.Time, actions []recovery.Action) {
	for i := range actions {
		a := &actions[i]
		switch a.Kind {
		case recovery.Apply:
			e.apply(ctx, now, a)
		case recovery.Lose:
			e.log.Warn("batches are lost", "first", a.First, "last", a.Last, "reason", a.Reason)
			e.lose(ctx, now, a.First, a.Last, a.Reason)
		case recovery.NewLife:
			e.log.Warn("engine restarted", "reason", a.Reason)
			e.newLife(now)
		case recovery.Ask:
			if err := s.ask(a.First, a.Reopen); err != nil {
				e.log.Warn("replay can't be asked for", "from", a.First, "err", err)
			}
		case recovery.Duplicate:
			e.ledger.Duplicates++
		case recovery.Tell:
			e.tell(now, a)
		}
	}
}

// newLife begins an epoch; consumers learn of it by its first message, and late ones by its checkpoint.
func (e *engine) newLife(now time.Time) {
	e.endLife(now)
	e.checkpoint(now)
}

// endLife forgets all that belongs to the life so far, and begins an epoch.
func (e *engine) endLife(now time.Time) {
	e.lives = event.Bury(e.lives, event.PastLife{Epoch: e.epoch, Ledger: e.ledger, TailUnknown: true})
	e.epoch = max(e.epoch+1, event.Epoch(now.UnixMilli()))
	e.set.Reset()
	e.hashing.verifier.Reset()
	e.decoder.Forget()
	e.ledger = event.Ledger{}
}

// tell publishes the state that what follows rests on, so that it stands in the stream whenever we are killed.
func (e *engine) tell(now time.Time, a *recovery.Action) {
	st := e.status(now)
	st.State, st.Reason = a.State, a.Reason
	if err := e.stream.Status(st); err != nil {
		e.log.Warn("the source's state can't be told", "err", err)
	}
}

// apply decodes, judges and publishes one batch.
func (e *engine) apply(ctx context.Context, now time.Time, a *recovery.Action) {
	b := &e.batch
	b.Reason = ""
	if err := e.decoder.Decode(a.Frame.Data, b); err != nil {
		reason := fmt.Sprintf("malformed batch: %v", err)
		e.ledger.Malformed++
		e.complain(now, "batches can't be decoded; their blocks are lost", "seq", a.Frame.Seq, "malformed", e.ledger.Malformed,
			"err", err, "hint", e.dialectHint())
		e.machine.Malformed(a.Frame, reason)
		e.lose(ctx, now, a.Frame.Seq, a.Frame.Seq, reason)
		return
	}
	b.First, b.Last, b.Way = a.Frame.Seq, a.Frame.Seq, a.Way
	b.Received, b.Payload = event.UnixTime(now), a.Frame.Payload
	if b.Rank >= 0 && uint32(b.Rank) != e.cfg.Source.Rank &&
		e.breaches.note(rankDiffers, fmt.Sprintf("batch %d tells rank %d, configured is %d", b.First, b.Rank, e.cfg.Source.Rank)) {
		e.log.Warn("the payload tells another data-parallel rank than the configuration; check rank= and the port",
			"told", b.Rank, "configured", e.cfg.Source.Rank)
	}
	e.breaches.time(b)
	for i := range b.Events {
		e.hashing.verifier.Observe(b.First, &b.Events[i])
		e.edge.enter(&b.Events[i])
	}
	e.set.Judge(b)
	for i := range b.Events {
		e.edge.leave(&b.Events[i])
		if b.Events[i].Kind == event.Cleared {
			e.machine.Cleared(a.Frame)
		}
	}
	// One block of vLLM's pool is the null block, which holds nothing.
	if pool := e.pool(); pool > 0 && e.set.DeviceCopies()+1 >= pool {
		e.machine.Filled(a.Frame)
		e.breaches.pool(b, e.set.DeviceCopies(), pool)
	}
	e.publish(ctx, b)
}

// pool returns the physical blocks of the engine's pool, 0 when nobody told.
func (e *engine) pool() uint64 {
	if e.cfg.PoolSize > 0 {
		return e.cfg.PoolSize
	}
	return e.decoder.Pool()
}

// complainEvery is how often at most the log tells of batches that can't be decoded.
const complainEvery = 10 * time.Second

func (e *engine) complain(now time.Time, msg string, args ...any) {
	if now.Sub(e.complained) >= complainEvery {
		e.complained = now
		e.log.Warn(msg, args...)
	}
}

// dialectHint says what is likely when nothing could be decoded yet.
func (e *engine) dialectHint() string {
	if e.ledger.Malformed == e.ledger.Receptions()-e.ledger.Duplicates {
		return "nothing of this engine could be decoded: is this its event port, and does it speak another dialect than those we know?"
	}
	return "see /v1/sources"
}

// lose publishes a range that never came: what is resident is no longer known.
func (e *engine) lose(ctx context.Context, now time.Time, first, last event.Seq, reason string) {
	e.set.Clear()
	e.publish(ctx, &event.Batch{
		First: first, Last: last, Way: event.Lost, Reason: reason, Received: event.UnixTime(now), Rank: -1,
		Events: []event.Event{{Kind: event.Cleared, Cause: event.ByResync, Group: event.NoGroup, LoRAID: event.NoLoRAID}},
	})
}

func (e *engine) publish(ctx context.Context, b *event.Batch) {
	e.ledger.Count(b)
	e.stream.Publish(ctx, e.epoch, b, e.set.Digest())
}

// idleStatus is how often a source without news says that it is there.
const idleStatus = 5 * time.Second

// report publishes the status each second in which something happened, at once when the state changed, and now and then
// when nothing does; and a checkpoint when one is due.
func (e *engine) report(now time.Time) error {
	if e.stream.CheckpointDue(now, e.set.Entries()) {
		e.checkpoint(now)
	}
	if now.Sub(e.lookedAt) < 50*time.Millisecond {
		return nil
	}
	e.lookedAt = now
	st := e.status(now)
	says := st.State.String() + st.Reason
	since := now.Sub(e.statusAt)
	news := st.Seq != e.statusSeq && since >= time.Second
	if says == e.statusSays && !news && since < idleStatus {
		return nil
	}
	if says != e.statusSays {
		level := slog.LevelInfo
		if st.State != event.StateLive && st.State != event.StateRecovering {
			level = slog.LevelWarn
		}
		e.log.Log(context.Background(), level, "source state", "state", st.State, "reason", st.Reason)
	}
	e.noteOddities(st.Counters)
	e.statusAt, e.statusSeq, e.statusSays = now, st.Seq, says
	if err := e.stream.Status(st); err != nil {
		return err
	}
	e.told.Store(st)
	return nil
}

// noteOddities tells the log of each oddity that is new.
func (e *engine) noteOddities(counters []event.Counter) {
	if len(counters) <= e.noted {
		return
	}
	e.noted = len(counters)
	var names []string
	for _, c := range counters {
		names = append(names, c.Name)
	}
	e.log.Warn("the stream has oddities; /v1/sources counts them, with an example each", "oddities", names)
}

func (e *engine) status(now time.Time) *event.Status {
	st := &event.Status{
		Source: e.cfg.Source, Epoch: e.epoch, Seq: e.ledger.Last, Time: event.UnixTime(now), Digest: e.set.Digest(),
		Ledger: e.ledger.Clone(), Dialect: e.decoder.Dialect().Told(), Endpoint: e.cfg.Endpoint, Copies: event.CopiesCounted,
		Contract: e.decoder.Contract(), PoolSize: e.pool(), Groups: e.set.Groups(), Counters: e.counters(),
		PastLives: e.lives,
	}
	if e.cfg.AsSet {
		st.Copies = event.CopiesUnknown
	}
	e.hashing.tell(st)
	st.State, st.Reason = e.trust(e.machine.State(now))
	if e.refused != "" {
		st.Reason = cmp.Or(st.Reason, "not heard any more") + ": " + e.refused
	}
	return st
}

// counters returns everything odd that was seen of the engine.
func (e *engine) counters() []event.Counter { return append(e.decoder.Oddities(), e.violations()...) }

// violations returns what is odd by names of ours, as against words of the stream.
func (e *engine) violations() []event.Counter {
	all := append(e.set.Oddities(), e.breaches.list()...)
	for _, c := range []event.Counter{
		{Name: "prefix_hash_withheld", Count: e.edge.withheld, Example: "block under 16 tokens: use --hash-key or --allow-invertible"},
		{Name: "extra_keys_unreadable", Count: e.edge.broken},
		{Name: "extra_keys_left_out", Count: e.edge.unsalted, Example: "offloaded run with tokens and no extra keys: it has the names of its blocks on the device, or none"},
	} {
		if c.Count > 0 {
			all = append(all, c)
		}
	}
	return all
}

// noEvictions is why a Mooncake master's source is stale.
const noEvictions = "a Mooncake master tells no evictions: what it told may be gone"

// trust returns how far the source can be trusted at best: a Mooncake master tells no evictions, so that nothing of it may be
// counted on.
func (e *engine) trust(state event.State, reason string) (event.State, string) {
	if state.Answers() && e.decoder.Dialect() == DialectMooncake {
		return event.StateStale, noEvictions
	}
	return state, reason
}

func (e *engine) checkpoint(now time.Time) {
	cp := &event.Checkpoint{
		Epoch: e.epoch, Seq: e.ledger.Last, Written: event.UnixTime(now), Ledger: e.ledger.Clone(),
		Recents: append([]event.Recent(nil), e.machine.Recents()...), PastLives: e.lives,
	}
	cp.State, cp.Reason = e.trust(e.machine.Data())
	e.stream.Checkpoint(cp, e.set.Snapshot())
}

// farewell leaves the source as the next holder should find it.
func (e *engine) farewell() error {
	if e.removal.Err() != nil {
		return e.withdraw()
	}
	st := e.status(time.Now())
	st.State, st.Reason = e.trust(event.StateRecovering, "its subscriber stopped")
	err := e.stream.Status(st)
	e.checkpoint(time.Now())
	return err
}
