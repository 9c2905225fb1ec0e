package web_test

import (
	"encoding/json"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"kvstrata/event"
	"kvstrata/web"
)

var (
	prefill = event.Source{Cluster: "default", Model: "demo/llama-sim", Instance: "prefill-0", Origin: event.Engine}
	decode  = event.Source{Cluster: "default", Model: "demo/llama-sim", Instance: "decode-0", Origin: event.Engine}
)

// message is one live batch of a source.
func message(s event.Source, events ...event.Event) *event.Message {
	return &event.Message{Source: s, Epoch: 1, Batches: []event.Batch{{First: 7, Last: 7, Way: event.Live, Events: events}}}
}

// run is an event over blocks with these effects.
func run(kind event.Kind, effects ...int8) event.Event {
	ev := event.Event{Kind: kind, Tier: event.GPU, Group: event.NoGroup, LoRAID: event.NoLoRAID}
	for i, effect := range effects {
		ev.Blocks = append(ev.Blocks, event.Block{
			Hash: event.IntHash(uint64(i + 1)), Prefix: event.PrefixHash(i + 0x101), Effect: effect, Copies: -1, Age: -1,
		})
	}
	return ev
}

func remote(ev event.Event) event.Event {
	ev.Locality = event.Remote
	return ev
}

func TestCounts(t *testing.T) {
	lost := &event.Message{Source: prefill, Batches: []event.Batch{{
		First: 8, Last: 20, Way: event.Lost, Events: []event.Event{{Kind: event.Cleared, Cause: event.ByResync}},
	}}}
	tests := []struct {
		name string
		m    *event.Message
		want web.Counts
	}{
		{"stored", message(prefill, run(event.Stored, 1, 1, 1)), web.Counts{Stored: 3}},
		{"a run that only names", message(prefill, run(event.Stored, 1), run(event.Stored, 0, 0)), web.Counts{Stored: 1}},
		{"a full report that tells again", message(prefill, run(event.Stored, 0, 1, 0)), web.Counts{Stored: 1}},
		{"evicted", message(prefill, run(event.Evicted, -1, -1)), web.Counts{Evicted: 2}},
		{"evicted, stored before we listened", message(prefill, run(event.Evicted, 0, -1)), web.Counts{Evicted: 1}},
		{"elsewhere", message(prefill, remote(run(event.Stored, 0)), remote(run(event.Evicted, 0))), web.Counts{}},
		{"loaded", message(prefill, run(event.Loaded, 0, 0)), web.Counts{Loaded: 2}},
		{"lost", lost, web.Counts{}},
		{"all", message(prefill, run(event.Evicted, -1), run(event.Stored, 1), run(event.Loaded, 0)), web.Counts{Stored: 1, Evicted: 1, Loaded: 1}},
	}
	for _, test := range tests {
		r := web.NewRates(time.Now)
		r.Observe(test.m)
		of, _ := r.Source(prefill)
		if r.Total() != test.want || of != test.want {
			t.Errorf("%s: fleet %+v, source %+v; want %+v", test.name, r.Total(), of, test.want)
		}
	}
}

// points returns the documents of the panel.
func points(r *web.Rates, now time.Time) map[string]web.Counts {
	docs := make(map[string]web.Counts)
	r.Points().Collect(now, func(key string, doc any) {
		var c web.Counts
		if err := json.Unmarshal(doc.(json.RawMessage), &c); err != nil {
			panic(err)
		}
		docs[key] = c
	})
	return docs
}

func TestRates(t *testing.T) {
	now := time.Unix(1_800_000_000, 0)
	r := web.NewRates(func() time.Time { return now })
	stored := func(n int) *event.Message {
		effects := make([]int8, n)
		for i := range effects {
			effects[i] = 1
		}
		return message(prefill, run(event.Stored, effects...))
	}
	rate := func() float64 {
		_, rate := r.Source(prefill)
		return rate.Stored
	}
	r.Observe(stored(10))
	if got := rate(); got != 0 {
		t.Errorf("rate %v within the first second; want 0: it is not over", got)
	}
	for i, want := range []float64{2, 2, 2, 2, 2, 0, 0} {
		now = now.Add(time.Second)
		if got := rate(); got != want {
			t.Errorf("rate %v after %d s; want %v", got, i+1, want)
		}
	}
	now = now.Add(900 * time.Millisecond)
	r.Observe(stored(5))
	now = now.Add(100 * time.Millisecond)
	r.Observe(stored(15))
	if got := rate(); got != 1 {
		t.Errorf("rate %v; want 1: of the second before", got)
	}
	now = now.Add(4 * time.Second)
	if got := rate(); got != 4 {
		t.Errorf("rate %v; want 4", got)
	}
	if total, other := r.Total().Stored, count(r, decode); total != 30 || other != (web.Counts{}) {
		t.Errorf("total %d, of another source %+v", total, other)
	}
	want := map[string]web.Counts{
		"point/1800000000": {Stored: 10}, "point/1800000007": {Stored: 5}, "point/1800000008": {Stored: 15},
	}
	if diff := cmp.Diff(want, points(r, now)); diff != "" {
		t.Errorf("points (-want +got):\n%s", diff)
	}
	delete(want, "point/1800000000")
	if diff := cmp.Diff(want, points(r, time.Unix(1_800_000_300, 0))); diff != "" {
		t.Errorf("points five minutes later (-want +got):\n%s", diff)
	}
	now = time.Unix(1_800_000_300, 0)
	r.Observe(stored(1)) // in the place of the first second
	want["point/1800000300"] = web.Counts{Stored: 1}
	if diff := cmp.Diff(want, points(r, now)); diff != "" {
		t.Errorf("points when the ring has come round (-want +got):\n%s", diff)
	}
}

func count(r *web.Rates, s event.Source) web.Counts {
	c, _ := r.Source(s)
	return c
}

// TestRatesAgainstLines compares all that rates tell with a count of the lines of `kvstrata tail`, under a clock that moves
// by random steps.
func TestRatesAgainstLines(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		now := time.Unix(1_800_000_000, 0)
		r := web.NewRates(func() time.Time { return now })
		var fleet web.Counts
		bySecond := make(map[int64]web.Counts)
		bySource := make(map[event.Source]map[int64]web.Counts)
		for range rapid.IntRange(1, 200).Draw(t, "messages") {
			now = now.Add(time.Duration(rapid.IntRange(0, 4000).Draw(t, "ms")) * time.Millisecond)
			source := rapid.SampledFrom([]event.Source{prefill, decode}).Draw(t, "source")
			kind := rapid.SampledFrom([]event.Kind{event.Stored, event.Evicted, event.Loaded}).Draw(t, "kind")
			effects := rapid.SliceOfN(rapid.SampledFrom([]int8{0, 1, -1}), 0, 5).Draw(t, "effects")
			m := message(source, run(kind, effects...))
			r.Observe(m)
			var c web.Counts
			for _, line := range m.Lines() {
				for _, b := range line.Blocks {
					switch {
					case line.Kind == event.Stored && b.Effect == 1:
						c.Stored++
					case line.Kind == event.Evicted && b.Effect == -1:
						c.Evicted++
					case line.Kind == event.Loaded:
						c.Loaded++
					}
				}
			}
			fleet = sum(fleet, c)
			bySecond[now.Unix()] = sum(bySecond[now.Unix()], c)
			if bySource[source] == nil {
				bySource[source] = make(map[int64]web.Counts)
			}
			bySource[source][now.Unix()] = sum(bySource[source][now.Unix()], c)
		}
		if diff := cmp.Diff(fleet, r.Total()); diff != "" {
			t.Fatalf("fleet (-want +got):\n%s", diff)
		}
		want := make(map[string]web.Counts)
		for second, c := range bySecond {
			if second > now.Unix()-300 && c != (web.Counts{}) {
				want[fmt.Sprint("point/", second)] = c
			}
		}
		if diff := cmp.Diff(want, points(r, now)); diff != "" {
			t.Fatalf("points (-want +got):\n%s", diff)
		}
		for source, seconds := range bySource {
			var total, last web.Counts
			for second, c := range seconds {
				total = sum(total, c)
				if second >= now.Unix()-5 && second < now.Unix() {
					last = sum(last, c)
				}
			}
			got, rate := r.Source(source)
			if got != total || rate.Stored != float64(last.Stored)/5 || rate.Evicted != float64(last.Evicted)/5 || rate.Loaded != float64(last.Loaded)/5 {
				t.Fatalf("%v: %+v at %+v; want %+v, over 5 s %+v", source, got, rate, total, last)
			}
		}
	})
}

func sum(a, b web.Counts) web.Counts {
	return web.Counts{Stored: a.Stored + b.Stored, Evicted: a.Evicted + b.Evicted, Loaded: a.Loaded + b.Loaded}
}

// TestPointDocuments checks that the panel's own JSON is what the type says.
func TestPointDocuments(t *testing.T) {
	r := web.NewRates(time.Now)
	r.Observe(message(prefill, run(event.Stored, 1, 1), run(event.Evicted, -1), run(event.Loaded, 0, 0, 0)))
	want, err := json.Marshal(r.Total())
	if err != nil {
		t.Fatal(err)
	}
	r.Points().Collect(time.Now(), func(key string, doc any) {
		if diff := cmp.Diff(string(want), string(doc.(json.RawMessage))); diff != "" {
			t.Errorf("%s (-want +got):\n%s", key, diff)
		}
	})
}

// TestRatesWhileRead reads everything while one goroutine observes: for the race detector.
func TestRatesWhileRead(t *testing.T) {
	r := web.NewRates(time.Now)
	var done atomic.Bool
	go func() {
		defer done.Store(true)
		m := message(prefill, run(event.Stored, 1, 1))
		for range 5000 {
			r.Observe(m)
		}
	}()
	for last := uint64(0); !done.Load(); {
		total, now := r.Total().Stored, time.Now()
		if total < last {
			t.Fatalf("the total fell from %d to %d", last, total)
		}
		last = total
		points(r, now)
		r.Source(prefill)
	}
	if got := r.Total().Stored; got != 10000 {
		t.Errorf("%d stored; want 10000", got)
	}
}
