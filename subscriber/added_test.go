package subscriber_test

import (
	"errors"
	"testing"

	"kvstrata/event"
	"kvstrata/subscriber"
)

// An engine that is added while the subscriber runs is heard like any other, and one that is removed leaves nothing.
func TestEnginesComeAndGo(t *testing.T) {
	r, first, second := newRoad(t), startEngine(t), startEngine(t)
	sub := r.subscriber(first.config("a"))
	first.publish(storing(1, 2))
	second.publish(storing(1, 4))
	r.await("a", 0, event.StateLive)
	if err := sub.Add(second.config("b")); err != nil {
		t.Fatal(err)
	}
	before := r.await("b", 0, event.StateLive)
	if got := r.matched("b"); got != 4 {
		t.Errorf("%d blocks matched, want 4", got)
	}
	for name, want := range map[string]error{"a": subscriber.ErrFollowed, "b": subscriber.ErrFollowed} {
		if err := sub.Add(second.config(name)); !errors.Is(err, want) {
			t.Errorf("%s again: %v", name, err)
		}
	}
	if err := sub.Remove(t.Context(), first.config("a").Source); !errors.Is(err, subscriber.ErrConfigured) {
		t.Errorf("a configured engine: %v", err)
	}
	if err := sub.Remove(t.Context(), first.config("c").Source); !errors.Is(err, subscriber.ErrNotFollowed) {
		t.Errorf("an unknown engine: %v", err)
	}

	for range 3 {
		if err := sub.Remove(t.Context(), second.config("b").Source); err != nil {
			t.Fatal(err)
		}
		eventually(t, "withdrawn", func() bool { s := r.info("b"); return s.State == event.StateGone && s.Epoch > before.Epoch })
		if s := r.info("b"); len(s.Resident) > 0 || s.Started {
			t.Errorf("a withdrawn source holds %+v", s.Resident)
		}
		if err := sub.Add(second.config("b")); err != nil {
			t.Fatal(err)
		}
		eventually(t, "live again", func() bool { s := r.info("b"); return s.State == event.StateLive && s.Started })
		if got := r.matched("b"); got != 4 {
			t.Errorf("%d blocks matched after a return, want the 4 of the replay", got)
		}
		before = r.info("b")
	}
	if got := r.matched("a"); got != 2 {
		t.Errorf("the other engine: %d blocks matched, want 2", got)
	}
}

// Who asks for the past of an engine that was withdrawn, and comes back without replay, must not get its old blocks.
func TestAWithdrawnEngineComesBackEmpty(t *testing.T) {
	r, e := newRoad(t), startEngine(t)
	sub := r.subscriber()
	cfg := e.config("a")
	if err := sub.Add(cfg); err != nil {
		t.Fatal(err)
	}
	e.publish(storing(1, 3))
	r.await("a", 0, event.StateLive)
	if err := sub.Remove(t.Context(), cfg.Source); err != nil {
		t.Fatal(err)
	}
	cfg.Replay = ""
	if err := sub.Add(cfg); err != nil {
		t.Fatal(err)
	}
	eventually(t, "what comes next", func() bool {
		e.publish(storing(9, 9))
		s := r.info("a")
		return s.Started && s.State == event.StatePartial
	})
	if got := r.matched("a"); got != 0 {
		t.Errorf("%d blocks matched of a life that ended", got)
	}
}

func TestAddedEnginesAreBounded(t *testing.T) {
	r, e := newRoad(t), startEngine(t)
	r.cfg.MaxAdded = 2
	sub := r.subscriber(e.config("given"))
	add := func(name string) error { return sub.Add(e.config(name)) }
	if err := errors.Join(add("a"), add("b")); err != nil {
		t.Fatal(err)
	}
	if err := add("c"); !errors.Is(err, subscriber.ErrTooMany) {
		t.Errorf("one too many: %v", err)
	}
	if err := sub.Remove(t.Context(), e.config("a").Source); err != nil {
		t.Fatal(err)
	}
	if err := add("c"); err != nil {
		t.Errorf("in the room that was made: %v", err)
	}
	if _, ok := sub.Followed(e.config("c").Source); !ok {
		t.Error("the added engine is not followed")
	}
	eventually(t, "ready", sub.Ready)
}
