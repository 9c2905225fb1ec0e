package subscriber_test

import (
	"strings"
	"testing"

	"kvstrata/event"
	"kvstrata/indexer/prefix"
	"kvstrata/subscriber"
)

// A Mooncake master tells no evictions, so what it told is shown, and left out of lookups.
func TestMooncakeIsNotCountedOn(t *testing.T) {
	r, e := newRoad(t), startEngine(t)
	cfg := e.config("store")
	cfg.Replay, cfg.Dialect, cfg.AsSet, cfg.Source.Origin = "", subscriber.DialectMooncake, true, event.Store
	stop := r.subscribe(cfg)
	eventually(t, "the store is heard", func() bool {
		e.raw(true, pack([]any{1789095808839, []any{map[string]any{"event_type": "stored", "medium": "cpu", "seq_hashes": []any{7}}}, 0}))
		s := r.info("store")
		return s.Started && s.State == event.StateStale && strings.Contains(s.Reason, "no evictions")
	})
	s := r.info("store")
	if s.Dialect != "mooncake" || len(s.Resident) != 1 || s.Resident[0].Copies != 1 {
		t.Errorf("dialect %q, resident %+v: want the one block once", s.Dialect, s.Resident)
	}
	stop()
	late := prefix.New(prefix.DefaultConfig()) // begins from the checkpoint
	r.consume(late)
	eventually(t, "who comes late does not count on it either", func() bool {
		all := late.Sources()
		return len(all) == 1 && all[0].Started && all[0].State == event.StateStale
	})
	r.subscribe(cfg)
	eventually(t, "nor after a restart", func() bool { return r.info("store").Reason == s.Reason && r.info("store").Fence > s.Fence })
}

// vLLM's offloading tells tokens and no extra keys: a salted block must not get the name that its tokens alone would give it.
func TestOffloadedBlocksKeepTheirSalt(t *testing.T) {
	r, e := newRoad(t), startEngine(t)
	sink := newNames()
	r.consume(sink)
	r.subscribe(e.config("a"))
	salted := storing(1, 1)
	salted.Events[0].ExtraKeys = [][]byte{keys("salt")}
	told, unknown := storing(1, 1), storing(2, 2)
	told.Events[0].Tier, unknown.Events[0].Tier = event.CPU, event.CPU
	unknown.Events[0].HasParent = false // of another salted prompt, whose device blocks nobody told
	e.publish(salted, told, unknown)
	r.await("a", 2, event.StateLive)
	if n := r.matched("a"); n > 0 {
		t.Errorf("%d blocks match a prompt without salt", n)
	}
	want := event.Prefixes(nil, tokens(1), 16, event.Hasher{}.Seed("", "salt"), false)[0]
	eventually(t, "the offloaded block has the name of the device's", func() bool {
		got, ok := sink.name(event.IntHash(1))
		return ok && got == want
	})
	eventually(t, "the other block has none", func() bool {
		got, ok := sink.name(event.IntHash(2))
		return ok && got == 0
	})
}
