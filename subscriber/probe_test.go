package subscriber_test

import (
	"context"
	"slices"
	"testing"
	"time"

	"kvstrata/event"
	"kvstrata/subscriber"
)

// probe hears an engine for a while.
func probe(t *testing.T, cfg subscriber.EngineConfig, during time.Duration) *subscriber.Report {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), during)
	defer cancel()
	conf := subscriber.DefaultConfig()
	conf.AllowInvertible = true
	r, err := subscriber.Probe(ctx, conf, cfg)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func TestProbe(t *testing.T) {
	e := startEngine(t)
	e.publish(storing(1, 3), storing(4, 5), evicting(5))
	cfg := e.config("a")
	cfg.Topic = "another"
	stop := make(chan struct{})
	done := make(chan struct{})
	go func() { // something to hear, whenever the probe is there
		defer close(done)
		for n := 6; ; n++ {
			e.publish(storing(n, n))
			select {
			case <-stop:
				return
			case <-time.After(20 * time.Millisecond):
			}
		}
	}()
	r := probe(t, cfg, 2*time.Second)
	close(stop)
	<-done
	st := r.Status
	if !r.Connected || !r.Replays || r.Live == 0 || !slices.Equal(r.Topics, []string{"topic"}) || !r.HasBehind {
		t.Errorf("report %+v", r)
	}
	if !st.Ledger.Started || st.Ledger.First != 0 || st.Ledger.Lost > 0 || st.Dialect != "vllm" || len(st.Contract.Fields) == 0 {
		t.Errorf("status %+v", st)
	}

	other := startEngine(t)
	differently := storing(1, 3)
	for i := range differently.Events[0].Blocks {
		differently.Events[0].Blocks[i].Hash = event.IntHash(uint64(100 + i))
	}
	other.publish(differently)
	if common, differ := r.NamesDiffer(probe(t, other.config("b"), time.Second)); common != 3 || differ != 3 {
		t.Errorf("%d common blocks, %d with two names; want 3 and 3", common, differ)
	}
}

func TestProbeOfSilence(t *testing.T) {
	away := startEngine(t).config("a")
	away.Replay = freeAddress(t)
	if r := probe(t, away, 500*time.Millisecond); !r.Connected || r.Replays || r.Status.Ledger.Started {
		t.Errorf("a replay endpoint where nobody is: %+v", r)
	}
	away.Endpoint = freeAddress(t)
	if r := probe(t, away, 300*time.Millisecond); r.Connected {
		t.Errorf("an address where nobody is: %+v", r)
	}
}
