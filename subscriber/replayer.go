package subscriber

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"kvstrata/event"
	"kvstrata/event/resident"
	"kvstrata/subscriber/recovery"
)

// Replayer turns a recording of one engine into judged batches, as a [Subscriber] does with what its sockets bring. The recording's
// times are its clock, and it owns no goroutine.
//
// Not safe for concurrent use.
type Replayer struct {
	e       *engine
	feed    *told
	replays bool
	opening bool // nobody has answered yet what every session asks at first
	replay  bool // lines of a replay are being read
	life    life
	began   bool
}

// NewReplayer returns a replayer that publishes to a stream: no checkpoint, and nothing that has to settle. Where the recording has
// lines of replays, gaps wait for them; else each is a loss at once.
func NewReplayer(cfg Config, engineCfg EngineConfig, replays bool, stream Stream, log *slog.Logger) (*Replayer, error) {
	if err := checkHashing(&engineCfg); err != nil {
		return nil, err
	}
	if engineCfg.Replay = ""; replays {
		engineCfg.Replay = "of the recording"
	}
	e := newEngine(&Subscriber{cfg: cfg, log: log}, engineCfg)
	judge := cfg.Judge
	judge.Hasher, judge.AsSet = event.NewHasher(cfg.HashKey), engineCfg.AsSet
	e.set, e.stream = resident.New(judge), stream
	return &Replayer{e: e, feed: new(told), replays: replays}, nil
}

// Take takes the next line, which was recorded at a time that is not before the last one's.
func (r *Replayer) Take(ctx context.Context, h *Heard, at time.Time) error {
	e := r.e
	do := func(actions []recovery.Action) { e.execute(ctx, r.feed, at, actions) }
	if !r.began {
		r.began = true
		e.epoch = event.Epoch(at.UnixMilli())
		e.machine = recovery.New(e.recovery())
		do(e.machine.Start(at, nil))
		do(e.machine.Connected(at))
		r.opening = true
	}
	if r.opening && h.Kind <= HeardReplayEnd {
		r.opening = false
		if h.Kind == HeardFrame { // whoever recorded did not ask, or not yet
			do(e.machine.ReplayEnd(at))
		}
	}
	if r.replay && h.Kind != HeardReplay {
		r.replay = false
		do(e.machine.ReplayEnd(at))
		if h.Kind == HeardReplayEnd {
			return e.report(at)
		}
	}
	switch h.Kind {
	case HeardFrame:
		if r.restarted(h) {
			do(e.machine.Disconnected(at))
			do(e.machine.Connected(at))
		}
		do(e.machine.Live(at, h.Frame))
	case HeardReplay:
		r.replay = true
		do(e.machine.Replayed(at, h.Frame))
	case HeardReplayEnd: // of an empty one
		do(e.machine.ReplayEnd(at))
	case HeardConnected:
		do(e.machine.Connected(at))
	case HeardDisconnected:
		do(e.machine.Disconnected(at))
	default:
		return fmt.Errorf("a line of kind %d", h.Kind)
	}
	do(e.machine.Tick(at))
	return e.report(at)
}

// restarted reports whether a live frame begins another life of the engine. A file has one order, in which numbers fall back only then;
// of raw frames, which two publishers may have sent, only the first number says so, and nothing does where answers of a replay stand between.
func (r *Replayer) restarted(h *Heard) bool {
	known := r.life.known
	another := r.life.another(&h.Frame, 0) && known
	return another && !r.replays && (h.Form != FrameForm || h.Frame.Seq == r.e.recovery().First)
}

// maxSilences bounds how often a recording's end is waited for an answer.
const maxSilences = 64

// End ends the recording: what still waits for an answer waits in vain. It returns what there is to say of the source.
func (r *Replayer) End(ctx context.Context, at time.Time) (*event.Status, error) {
	e := r.e
	if !r.began {
		return nil, fmt.Errorf("%v: the recording has no line of it", e.cfg.Source)
	}
	later := at
	for i, asked := 0, r.replays; asked && i < maxSilences; i++ {
		r.feed.asked = false
		later = later.Add(e.recovery().ReplayTimeout + time.Second)
		e.execute(ctx, r.feed, at, e.machine.Tick(later))
		asked = r.feed.asked
	}
	e.lookedAt = time.Time{}
	return e.status(at), e.report(at)
}

// told is a feed that nobody can ask: the recording has what it has.
type told struct {
	feed
	asked bool
}

func (f *told) ask(event.Seq, bool) error {
	f.asked = true
	return nil
}
