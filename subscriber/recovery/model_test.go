package recovery_test

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"kvstrata/event"
	"kvstrata/subscriber/recovery"
)

// TestModel drives the machine, a resident set, a ledger and the past through any mix of loss, duplication, reordering, short,
// silent and endless replays, buffers that move on, silence, reconnects, restarts, clocks that are set, and kills of the
// subscriber between any two actions.
//
// Always: within an epoch every sequence is told once, in order; the ledger adds up; who follows the stream has the judge's
// set; a new life is begun only where there is one, or nobody can tell. A live source has exactly what its engine held after
// the last batch applied, a partial one nothing that the engine had not, and as long as nothing was lost each batch is judged as
// by one who has heard it all, however often the subscriber was killed. When the trouble ends the source stands at the engine's
// last batch within a bounded number of steps, live where replay covers everything.
func TestModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		tr := trouble{
			replay: rapid.IntRange(0, 4).Draw(t, "replay") > 0,
			deaf:   rapid.Bool().Draw(t, "deaf"), moves: rapid.Bool().Draw(t, "moves"), broken: rapid.Bool().Draw(t, "broken"),
			proxy: rapid.IntRange(0, 3).Draw(t, "proxy") == 0, fills: rapid.IntRange(0, 3).Draw(t, "fills") == 0,
			drops: rapid.IntRange(0, 3).Draw(t, "drops") == 0, late: rapid.IntRange(0, 3).Draw(t, "late") == 0,
		}
		w := newWorld(t, tr, rapid.SampledFrom([]int{3, 50, 1000}).Draw(t, "held"))
		for range rapid.IntRange(1, 150).Draw(t, "steps") {
			w.step()
			w.check()
		}
		w.settle()
	})
}

// boot starts a subscriber, from what the bus has.
func (w *world) boot() {
	w.fence++
	var cp *event.Checkpoint
	from := 0
	if n := len(w.checkpoints); n > 0 {
		older := rapid.IntRange(0, min(1, n-1)).Draw(w.t, "older")
		w.rewound = w.rewound || older > 0
		chosen := w.checkpoints[n-1-older]
		var err error
		if cp, err = w.set.Load(bytes.NewReader(chosen.object)); err != nil {
			w.fatalf("load checkpoint: %v", err)
		}
		from = chosen.stream
	} else {
		w.set.Reset()
	}
	p := recovery.NewPast(0, cp)
	for _, m := range w.stream[from:] {
		if m.status != nil {
			p.Hear(m.status)
		} else if err := p.Follow(w.set, m.fence, m.epoch, m.batches); errors.Is(err, recovery.ErrHole) && w.dropped {
			w.set.Reset()
			lives := p.Ended()
			p = recovery.NewPast(0, nil)
			p.Lives = lives
			w.owner, w.mixed, w.lost, w.motley = nobody, false, false, false
			break
		} else if err != nil {
			w.fatalf("follow the tail: %v", err)
		}
	}
	if w.dropped || w.rewound {
		// What was dropped can't be counted again; and a life that a newer checkpoint had ended may have gone on.
	} else if diff := cmp.Diff(w.ended(p.Epoch), spans(p.Lives)); diff != "" {
		w.fatalf("past lives:\n%s", diff)
	}
	w.ledger, w.epoch, w.past = p.Ledger.Clone(), p.Epoch, p.Lives
	if w.epoch == 0 {
		w.epochs++
		w.epoch = w.epochs
	}
	w.logf("boot: epoch %d, last %d, %v (%s)", w.epoch, p.Ledger.Last, p.State, p.Reason)
	w.link, w.heard, w.reply, w.end = false, nil, nil, false
	w.m = recovery.New(w.cfg)
	w.tell(event.StateRecovering, "taken over by a subscriber")
	w.stored = len(w.stream)
	w.straggle()
	w.act(w.m.Start(w.now, p.Prior()))
	if w.kill < 0 {
		w.checkpoint()
	}
}

// straggle lets the holder before, who does not know that it lost the lease, get something in.
func (w *world) straggle() {
	if !w.late || w.fence == 1 {
		return
	}
	b := event.Batch{
		First: w.ledger.Last + 1, Last: w.ledger.Last + 1, Way: event.Live, Rank: -1,
		Events: []event.Event{{Kind: event.Cleared, Cause: event.ByEngine, Group: event.NoGroup, LoRAID: event.NoLoRAID}},
	}
	w.stream = append(w.stream, message{fence: w.fence - 1, epoch: w.epoch + event.Epoch(rapid.IntRange(0, 1).Draw(w.t, "late life"))<<32, batches: []event.Batch{b}})
}

// ruling returns the messages of the stream that were sent by who held the source then.
func (w *world) ruling() []message {
	var fence event.Fence
	return slices.DeleteFunc(slices.Clone(w.stream), func(m message) bool {
		fence = max(fence, m.fence)
		return m.fence < fence
	})
}

// ended returns the lives before an epoch, as far as they stand in the stream.
func (w *world) ended(epoch event.Epoch) []string {
	var lives []event.PastLife
	last := event.PastLife{TailUnknown: true}
	for _, m := range w.ruling() {
		for i := range m.batches {
			if m.epoch != last.Epoch {
				lives = event.Bury(lives, last)
				last = event.PastLife{Epoch: m.epoch, TailUnknown: true}
			}
			last.Ledger.Count(&m.batches[i])
		}
	}
	if last.Epoch < epoch {
		lives = event.Bury(lives, last)
	}
	return spans(lives)
}

// spans names lives by what is in the stream of them; what was of no use is counted in memory only.
func spans(lives []event.PastLife) []string {
	var s []string
	for _, l := range lives {
		s = append(s, fmt.Sprintf("%d: %d to %d, %d lost, tail unknown: %v", l.Epoch, l.Ledger.First, l.Ledger.Last, l.Ledger.Lost, l.TailUnknown))
	}
	return s
}

// crash kills the subscriber: of what it sent last, only some is stored.
func (w *world) crash() {
	w.kill = -1
	kept := rapid.IntRange(w.stored, len(w.stream)).Draw(w.t, "stored")
	w.logf("killed; %d messages are not stored", len(w.stream)-kept)
	w.stream, w.stored = w.stream[:kept], kept
	w.recall()
	w.pipe = nil
	w.boot()
	if rapid.Bool().Draw(w.t, "connect") {
		w.connect(true)
	}
}

// recall makes anew what is known of the epoch's truth from what is left of the stream.
func (w *world) recall() {
	w.owner, w.mixed, w.lost = nobody, false, false
	var epoch event.Epoch
	for _, m := range w.ruling() {
		for i := range m.batches {
			b := &m.batches[i]
			w.learn(b, m.life, m.epoch != epoch)
			epoch = m.epoch
		}
	}
}

// learn notes whose a batch is.
func (w *world) learn(b *event.Batch, life int, first bool) {
	if first {
		w.owner, w.mixed, w.lost, w.motley = nobody, false, b.First > 0, false
	}
	other := life != nobody && w.owner != nobody && life != w.owner
	w.motley = w.motley || other
	w.mixed = w.mixed || other && !w.empty
	if life != nobody {
		w.owner = life
	}
	w.lost = w.lost || b.Way == event.Lost || b.Way == event.Dropped // which may have told a loss
	if w.empty = len(b.Events) > 0 && b.Events[0].Kind == event.Cleared; w.empty {
		w.mixed = false
	}
}

// act does what the machine decided, as the subscriber does, unless it is killed in between.
func (w *world) act(actions []recovery.Action) {
	for _, a := range slices.Clone(actions) {
		if w.kill > 0 {
			if w.kill--; w.kill == 0 {
				w.crash()
				return
			}
		}
		w.logf("%s", describe(a))
		switch a.Kind {
		case recovery.Apply:
			w.apply(&a)
		case recovery.Lose:
			w.lose(a.First, a.Last, a.Reason, nobody)
		case recovery.NewLife:
			w.newEpoch(a.Reason)
		case recovery.Ask:
			if !w.replay {
				w.fatalf("asked for a replay, and there is no endpoint")
			}
			w.ask(a.First)
		case recovery.Duplicate:
			w.ledger.Duplicates++
		case recovery.Tell:
			w.tell(a.State, a.Reason)
		}
	}
}

func (w *world) newEpoch(reason string) {
	blind := strings.HasPrefix(reason, "one publisher") || strings.HasPrefix(reason, "the replay no longer has") ||
		w.deaf && w.moves && strings.HasPrefix(reason, "sequence") // lay in the socket, and is older than all that a replay had
	if w.owner == len(w.lives)-1 && !w.motley && !blind {
		w.fatalf("a new life was seen, and there was none")
	}
	w.past = event.Bury(w.past, event.PastLife{Epoch: w.epoch, Ledger: w.ledger, TailUnknown: true})
	w.epochs++
	w.epoch = w.epochs
	w.set.Reset()
	w.ledger = event.Ledger{}
	w.owner, w.mixed, w.lost = nobody, false, false
	if rapid.Bool().Draw(w.t, "in time") {
		w.checkpoint()
	}
}

func (w *world) apply(a *recovery.Action) {
	f := a.Frame
	l := w.lives[f.Payload>>32]
	at := int(f.Payload & (1<<32 - 1))
	if l.bad[at] {
		w.ledger.Malformed++
		w.m.Malformed(f, "malformed batch")
		w.lose(f.Seq, f.Seq, "malformed batch", int(f.Payload>>32))
		return
	}
	b := event.Batch{
		First: f.Seq, Last: f.Seq, Way: a.Way, Time: f.Time, Payload: f.Payload, Rank: -1, Events: cloneEvents(l.events[at]),
	}
	w.set.Judge(&b)
	b.Events = cloneEvents(b.Events)
	for i := range b.Events {
		if b.Events[i].Kind == event.Cleared {
			w.m.Cleared(f)
		}
	}
	if w.fills && l.after[at].total() == of(w.set).total() {
		w.m.Filled(f)
	}
	w.publishBatch(b, int(f.Payload>>32))
	if !w.lost && !w.motley && w.owner != nobody {
		if diff := cmp.Diff(w.lives[w.owner].judged[f.Seq], b.Events); diff != "" {
			w.fatalf("batch %d is judged as by nobody who has heard it all:\n%s", f.Seq, diff)
		}
	}
}

func (w *world) lose(first, last event.Seq, reason string, life int) {
	if last < first {
		w.fatalf("an empty range %d to %d", first, last)
	}
	if l := w.life(); strings.HasPrefix(reason, "the replay does not reach") && w.owner == len(w.lives)-1 && int(first) >= l.oldest {
		whole := true
		for i := first; i <= last && int(i) < len(l.frames); i++ {
			whole = whole && l.frames[i].Data != nil
		}
		if whole {
			w.fatalf("%d to %d is given up, and replays have it", first, last)
		}
	}
	w.set.Clear()
	w.publishBatch(event.Batch{
		First: first, Last: last, Way: event.Lost, Reason: reason, Rank: -1,
		Events: []event.Event{{Kind: event.Cleared, Cause: event.ByResync, Group: event.NoGroup, LoRAID: event.NoLoRAID}},
	}, life)
}

// publishBatch publishes a batch of a life.
func (w *world) publishBatch(b event.Batch, life int) {
	w.learn(&b, life, !w.ledger.Started)
	w.ledger.Count(&b)
	if !w.ledger.Balanced() {
		w.fatalf("the ledger does not add up: %+v", w.ledger)
	}
	if w.drops && rapid.IntRange(0, 30).Draw(w.t, "drop") == 0 {
		w.dropped = true
		b.Way, b.Events = event.Dropped, nil
	}
	w.stream = append(w.stream, message{fence: w.fence, epoch: w.epoch, batches: []event.Batch{b}, life: life})
}

func (w *world) tell(state event.State, reason string) {
	w.stream = append(w.stream, message{fence: w.fence, epoch: w.epoch, status: &event.Status{
		Epoch: w.epoch, Fence: w.fence, Seq: w.ledger.Last, State: state, Reason: reason, Ledger: w.ledger.Clone(),
	}})
}

// checkpoint writes one; what it rests on is stored by then.
func (w *world) checkpoint() {
	snap := w.set.Snapshot()
	defer snap.Release()
	cp := event.Checkpoint{
		Source: event.Source{Cluster: "c", Model: "m", Instance: "i", Origin: event.Engine}, Epoch: w.epoch, Fence: w.fence, Seq: w.ledger.Last,
		Digest: snap.Digest, Groups: snap.Groups, Entries: snap.Len, Fullest: snap.Fullest, Ledger: w.ledger.Clone(),
		Recents: slices.Clone(w.m.Recents()), PastLives: w.past,
	}
	cp.State, cp.Reason = w.m.Data()
	var object bytes.Buffer
	if err := event.WriteCheckpoint(&object, &cp, snap.Entries()); err != nil {
		w.fatalf("write checkpoint: %v", err)
	}
	w.stored = len(w.stream)
	w.checkpoints = append(w.checkpoints, kept{object.Bytes(), len(w.stream)})
}

// check compares what the subscriber claims with the truth, and the follower with the subscriber.
func (w *world) check() {
	w.follow()
	state, reason := w.m.Data()
	got := of(w.set)
	truth := copies{}
	if last, known := w.m.Last(); known && w.owner != nobody {
		l := w.lives[w.owner]
		if len(l.after) > 0 {
			truth = l.after[min(int(last), len(l.after)-1)]
		}
	}
	switch state {
	case event.StateLive:
		if diff := cmp.Diff(truth, got); diff != "" || w.mixed {
			w.fatalf("live, and not as the engine is:\n%s", diff)
		}
	case event.StatePartial:
		if !got.within(truth) && !(w.mixed && strings.HasPrefix(reason, "same life")) {
			w.fatalf("partial (%s), and too long:\n%s", reason, cmp.Diff(truth, got))
		}
	case event.StateRecovering:
		if len(got) > 0 {
			w.fatalf("nothing is known of the life, and blocks are")
		}
	default:
		w.fatalf("data are %v", state)
	}
	if w.followed == len(w.stream) && !w.holed && w.at == w.epoch && w.began && w.follower.Digest() != w.set.Digest() {
		w.fatalf("the follower has another set")
	}
}

// follow lets the follower read what is stored.
func (w *world) follow() {
	for ; w.followed < w.stored; w.followed++ {
		m := w.stream[w.followed]
		w.ruler = max(w.ruler, m.fence)
		if m.status != nil || m.fence < w.ruler {
			continue
		}
		for i := range m.batches {
			b := &m.batches[i]
			if m.epoch > w.at {
				w.follower.Reset()
				w.at, w.began, w.holed = m.epoch, false, false
			}
			if w.holed = w.holed || b.Way == event.Dropped; w.holed {
				continue // until another life: it would load a checkpoint
			}
			if m.epoch < w.at || w.began && b.First != w.next {
				w.fatalf("the stream has %d of epoch %d where %d of %d is due", b.First, m.epoch, w.next, w.at)
			}
			w.next, w.began = b.Last+1, true
			if err := w.follower.Apply(b); err != nil {
				w.fatalf("follow: %v", err)
			}
		}
	}
}
