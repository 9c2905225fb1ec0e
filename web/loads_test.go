package web_test

import (
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"kvstrata/event"
	"kvstrata/web"
)

// loadsDoc is the document "loads", as docs/api.md has it.
type loadsDoc struct {
	Window int `json:"window_seconds"`
	told
	Pairs     []pairDoc `json:"pairs"`
	More      int       `json:"more"`
	Forgotten uint64    `json:"forgotten"`
	Slowest   []slowDoc `json:"slowest"`
	Seconds   struct {
		First int64    `json:"first"`
		Bytes []uint64 `json:"bytes"`
	} `json:"seconds"`
}

type told struct {
	Loads   uint64   `json:"loads"`
	Blocks  uint64   `json:"blocks"`
	Bytes   uint64   `json:"bytes"`
	Last    int64    `json:"last"`
	Rate    moved    `json:"rate"`
	Latency *latency `json:"latency_ms"`
	Speed   uint64   `json:"speed"`
}

type moved struct {
	Loads  float64 `json:"loads"`
	Blocks float64 `json:"blocks"`
	Bytes  float64 `json:"bytes"`
}

type latency struct{ P50, P99, Max float64 }

type way struct {
	From     string `json:"from"`
	FromTier string `json:"from_tier"`
	To       string `json:"to"`
	ToTier   string `json:"to_tier"`
	ID       string `json:"id"`
}

type pairDoc struct {
	way
	told
}

type slowDoc struct {
	way
	Time     int64   `json:"time"`
	Request  string  `json:"request"`
	Blocks   int     `json:"blocks"`
	Bytes    uint64  `json:"bytes"`
	Duration float64 `json:"duration_ms"`
}

func connectorOf(instance string) event.Source {
	return event.Source{Cluster: "default", Model: "demo/llama-sim", Instance: instance, Origin: event.Connector}
}

// load is a LOADED of some blocks.
func load(peer, request string, blocks int, bytes uint64, took time.Duration) event.Event {
	ev := run(event.Loaded, make([]int8, blocks)...)
	ev.Load = event.Load{From: event.CPU, Peer: peer, Request: request, Bytes: bytes, Duration: took}
	return ev
}

func loadsAt(t interface{ Fatal(...any) }, l *web.Loads, now time.Time) (doc loadsDoc) {
	l.Panel().Collect(now, func(key string, v any) {
		data, err := json.Marshal(v)
		if err != nil || key != "loads" {
			t.Fatal(key, err)
		}
		if err := json.Unmarshal(data, &doc); err != nil {
			t.Fatal(err)
		}
	})
	return doc
}

func TestLoads(t *testing.T) {
	const start = 1_800_000_000
	to := connectorOf("decode-0")
	id := to.Tokens()
	between := way{From: "prefill-0", FromTier: "CPU", To: "decode-0", ToTier: "GPU", ID: id}
	idle := loadsDoc{Window: 10, Pairs: []pairDoc{}, Slowest: []slowDoc{}}
	idle.Seconds.Bytes = []uint64{}
	one := told{Loads: 1, Blocks: 4, Bytes: 1000, Last: start * 1000}
	busy := one
	busy.Rate, busy.Latency, busy.Speed = moved{0.1, 0.4, 100}, &latency{2, 2, 2}, 500_000
	slow := slowDoc{way: between, Time: start * 1000, Request: "r1", Blocks: 4, Bytes: 1000, Duration: 2}
	tests := []struct {
		name  string
		m     *event.Message
		after int64 // seconds
		want  func(*loadsDoc)
	}{
		{"nothing", message(to), 1, func(*loadsDoc) {}},
		{"what is no load", message(to, run(event.Stored, 1, 1), run(event.Evicted, -1)), 1, func(*loadsDoc) {}},
		{"a load, its second not over", message(to, load("prefill-0", "r1", 4, 1000, 2*time.Millisecond)), 0, func(d *loadsDoc) {
			d.told, d.Pairs, d.Slowest = one, []pairDoc{{between, one}}, []slowDoc{slow}
		}},
		{"a load", message(to, load("prefill-0", "r1", 4, 1000, 2*time.Millisecond)), 1, func(d *loadsDoc) {
			d.told, d.Pairs, d.Slowest = busy, []pairDoc{{between, busy}}, []slowDoc{slow}
			d.Seconds.First, d.Seconds.Bytes = start, []uint64{1000}
		}},
		{"a load, eleven seconds ago", message(to, load("prefill-0", "r1", 4, 1000, 2*time.Millisecond)), 11, func(d *loadsDoc) {
			d.told, d.Pairs, d.Slowest = one, []pairDoc{{between, one}}, []slowDoc{slow}
			d.Seconds.First, d.Seconds.Bytes = start, []uint64{1000}
		}},
		{"a load, six minutes ago", message(to, load("prefill-0", "r1", 4, 1000, 2*time.Millisecond)), 360, func(d *loadsDoc) {
			d.told, d.Pairs = one, []pairDoc{{between, one}}
		}},
		{"a load without peer or duration", message(to, load("", "", 4, 1000, 0)), 1, func(d *loadsDoc) {
			unnamed, t := between, one
			unnamed.From, t.Rate = "", moved{0.1, 0.4, 100}
			d.told, d.Pairs = t, []pairDoc{{unnamed, t}}
			d.Seconds.First, d.Seconds.Bytes = start, []uint64{1000}
		}},
		{"a duration that can't be", message(to, load("prefill-0", "r1", 4, 1000, math.MaxInt64)), 11, func(d *loadsDoc) {
			d.told, d.Pairs = one, []pairDoc{{between, one}}
			d.Seconds.First, d.Seconds.Bytes = start, []uint64{1000}
		}},
	}
	for _, test := range tests {
		now := time.Unix(start, 0)
		l := web.NewLoads(func() time.Time { return now }, 8)
		l.Observe(test.m)
		want := idle
		test.want(&want)
		if diff := cmp.Diff(want, loadsAt(t, l, now.Add(time.Duration(test.after)*time.Second)), cmp.AllowUnexported(loadsDoc{}, pairDoc{}, slowDoc{})); diff != "" {
			t.Errorf("%s (-want +got):\n%s", test.name, diff)
		}
	}
}

// TestLoadsAreBounded feeds names that are all different and long, and numbers as big as they get.
func TestLoadsAreBounded(t *testing.T) {
	now := time.Unix(1_800_000_000, 0)
	l := web.NewLoads(func() time.Time { return now }, 300)
	for i := range 1000 {
		ev := load(fmt.Sprint(i, "-", strings.Repeat("é", 400)), strings.Repeat("r", 9000), 1, math.MaxUint64, 24*time.Hour)
		ev.Load.From, ev.Tier = event.Tier(strings.Repeat("T", 500)), event.Tier(strings.Repeat("U", 500))
		l.Observe(message(connectorOf("decode-0"), ev))
	}
	now = now.Add(time.Second)
	doc := loadsAt(t, l, now)
	if len(doc.Pairs) != 200 || doc.More != 100 || doc.Forgotten != 700 || doc.Loads != 1000 || doc.Bytes != math.MaxUint64 || len(doc.Slowest) != 10 {
		t.Errorf("%d pairs, %d more, %d forgotten; %d loads of %d bytes; %d slowest", len(doc.Pairs), doc.More, doc.Forgotten, doc.Loads, doc.Bytes, len(doc.Slowest))
	}
	for _, p := range doc.Pairs {
		if n := len(p.From) + len(p.FromTier) + len(p.ToTier); n > 600 || !strings.HasSuffix(p.From, "é…") || !strings.HasPrefix(p.From, "9") && !strings.HasPrefix(p.From, "8") {
			t.Fatalf("a pair from %q with %d bytes of names", p.From, n)
		}
	}
	if len(doc.Slowest[0].Request) > 200 || doc.Slowest[0].Duration != 86_400_000 {
		t.Errorf("slowest: %+v", doc.Slowest[0])
	}
}

// TestLoadsForgetTheOldest checks which pair makes room, and that its return begins anew.
func TestLoadsForgetTheOldest(t *testing.T) {
	now := time.Unix(1_800_000_000, 0)
	l := web.NewLoads(func() time.Time { return now }, 2)
	for _, peer := range []string{"a", "b", "a", "c", "b"} { // c takes b's place, b then a's
		l.Observe(message(connectorOf("decode-0"), load(peer, "", 1, 10, time.Second)))
		now = now.Add(time.Second)
	}
	doc := loadsAt(t, l, now)
	got := map[string]uint64{}
	for _, p := range doc.Pairs {
		got[p.From] = p.Loads
	}
	if diff := cmp.Diff(map[string]uint64{"b": 1, "c": 1}, got); diff != "" || doc.Forgotten != 2 || doc.Loads != 5 {
		t.Errorf("%d forgotten, %d loads, pairs (-want +got):\n%s", doc.Forgotten, doc.Loads, diff)
	}
}

// seen is a load of the model.
type seen struct {
	way
	at       time.Time
	request  string
	blocks   int
	bytes    uint64
	duration time.Duration
}

// TestLoadsAgainstModel compares the document with one that is made from the list of all loads.
func TestLoadsAgainstModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		now := time.Unix(1_800_000_000, 0)
		l := web.NewLoads(func() time.Time { return now }, 100)
		var all []seen
		for i := range rapid.IntRange(0, 150).Draw(t, "messages") {
			now = now.Add(time.Duration(rapid.OneOf(rapid.IntRange(0, 900), rapid.IntRange(0, 30_000)).Draw(t, "ms")) * time.Millisecond)
			to := connectorOf(rapid.SampledFrom([]string{"decode-0", "decode-1"}).Draw(t, "to"))
			m := message(to, run(event.Stored, 1))
			for j := range rapid.IntRange(0, 5).Draw(t, "loads") {
				s := seen{
					way:     way{From: rapid.SampledFrom([]string{"prefill-0", "redis://a:6379", ""}).Draw(t, "peer"), FromTier: "CPU", To: to.Instance, ToTier: "GPU", ID: to.Tokens()},
					at:      now,
					request: fmt.Sprint(i, "/", j), blocks: rapid.IntRange(0, 4).Draw(t, "blocks"), bytes: rapid.Uint64Range(0, 1e12).Draw(t, "bytes"),
					duration: time.Duration(rapid.OneOf(rapid.Int64Range(0, 3), rapid.Int64Range(0, 1e7), rapid.Int64Range(0, 2e13)).Draw(t, "took")),
				}
				all = append(all, s)
				m.Batches[0].Events = append(m.Batches[0].Events, load(s.From, s.request, s.blocks, s.bytes, s.duration))
			}
			l.Observe(m)
		}
		now = now.Add(time.Duration(rapid.IntRange(0, 20_000).Draw(t, "later")) * time.Millisecond)
		got := loadsAt(t, l, now)
		compareTold(t, "fleet", all, got.told, now)
		ways := map[way][]seen{}
		for _, s := range all {
			ways[s.way] = append(ways[s.way], s)
		}
		if len(ways) != len(got.Pairs) || got.More != 0 || got.Forgotten != 0 {
			t.Fatalf("%d pairs, %d more, %d forgotten; want %d", len(got.Pairs), got.More, got.Forgotten, len(ways))
		}
		for i, p := range got.Pairs {
			compareTold(t, fmt.Sprint(p.way), ways[p.way], p.told, now)
			if i > 0 && p.Rate.Bytes > got.Pairs[i-1].Rate.Bytes {
				t.Fatalf("pair %d moves more than the one before it", i)
			}
		}
		compareSlowest(t, all, got.Slowest, now)
		seconds := map[int64]uint64{}
		for _, s := range all {
			if age := now.Unix() - s.at.Unix(); age >= 1 && age <= 300 && s.bytes > 0 {
				seconds[s.at.Unix()] += s.bytes
			}
		}
		shown := map[int64]uint64{}
		for i, n := range got.Seconds.Bytes {
			if n > 0 {
				shown[got.Seconds.First+int64(i)] = n
			} else if i == 0 || i == len(got.Seconds.Bytes)-1 {
				t.Fatal("the seconds begin or end with an empty one")
			}
		}
		if diff := cmp.Diff(seconds, shown); diff != "" {
			t.Fatalf("seconds (-want +got):\n%s", diff)
		}
	})
}

func compareTold(t *rapid.T, who string, loads []seen, got told, now time.Time) {
	want := told{}
	var took []time.Duration
	var timedBytes, ran float64
	for _, s := range loads {
		want.Loads++
		want.Blocks += uint64(s.blocks)
		want.Bytes += s.bytes
		want.Last = s.at.UnixMilli()
		if age := now.Unix() - s.at.Unix(); age < 1 || age > 10 {
			continue
		}
		want.Rate.Loads++
		want.Rate.Blocks += float64(s.blocks)
		want.Rate.Bytes += float64(s.bytes)
		if s.duration > 0 {
			took = append(took, s.duration)
			timedBytes += float64(s.bytes)
			ran += s.duration.Seconds()
		}
	}
	want.Rate.Loads /= 10
	want.Rate.Blocks /= 10
	want.Rate.Bytes /= 10
	want.Latency, want.Speed = got.Latency, got.Speed
	if diff := cmp.Diff(want, got); diff != "" {
		t.Fatalf("%s (-want +got):\n%s", who, diff)
	}
	if len(took) == 0 {
		if got.Latency != nil || got.Speed != 0 {
			t.Fatalf("%s: latencies %v, speed %v of no load", who, got.Latency, got.Speed)
		}
		return
	}
	slices.Sort(took)
	const rounding = 0.000_501 // of milliseconds
	longest := took[len(took)-1].Seconds() * 1e3
	for _, q := range []struct{ share, got float64 }{{0.5, got.Latency.P50}, {0.99, got.Latency.P99}} {
		exact := took[int(math.Ceil(q.share*float64(len(took))))-1].Seconds() * 1e3
		most := min(max(exact*1.125, 0.001_024), longest)
		if exact > 1<<40/1e6 { // beyond the last bucket
			most = longest
		}
		if q.got < exact-rounding || q.got > most+rounding {
			t.Fatalf("%s: quantile %v is %v; want from %v to %v", who, q.share, q.got, exact, most)
		}
	}
	if math.Abs(got.Latency.Max-longest) > rounding {
		t.Fatalf("%s: at most %v; want %v", who, got.Latency.Max, longest)
	}
	if speed := min(timedBytes/ran, math.MaxInt64); math.Abs(float64(got.Speed)-speed) > 1+speed*1e-9 {
		t.Fatalf("%s: speed %v; want %v", who, got.Speed, speed)
	}
}

func compareSlowest(t *rapid.T, all []seen, got []slowDoc, now time.Time) {
	var recent []seen
	for _, s := range all {
		if s.at.Unix() > now.Unix()-60 && s.duration > 0 {
			recent = append(recent, s)
		}
	}
	slices.SortStableFunc(recent, func(a, b seen) int { return int(min(max(b.duration-a.duration, -1), 1)) })
	want := []slowDoc{}
	for _, s := range recent[:min(len(recent), 10)] {
		want = append(want, slowDoc{
			way: s.way, Time: s.at.UnixMilli(), Request: s.request, Blocks: s.blocks, Bytes: s.bytes,
			Duration: math.Round(float64(s.duration)/1e3) / 1e3,
		})
	}
	if diff := cmp.Diff(want, got, cmp.AllowUnexported(slowDoc{})); diff != "" {
		t.Fatalf("slowest (-want +got):\n%s", diff)
	}
}

// TestLoadsWhileRead reads the document while one goroutine observes: for the race detector.
func TestLoadsWhileRead(t *testing.T) {
	l := web.NewLoads(time.Now, 4)
	var done atomic.Bool
	go func() {
		defer done.Store(true)
		for i := range 3000 {
			l.Observe(message(connectorOf("decode-0"), load(fmt.Sprint(i%9), "r", 1, 10, time.Millisecond)))
		}
	}()
	for !done.Load() {
		doc := loadsAt(t, l, time.Now())
		var of uint64
		for _, p := range doc.Pairs {
			of += p.Loads
		}
		if of > doc.Loads || len(doc.Pairs) > 4 {
			t.Fatalf("%d pairs with %d of %d loads", len(doc.Pairs), of, doc.Loads)
		}
	}
	if doc := loadsAt(t, l, time.Now()); doc.Loads != 3000 || doc.Bytes != 30_000 {
		t.Errorf("%d loads of %d bytes", doc.Loads, doc.Bytes)
	}
}

// TestLoadsKeepTheWholeWindow checks that the second under way takes no place of an older one.
func TestLoadsKeepTheWholeWindow(t *testing.T) {
	start := time.Unix(1_800_000_000, 0)
	now := start
	l := web.NewLoads(func() time.Time { return now }, 4)
	for second := range 301 {
		now = start.Add(time.Duration(second) * time.Second)
		l.Observe(message(connectorOf("decode-0"), load("prefill-0", "r", 1, 10, time.Millisecond)))
	}
	doc := loadsAt(t, l, now)
	if doc.Seconds.First != start.Unix() || len(doc.Seconds.Bytes) != 300 || slices.Contains(doc.Seconds.Bytes, 0) || doc.Rate.Loads != 1 {
		t.Errorf("%d seconds from %d, %v loads a second", len(doc.Seconds.Bytes), doc.Seconds.First, doc.Rate.Loads)
	}
}

// TestLoadsDocumentStandsStill checks that nothing is sent of a fleet that loads nothing.
func TestLoadsDocumentStandsStill(t *testing.T) {
	now := time.Unix(1_800_000_000, 0)
	l := web.NewLoads(func() time.Time { return now }, 4)
	l.Observe(message(connectorOf("decode-0"), load("prefill-0", "r", 1, 10, time.Millisecond)))
	later := func(d time.Duration) string {
		data, err := json.Marshal(loadsAt(t, l, now.Add(d)))
		if err != nil {
			t.Fatal(err)
		}
		return string(data)
	}
	if a, b := later(10*time.Minute), later(11*time.Minute); a != b {
		t.Errorf("the document moved:\n%s\n%s", a, b)
	}
}

func BenchmarkLoads(b *testing.B) {
	l := web.NewLoads(time.Now, web.DefaultPairs)
	m := message(connectorOf("decode-0"), load("prefill-0", "request-1", 64, 1<<27, 3*time.Millisecond))
	for b.Loop() {
		l.Observe(m)
	}
}
