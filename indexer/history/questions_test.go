package history_test

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"kvstrata/event"
	"kvstrata/indexer/history"
)

// keepAll keeps what streams published, and returns a reader of it.
func keepAll(t *testing.T, streams ...*stream) *history.Reader {
	t.Helper()
	return keepIn(t, startEngine(t), streams...)
}

// keepIn does so in an engine.
func keepIn(t *testing.T, e *engine, streams ...*stream) *history.Reader {
	t.Helper()
	w, _ := startWriter(t, e.config())
	resume(t, w)
	for _, s := range streams {
		feed(t, w, s.messages...)
	}
	last := streams[len(streams)-1]
	committed(t, w, last.messages[len(last.messages)-1])
	return newReader(t, e.config())
}

// fleet returns streams of engines that begin at a moment, the one behind the other in the bus's stream.
func fleet(began time.Time, names ...string) []*stream {
	var all []*stream
	for i, name := range names {
		s := newStream(name)
		s.now, s.position.Sequence = began, uint64(i)*100_000
		all = append(all, s)
	}
	return all
}

// at publishes so many seconds after the stream's beginning.
func (s *stream) at(began time.Time, seconds int, events ...event.Event) {
	s.now = began.Add(time.Duration(seconds) * time.Second)
	s.publish(events...)
}

func hashes(first, last uint64) (list []uint64) {
	for h := first; h <= last; h++ {
		list = append(list, h)
	}
	return list
}

func on(tier event.Tier, ev event.Event) event.Event {
	ev.Tier = tier
	return ev
}

// churn is a hand-made fleet: blocks of prefill-0 come and go, in a storm at last; decode-1 and decode-2 hold some of the same.
func churn(t *testing.T, e *engine) (r *history.Reader, began time.Time) {
	t.Helper()
	began = time.Now().UTC().Truncate(24 * time.Hour).Add(-14 * time.Hour)
	all := fleet(began, "prefill-0", "decode-1", "decode-2", "decode-3")
	a, b, c, d := all[0], all[1], all[2], all[3]
	a.at(began, 0, run(event.Stored, 1, 2, 3, 4))
	a.at(began, 1, under(run(event.Stored, 5, 6), 4))
	a.at(began, 20, run(event.Evicted, 6, 5))
	a.at(began, 40, run(event.Stored, hashes(100, 129)...))
	a.at(began, 50, under(run(event.Stored, 5), 4)) // 30 s after its eviction
	a.at(began, 60, run(event.Stored, 1))           // a second copy
	a.at(began, 61, run(event.Evicted, 1))          // one is left
	a.at(began, 81, run(event.Evicted, hashes(100, 129)...))
	a.at(began, 90, run(event.Evicted, 1))
	b.at(began, 5, run(event.Stored, 1, 2, 3))
	b.at(began, 7, on(event.CPU, under(run(event.Stored, 3), 2)))
	load := run(event.Loaded, 2)
	load.Load = event.Load{From: event.CPU, Request: "r", Bytes: 4096, Duration: time.Millisecond}
	b.at(began, 70, load)
	b.at(began, 100, run(event.Evicted, 2))
	b.at(began, 107, on(event.CPU, run(event.Evicted, 3)))
	c.at(began, 6, run(event.Stored, 1, 2))
	c.lost(3)
	c.at(began, 90, run(event.Stored, 1))
	d.at(began, 3, run(event.Stored, 1, 2, 3))
	d.life() // all that is gone
	d.at(began, 95, run(event.Stored, 2), under(run(event.Stored, 7), 2))
	return keepIn(t, e, all...), began
}

func TestQuestions(t *testing.T) { questions(t, startEngine(t)) }

// A cluster's tables give the same answers.
func TestQuestionsOfAClustersTables(t *testing.T) { questions(t, startClusterEngine(t)) }

func questions(t *testing.T, e *engine) {
	r, began := churn(t, e)
	window := map[string]string{"since": began.Format(time.RFC3339), "until": began.Add(2 * time.Minute).Format(time.RFC3339)}
	ask := func(t *testing.T, name string, more ...string) *history.Answer {
		t.Helper()
		q, err := history.QueryNamed(name)
		if err != nil {
			t.Fatal(err)
		}
		values := about(q, prefixOf(1, 2), window)
		for _, m := range more {
			key, value, _ := strings.Cut(m, "=")
			values[key] = value
		}
		a, err := r.Ask(t.Context(), name, values)
		if err != nil {
			t.Fatal(err)
		}
		a.SQL = ""
		return a
	}
	middle := began.Add(time.Minute).Format(time.RFC3339)
	for _, test := range [][]string{
		{"residency"},
		{"residency-depth"},
		{"residency-use"},
		{"thrash"},
		{"thrash", "within=29s"},
		{"wasted"},
		{"storms", "least=10"},
		{"compare", "since=" + middle},
		{"duplication"},
		{"lineage"},
		{"loss"},
	} {
		name := strings.Join(test[:min(len(test), 2)], "_")
		if strings.Contains(name, ":") {
			name = test[0]
		}
		t.Run(name, func(t *testing.T) {
			golden(t, "churn_"+strings.ReplaceAll(name, "=", "_")+".txt", lines(t, ask(t, test[0], test[1:]...), began))
		})
	}
	t.Run("a sample", func(t *testing.T) {
		kept := uint64(0) // of what prefill-0 stored
		for _, chain := range [][]uint64{{1, 2, 3, 4, 5, 6}, hashes(100, 129)} {
			for i := range chain {
				h, err := strconv.ParseUint(prefixOf(chain[:i+1]...), 16, 64)
				if err != nil {
					t.Fatal(err)
				}
				if h > 1<<63-1 {
					continue
				}
				kept++
				if chain[i] == 1 || chain[i] == 5 {
					kept++ // twice
				}
			}
		}
		a := ask(t, "thrash", "sample=2", "engine=prefill-0")
		if a.Exactness != "sampled" || !strings.HasPrefix(a.Notes[len(a.Notes)-1], "one block in 2 was looked at") || a.Rows[0][5] != 2*kept {
			t.Errorf("%+v, want %d blocks stored", a, 2*kept)
		}
		if a := ask(t, "wasted", "sample=2"); a.Exactness != "inferred" || !strings.Contains(a.Notes[len(a.Notes)-1], "one block in 2") {
			t.Errorf("%+v", a)
		}
	})
	t.Run("by an engine's hash", func(t *testing.T) {
		want, got := ask(t, "lineage", "hash="+prefixOf(hashes(1, 6)...)), ask(t, "lineage", "hash=0000000000000006")
		want.Elapsed, got.Elapsed = 0, 0
		if diff := cmp.Diff(want, got); diff != "" {
			t.Error(diff)
		}
	})
}

// Who is gone owns nothing, once that is told.
func TestDuplicationWithoutWhoIsGone(t *testing.T) {
	e := startEngine(t)
	w, _ := startWriter(t, e.config())
	resume(t, w)
	all := fleet(time.Now().Add(-time.Hour), "here", "gone")
	for _, s := range all {
		feed(t, w, s.publish(run(event.Stored, 1, 2)))
	}
	last := all[1].messages[0]
	committed(t, w, last)
	r := newReader(t, e.config())
	owners := func() string {
		a, err := r.Ask(t.Context(), "duplication", map[string]string{"until": time.Now().Add(time.Hour).Format(time.RFC3339)})
		if err != nil {
			t.Fatal(err)
		}
		return fmt.Sprint(a.Rows)
	}
	if got := owners(); got != "[[m/model 2 2 32 4 64 0.5] [m/model any 2 32 4 64 0.5]]" {
		t.Error(got)
	}
	w.Tell(&event.Status{Source: last.Source, Epoch: last.Epoch, Fence: 1, Seq: 0, State: event.StateGone, Reason: "disconnected"})
	at := last.Position
	at.Sequence++
	w.Reached(at)
	eventually(t, "the state is committed", func() bool { return w.Committed() == at })
	if got := owners(); got != "[[m/model 1 2 32 2 32 1] [m/model any 2 32 2 32 1]]" {
		t.Error(got)
	}
}

// lines writes an answer for people: a line a row.
func lines(t *testing.T, a *history.Answer, began time.Time) string {
	t.Helper()
	var b strings.Builder
	fmt.Fprintf(&b, "%s, %s\n", a.Query, a.Exactness)
	row := func(cells []string) { fmt.Fprintln(&b, strings.Join(cells, " | ")) }
	var head []string
	for _, c := range a.Columns {
		head = append(head, strings.TrimSuffix(c.Name+" ["+c.Unit+"]", " []"))
	}
	row(head)
	for _, cells := range a.Rows {
		if len(cells) != len(a.Columns) {
			t.Fatalf("rows of %d cells, and %d columns", len(cells), len(a.Columns))
		}
		texts := make([]string, len(cells))
		for i, cell := range cells {
			texts[i] = fmt.Sprint(cell)
			if ms, ok := cell.(int64); ok && a.Columns[i].Kind == "time" {
				texts[i] = fmt.Sprint(time.UnixMilli(ms).Sub(began))
			}
		}
		row(texts)
	}
	return b.String()
}

// told is one entry of a block's life, of the naive model.
type told struct {
	at     int64 // seconds
	stored bool
	epoch  event.Epoch
}

// home is where a block lives.
type home struct {
	instance string
	tier     event.Tier
	hash     uint64
}

// What questions about single blocks say of a random fleet is what a naive model of it says.
func TestQuestionsModel(t *testing.T) {
	rnd := rand.New(rand.NewPCG(7, 7))
	began := time.Now().UTC().Truncate(24 * time.Hour).Add(-14 * time.Hour)
	all := fleet(began, "e0", "e1", "e2")
	lives := make(map[home][]told)
	copies := make(map[home]int)
	loaded := make(map[uint64][]int64)
	for _, s := range all {
		for range 400 {
			s.now = s.now.Add(time.Duration(rnd.IntN(4000)) * time.Millisecond)
			if rnd.IntN(80) == 0 {
				s.life()
				maps.DeleteFunc(copies, func(h home, _ int) bool { return h.instance == s.source.Instance })
			}
			var events []event.Event
			for range 1 + rnd.IntN(3) {
				kinds := []event.Kind{event.Stored, event.Stored, event.Stored, event.Evicted, event.Evicted, event.Evicted, event.Evicted, event.Loaded}
				ev := run(kinds[rnd.IntN(len(kinds))], uint64(1+rnd.IntN(25)))
				events = append(events, on([]event.Tier{event.GPU, event.CPU}[rnd.IntN(2)], ev))
			}
			m := s.publish(events...)
			for _, ev := range m.Batches[0].Events {
				block := ev.Blocks[0]
				h, _ := block.Hash.Int()
				place, at := home{s.source.Instance, ev.Tier, h}, int64(m.Stored/1e9)
				switch {
				case ev.Kind == event.Stored:
					lives[place] = append(lives[place], told{at: at, stored: true, epoch: s.epoch})
					copies[place] += int(block.Effect)
				case ev.Kind == event.Evicted && block.Effect < 0:
					copies[place]--
					if block.Copies < 1 {
						lives[place] = append(lives[place], told{at: at, epoch: s.epoch})
					}
				case ev.Kind == event.Loaded && block.Prefix != 0:
					loaded[h] = append(loaded[h], at)
				}
			}
		}
	}
	const within = 20
	type sums struct{ evicted, gaps, thrash, stored, whole, unused, older uint64 }
	want := make(map[string]sums)
	for place, life := range lives {
		key := fmt.Sprint(place.instance, " ", place.tier)
		n := want[key]
		start := 0
		for i, x := range life {
			if i > 0 && x.epoch != life[i-1].epoch {
				start = i
			}
			switch {
			case x.stored:
				n.stored++
				if i > 0 && !life[i-1].stored {
					n.gaps++
					if x.at-life[i-1].at <= within {
						n.thrash++
					}
				}
			case !x.stored:
				n.evicted++
				used := slices.ContainsFunc(loaded[place.hash], func(at int64) bool { return at >= life[start].at && at <= x.at })
				switch {
				case i == start:
					n.older++
				case i == start+1 && !used:
					n.unused++
					fallthrough
				default:
					n.whole++
				}
				start = i + 1
			}
		}
		want[key] = n
	}
	owners := make(map[string]uint64)
	for h := range uint64(26) {
		n := 0
		for _, s := range all {
			if copies[home{s.source.Instance, event.GPU, h}]+copies[home{s.source.Instance, event.CPU, h}] > 0 {
				n++
			}
		}
		if n > 0 {
			owners[fmt.Sprint(n)]++
			owners["any"]++
		}
	}
	r := keepAll(t, all...)
	ask := func(name string, more ...string) [][]any {
		values := map[string]string{"since": began.Format(time.RFC3339), "until": began.Add(time.Hour).Format(time.RFC3339)}
		for _, m := range more {
			key, value, _ := strings.Cut(m, "=")
			values[key] = value
		}
		a, err := r.Ask(t.Context(), name, values)
		if err != nil {
			t.Fatal(err)
		}
		return a.Rows
	}
	got := make(map[string]sums)
	with := func(name string, more []string, take func(n *sums, row []any)) {
		for _, row := range ask(name, more...) {
			key := fmt.Sprint(row[1], " ", row[2])
			n := got[key]
			take(&n, row)
			got[key] = n
		}
	}
	with("residency", nil, func(n *sums, row []any) {
		n.evicted, n.gaps = row[3].(uint64), row[9].(uint64)
		if row[4] != 16*n.evicted || row[10] != 16*n.gaps {
			t.Errorf("tokens of %v", row)
		}
	})
	with("thrash", []string{fmt.Sprintf("within=%ds", within)}, func(n *sums, row []any) { n.thrash, n.stored = row[3].(uint64), row[5].(uint64) })
	with("wasted", nil, func(n *sums, row []any) {
		n.unused, n.whole, n.older = row[3].(uint64), row[5].(uint64), row[8].(uint64)
	})
	if diff := cmp.Diff(want, got, cmp.AllowUnexported(sums{})); diff != "" {
		t.Error(diff)
	}
	held := make(map[string]uint64)
	for _, row := range ask("duplication") {
		held[row[1].(string)] = row[2].(uint64)
	}
	if diff := cmp.Diff(owners, held); diff != "" {
		t.Error(diff)
	}
	for key, n := range want {
		if min(n.evicted, n.gaps, n.thrash, n.stored, n.whole, n.unused) == 0 {
			t.Errorf("%s has nothing to look at: %+v", key, n)
		}
	}
}
