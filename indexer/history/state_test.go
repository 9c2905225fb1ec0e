package history_test

import (
	"bytes"
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

// slot is where copies of a block are, of the naive model.
type slot struct {
	tier  event.Tier
	group event.Group
	hash  uint64
}

// moment is what a source held from a time on.
type moment struct {
	at       event.Time
	held     map[slot]int
	doubtful bool
}

// past is what a source held, moment by moment.
type past struct {
	held    map[slot]int
	moments []moment
}

// apply replays a message, naively.
func (p *past) apply(m *event.Message) {
	for i := range m.Batches[0].Events {
		ev := &m.Batches[0].Events[i]
		if ev.Kind == event.Cleared {
			clear(p.held)
		}
		for _, b := range ev.Blocks {
			h, _ := b.Hash.Int()
			k := slot{ev.Tier, max(ev.Group, 0), h}
			if p.held[k] += int(b.Effect); p.held[k] == 0 {
				delete(p.held, k)
			}
		}
	}
}

func (p *past) note(at event.Time, doubtful bool) {
	p.moments = append(p.moments, moment{at, maps.Clone(p.held), doubtful})
}

// before returns the last moment before a time.
func (p *past) before(t time.Time) moment {
	i, _ := slices.BinarySearchFunc(p.moments, event.UnixTime(t), func(m moment, at event.Time) int {
		if m.at < at {
			return -1
		}
		return 1
	})
	if i == 0 {
		return moment{}
	}
	return p.moments[i-1]
}

// What an engine held at any moment is what a naive replay up to then leaves; where history has a hole, it says so.
func TestStateModel(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	if *oneSeed != 0 {
		seed = *oneSeed
	}
	t.Logf("again with -history.seed=%d", seed)
	rnd := rand.New(rand.NewPCG(seed, 9))
	began := time.Now().UTC().Truncate(24 * time.Hour).Add(-14 * time.Hour)
	e := startEngine(t)
	w, _ := startWriter(t, e.config())
	resume(t, w)
	pasts := make(map[string]*past)
	end := began
	for _, s := range fleet(began, "e0", "e1", "e2") {
		p := &past{held: make(map[slot]int)}
		pasts[s.source.Instance] = p
		if s.source.Instance == "e2" {
			s.seq = 500 // history begins late
		}
		doubtful, missing := s.source.Instance == "e2", 0
		for range 150 {
			s.now = s.now.Add(time.Duration(rnd.IntN(3000)) * time.Millisecond)
			var m *event.Message
			switch n := rnd.IntN(40); {
			case n == 0 && missing == 0:
				s.life()
				clear(p.held)
				doubtful = false
				m = s.publish(randomEvents(rnd)...)
			case n == 1 && missing == 0:
				m = s.publish(event.Event{Kind: event.Cleared, Cause: event.ByEngine, Group: event.NoGroup, LoRAID: event.NoLoRAID})
				doubtful = false
			case n == 2 && missing == 0:
				m = s.lost(event.Seq(1 + rnd.IntN(3)))
				doubtful = true
			case n == 3 && missing == 0:
				missing = 1 + rnd.IntN(3) // from here on history does not get what is published
				p.note(event.UnixTime(s.now.Add(-time.Nanosecond)), true)
				p.moments[len(p.moments)-1].held = p.before(s.now).held
				if len(p.moments) > 1 { // from the last message on, as far as history can tell
					p.moments[len(p.moments)-2].doubtful = true
				}
				fallthrough
			default:
				m = s.publish(randomEvents(rnd)...)
			}
			p.apply(m)
			if missing == 0 {
				feed(t, w, m)
				p.note(m.Stored, doubtful)
				continue
			}
			if missing--; missing == 0 {
				s.now = s.now.Add(time.Millisecond)
				if _, err := w.Restore(t.Context(), bytes.NewReader(s.checkpoint(t))); err != nil {
					t.Fatal(err)
				}
				doubtful = false
				p.note(event.UnixTime(s.now), false)
				s.now = s.now.Add(time.Millisecond)
			}
		}
		if missing > 0 { // the last ones come after all, in a life of their own
			s.life()
			clear(p.held)
		}
		m := s.publish(run(event.Stored, 1))
		p.apply(m)
		feed(t, w, m)
		p.note(m.Stored, doubtful && missing == 0)
		committed(t, w, m)
		if end.Before(s.now) {
			end = s.now
		}
	}
	r := newReader(t, e.config())
	for range 25 {
		at := began.Add(time.Duration(rnd.Int64N(int64(end.Sub(began)/time.Millisecond))) * time.Millisecond)
		checkState(t, r, at, pasts)
	}
}

func randomEvents(rnd *rand.Rand) (list []event.Event) {
	for range 1 + rnd.IntN(3) {
		kind := []event.Kind{event.Stored, event.Stored, event.Evicted, event.Loaded}[rnd.IntN(4)]
		first := uint64(1 + rnd.IntN(30))
		ev := on([]event.Tier{event.GPU, event.CPU}[rnd.IntN(2)], run(kind, hashes(first, first+uint64(rnd.IntN(3)))...))
		ev.Group = event.Group(rnd.IntN(3) - 1)
		list = append(list, ev)
	}
	return list
}

// checkState asks what was held at a moment, and compares.
func checkState(t *testing.T, r *history.Reader, at time.Time, pasts map[string]*past) {
	t.Helper()
	ask := func(by string, more ...string) *history.Answer {
		values := map[string]string{"at": strconv.FormatInt(at.UnixMilli(), 10), "by": by}
		for i := 0; i < len(more); i += 2 {
			values[more[i]] = more[i+1]
		}
		a, err := r.Ask(t.Context(), "state", values)
		if err != nil {
			t.Fatal(err)
		}
		return a
	}
	var blocks []string
	tiers, groups := make(map[string]int), make(map[string]int)
	doubtful := false
	for name, p := range pasts {
		now := p.before(at)
		doubtful = doubtful || now.doubtful
		for k, n := range now.held {
			blocks = append(blocks, spaced(name, k.tier, k.group, history.HashText(k.hash), n))
			tiers[spaced(name, k.tier)]++
			groups[spaced(name, k.group)]++
		}
	}
	slices.Sort(blocks)
	var got []string
	for offset := 0; ; offset += 40 { // by page
		a := ask("blocks", "limit", "40", "offset", strconv.Itoa(offset))
		for _, row := range a.Rows {
			got = append(got, spaced(row[1], row[4], row[5], row[7], row[8]))
		}
		if (a.Exactness == "inferred") != doubtful {
			t.Errorf("at %v the answer is %s, and doubtful %v: %v", at, a.Exactness, doubtful, a.Notes)
		}
		if !a.Truncated {
			break
		}
	}
	slices.Sort(got)
	if diff := cmp.Diff(blocks, got); diff != "" {
		t.Errorf("at %v: %s", at, diff)
	}
	for by, want := range map[string]map[string]int{"tier": tiers, "group": groups} {
		counted, of := make(map[string]int), make(map[string]uint64)
		for _, row := range ask(by).Rows {
			counted[spaced(row[1], row[4])] = int(row[5].(uint64))
			of[row[1].(string)] += row[5].(uint64)
			if row[8] != 16*row[5].(uint64) && row[8] != nil { // a checkpoint tells no block size
				t.Errorf("tokens of %v", row)
			}
		}
		if diff := cmp.Diff(want, counted); diff != "" {
			t.Errorf("at %v by %s: %s", at, by, diff)
		}
		for _, row := range ask(by).Rows {
			if row[6] != of[row[1].(string)] {
				t.Errorf("%v is of %d", row, of[row[1].(string)])
			}
		}
	}
}

// A state tells how deep blocks are, and what it looked at.
func TestStateByDepth(t *testing.T) {
	began := time.Now().UTC().Truncate(24 * time.Hour).Add(-14 * time.Hour)
	s := fleet(began, "e0")[0]
	s.at(began, 0, run(event.Stored, hashes(1, 20)...))
	s.at(began, 10, run(event.Evicted, 20, 19))
	r := keepAll(t, s)
	rows := func(values map[string]string) string {
		a, err := r.Ask(t.Context(), "state", values)
		if err != nil {
			t.Fatal(err)
		}
		var lines []string
		for _, row := range a.Rows {
			lines = append(lines, spaced(row[4:]...))
		}
		return a.Exactness + "\n" + strings.Join(lines, "\n")
	}
	after := began.Add(time.Minute).Format(time.RFC3339)
	want := "exact\n1–4 4 18 0.2222222222222222 64 4 since its life began\n5–16 12 18 0.6666666666666666 192 12 since its life began\n" +
		"17–64 2 18 0.1111111111111111 32 2 since its life began"
	if got := rows(map[string]string{"at": after, "by": "depth"}); got != want {
		t.Errorf("%s\nwant\n%s", got, want)
	}
	if got := rows(map[string]string{"at": began.Format(time.RFC3339)}); got != "exact\n" {
		t.Error(got)
	}
	if got := rows(map[string]string{"at": began.Add(5 * time.Second).Format(time.RFC3339)}); got != "exact\nGPU 20 20 1 320 20 since its life began" {
		t.Error(got)
	}
	if got := rows(map[string]string{"at": after, "sample": "2"}); !strings.HasPrefix(got, "sampled\n") {
		t.Error(got)
	}
	if got := rows(map[string]string{"at": after, "by": "blocks", "offset": "17"}); got != "exact\n"+
		fmt.Sprintf("GPU 0 %s %s 1 16 %d since its life began", prefixOf(hashes(1, 18)...), history.HashText(18), began.UnixMilli()) {
		t.Error(got)
	}
}

// A page of blocks may be added up a range of hashes at a time.
func TestStateByPage(t *testing.T) {
	began := time.Now().UTC().Truncate(24 * time.Hour).Add(-14 * time.Hour)
	s := fleet(began, "e0")[0]
	var spread, want []uint64
	for i := range uint64(31) {
		spread = append(spread, (i+1)<<59)
	}
	s.at(began, 0, run(event.Stored, spread...))
	s.at(began, 1, run(event.Evicted, spread[30], spread[3], spread[4]))
	for i, h := range spread {
		if i != 30 && i != 3 && i != 4 {
			want = append(want, h)
		}
	}
	r := keepAll(t, s)
	r.AtOnce(8)
	for _, size := range []int{1, 3, 10, 1000} {
		var got []uint64
		for truncated := true; truncated && len(got) <= len(want); {
			a, err := r.Ask(t.Context(), "state", map[string]string{
				"at": began.Add(time.Minute).Format(time.RFC3339), "by": "blocks", "limit": strconv.Itoa(size), "offset": strconv.Itoa(len(got)),
			})
			if err != nil || len(a.Rows) == 0 {
				t.Fatal(err, a)
			}
			for _, row := range a.Rows {
				h, err := strconv.ParseUint(row[7].(string), 16, 64)
				if err != nil {
					t.Fatal(err)
				}
				got = append(got, h)
			}
			truncated = a.Truncated
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("by pages of %d: %s", size, diff)
		}
	}
}

// What came after a checkpoint may be older than when history took the checkpoint.
func TestStateFromALateCheckpoint(t *testing.T) {
	e := startEngine(t)
	w, _ := startWriter(t, e.config())
	resume(t, w)
	began := time.Now().UTC().Truncate(time.Hour).Add(-60 * time.Hour)
	s := fleet(began, "e0")[0]
	s.publish(run(event.Stored, 1, 2, 3))
	if _, err := w.Restore(t.Context(), bytes.NewReader(s.checkpoint(t))); err != nil {
		t.Fatal(err)
	}
	s.now = began.Add(time.Minute)
	m := s.publish(run(event.Evicted, 2), run(event.Stored, 4))
	feed(t, w, m)
	committed(t, w, m)
	r := newReader(t, e.config())
	for seconds, want := range map[int]string{0: "[]", 30: "[[m/model e0 0 engine GPU 3 3 1 <nil> 3 from a checkpoint]]", 61: "[[m/model e0 0 engine GPU 3 3 1 48 3 from a checkpoint]]"} {
		a, err := r.Ask(t.Context(), "state", map[string]string{"at": began.Add(time.Duration(seconds) * time.Second).Format(time.RFC3339)})
		if err != nil || fmt.Sprint(a.Rows) != want || a.Exactness != "exact" {
			t.Errorf("after %d s: %v %v, want %s", seconds, a, err, want)
		}
	}
}
