package recovery_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"kvstrata/event"
	"kvstrata/subscriber/recovery"
)

// world is an engine that publishes, loses, restarts and answers replays badly, and one machine that listens to it.
type world struct {
	t       *rapid.T
	m       *recovery.Machine
	now     time.Time
	life    uint64
	history []recovery.Frame // what the present life published
	oldest  int              // first batch that replays still have

	link      bool             // the live socket is connected
	replying  []recovery.Frame // frames of the running reply that are still to come
	end       bool             // its end marker will come
	asking    bool
	replies   int
	log       []string
	lossy     bool
	restarted bool // at least once

	// What the machine made of it.
	epochs   int
	life0    uint64 // life that the present epoch's batches belong to
	anything bool   // the epoch has a batch or a hole
	next     event.Seq
	lost     bool
	cleared  bool // the last thing told was a loss
}

// TestModel drives the machine through any mix of loss, duplication, lossy and endless replays, silence, reconnects and
// restarts. Always: within an epoch every sequence is told once, in order, and applied batches are of one life. When
// the trouble ends and replays reach back, the source stands at the engine's last batch within a bounded number of
// steps, live unless something was lost.
func TestModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		cfg := recovery.DefaultConfig()
		cfg.MaxHeld = rapid.SampledFrom([]int{3, 1000}).Draw(t, "held")
		w := &world{t: t, m: recovery.New(cfg), now: time.Unix(1000, 0), lossy: true}
		w.act(w.m.Start(w.now, nil))
		for range rapid.IntRange(1, 150).Draw(t, "steps") {
			w.step()
		}
		w.settle()
	})
}

// fatalf fails with the last steps told.
func (w *world) fatalf(format string, args ...any) {
	w.t.Helper()
	w.t.Fatalf(format+"\n%s", append(args, strings.Join(w.log[max(0, len(w.log)-80):], "\n"))...)
}

func (w *world) step() {
	switch rapid.SampledFrom([]string{
		"publish", "publish", "publish", "publish", "drop", "repeat", "reply", "reply", "reply", "reply", "tick", "long", "link", "restart", "forget",
	}).Draw(w.t, "step") {
	case "publish":
		f := w.publish()
		if w.link {
			w.live(f)
		}
	case "drop":
		w.publish()
	case "repeat":
		if n := len(w.history); n > 0 && w.link {
			w.live(w.history[max(0, n-1-rapid.IntRange(0, 3).Draw(w.t, "back"))])
		}
	case "reply":
		w.reply()
	case "tick":
		w.pass(300 * time.Millisecond)
	case "long":
		w.pass(6 * time.Second)
	case "link":
		w.connect(!w.link)
	case "restart":
		if rapid.IntRange(0, 3).Draw(w.t, "rarely") == 0 {
			w.restart()
		}
	case "forget":
		if rapid.IntRange(0, 3).Draw(w.t, "rarely") == 0 {
			w.oldest = rapid.IntRange(w.oldest, max(w.oldest, len(w.history)-1)).Draw(w.t, "oldest")
		}
	}
}

func (w *world) publish() recovery.Frame {
	seq := uint64(len(w.history))
	f := recovery.Frame{
		Seq: event.Seq(seq), Time: event.UnixTime(w.now) + event.Time(seq), Payload: w.life<<32 | seq, Data: []byte("batch"),
	}
	w.history = append(w.history, f)
	return f
}

func (w *world) live(f recovery.Frame) {
	w.log = append(w.log, fmt.Sprintf("live %d of life %d", f.Seq, f.Payload>>32))
	w.act(w.m.Live(w.now, f))
}

func (w *world) pass(d time.Duration) {
	w.now = w.now.Add(d)
	w.log = append(w.log, "tick "+d.String())
	w.act(w.m.Tick(w.now))
}

func (w *world) connect(up bool) {
	w.log = append(w.log, fmt.Sprintf("connected: %v", up))
	if w.link = up; up {
		w.act(w.m.Connected(w.now))
	} else {
		w.act(w.m.Disconnected(w.now))
	}
}

// restart ends a life: the connection breaks, and what was under way is gone.
func (w *world) restart() {
	w.connect(false)
	w.now = w.now.Add(50 * time.Millisecond)
	w.life++
	w.history, w.oldest, w.restarted = nil, 0, true
	w.replying, w.end = nil, false
	for range rapid.IntRange(0, 5).Draw(w.t, "head start") {
		w.publish()
	}
	w.connect(true)
}

// reply delivers the next piece of the running reply.
func (w *world) reply() {
	switch {
	case len(w.replying) > 0:
		f := w.replying[0]
		w.log = append(w.log, fmt.Sprintf("replay %d of life %d", f.Seq, f.Payload>>32))
		w.replying = w.replying[1:]
		w.act(w.m.Replayed(w.now, f))
	case w.asking && w.end:
		if w.replies++; w.replies > 10_000 {
			w.fatalf("the machine asks for ever")
		}
		w.log = append(w.log, "end")
		w.asking, w.end = false, false
		w.act(w.m.ReplayEnd(w.now))
	}
}

// act does what the machine decided, and checks it.
func (w *world) act(actions []recovery.Action) {
	actions = slices.Clone(actions)
	for i, a := range actions {
		w.log = append(w.log, fmt.Sprintf("%s life %d", describe(a), a.Frame.Payload>>32))
		switch a.Kind {
		case recovery.Apply:
			life := a.Frame.Payload >> 32
			// Behind a loss everything is forgotten: another life may hide there unseen.
			// And where no replay could prove the life, sequence and time must do: then the source is partial.
			if state, _ := w.m.Data(); w.anything && life != w.life0 && !w.cleared {
				corrected := slices.ContainsFunc(actions[i:], func(a recovery.Action) bool { return a.Kind == recovery.NewLife })
				if state != event.StatePartial && !corrected {
					w.fatalf("a batch of life %d was applied to an epoch of life %d", life, w.life0)
				}
				w.lost = true
			}
			w.tell(a.Frame.Seq, a.Frame.Seq)
			w.life0, w.cleared = life, false
		case recovery.Lose:
			if !w.anything {
				w.fatalf("a loss before anything was known")
			}
			w.tell(a.First, a.Last)
			w.lost, w.cleared = true, true
		case recovery.NewLife:
			if !w.restarted {
				w.fatalf("a new life was seen (%s), and there was none", a.Reason)
			}
			w.epochs++
			w.anything, w.lost = false, false
		case recovery.Ask:
			w.ask(a.First)
		}
	}
}

func (w *world) tell(first, last event.Seq) {
	if w.anything && first != w.next {
		w.fatalf("sequence %d was told after %d", first, w.next-1)
	}
	if last < first {
		w.fatalf("an empty range %d to %d", first, last)
	}
	if !w.anything {
		w.lost = first > 0
	}
	w.anything, w.next = true, last+1
}

// ask makes the reply: everything from a sequence on that is still there; while the world is lossy, with holes, with a
// missing end, or not at all.
func (w *world) ask(from event.Seq) {
	w.replying, w.end, w.asking = nil, true, true
	if w.lossy && rapid.IntRange(0, 5).Draw(w.t, "dead") == 0 {
		w.end = false
		return
	}
	for i := max(int(min(from, 1<<30)), w.oldest); i < len(w.history); i++ {
		// A router drops what exceeds its high-water mark, so never the first.
		if w.lossy && len(w.replying) > 0 && rapid.IntRange(0, 4).Draw(w.t, "lose") == 0 {
			continue
		}
		w.replying = append(w.replying, w.history[i])
	}
	if w.lossy {
		w.end = rapid.IntRange(0, 4).Draw(w.t, "end") > 0
	}
}

// settle ends the trouble, and gives the machine so many steps to come to rest.
func (w *world) settle() {
	w.lossy = false
	if !w.link {
		w.connect(true)
	}
	w.live(w.publish())
	for range 60 {
		for w.asking && (len(w.replying) > 0 || w.end) {
			w.reply()
		}
		w.pass(6 * time.Second)
	}
	w.live(w.publish())
	for w.asking && (len(w.replying) > 0 || w.end) {
		w.reply()
	}
	state, reason := w.m.State(w.now)
	last, known := w.m.Last()
	want := event.StateLive
	if w.lost || strings.HasPrefix(reason, "same life") { // no replay proved it, while replays failed
		want = event.StatePartial
	}
	if !known || int(last) != len(w.history)-1 || state != want || w.life0 != w.life {
		w.fatalf("at rest: %v (%s) at sequence %d of life %d; want %v at %d of %d", state, reason, last, w.life0, want,
			len(w.history)-1, w.life)
	}
}
