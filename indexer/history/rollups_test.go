package history_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"kvstrata/event"
	"kvstrata/indexer/history"
)

// bucket is a row of a roll-up as a naive count makes it.
type bucket struct {
	blocks, stored, evicted, loaded, cleared, batches, sequences, lost, loads, bytes, micros uint64
	first, last                                                                              int64
	ages                                                                                     map[int64]uint64
}

// naive counts what was handed over, in buckets of some seconds.
func (r *reading) naive(length int64, before int64) []string {
	buckets := make(map[string]*bucket)
	at := func(m *event.Message, tier event.Tier) *bucket {
		key := spaced(int64(m.Stored/1e9)/length*length, m.Source.Tokens(), m.Epoch, "'"+tier+"'")
		if buckets[key] == nil {
			buckets[key] = &bucket{ages: make(map[int64]uint64)}
		}
		return buckets[key]
	}
	for _, steps := range r.steps {
		for _, s := range steps {
			if s.batch == nil || len(s.batch.Events) == 0 || (int64(s.m.Stored/1e9)/length+1)*length > before {
				continue
			}
			b, all := s.batch, at(s.m, "")
			all.batches++
			all.sequences += uint64(b.Last - b.First + 1)
			if b.Way == event.Lost {
				all.lost += uint64(b.Last - b.First + 1)
			}
			for _, ev := range b.Events {
				c := at(s.m, ev.Tier)
				c.event(&ev, int64(s.m.Stored/1e9))
			}
		}
	}
	var lines []string
	for key, b := range buckets {
		ages := make([]string, 0, len(b.ages))
		for _, age := range slices.Sorted(maps.Keys(b.ages)) {
			ages = append(ages, fmt.Sprint(age, ":", b.ages[age]))
		}
		lines = append(lines, spaced(key, b.blocks, b.stored, b.evicted, b.loaded, b.cleared, b.batches, b.sequences, b.lost, b.loads, b.bytes, b.micros,
			b.first, b.last, "{"+strings.Join(ages, ",")+"}"))
	}
	slices.Sort(lines)
	return lines
}

func (c *bucket) event(ev *event.Event, at int64) {
	blocks := ev.Blocks
	switch ev.Kind {
	case event.Cleared:
		c.cleared++
		blocks = make([]event.Block, 1)
	case event.Loaded:
		c.loaded += uint64(len(blocks))
		c.loads++
		c.bytes += ev.Load.Bytes
		c.micros += uint64(ev.Load.Duration.Microseconds())
	}
	for _, b := range blocks {
		if c.blocks++; c.first == 0 || at < c.first {
			c.first = at
		}
		c.last = max(c.last, at)
		switch {
		case ev.Kind == event.Stored && b.Effect > 0:
			c.stored++
		case ev.Kind == event.Evicted && b.Effect < 0:
			c.evicted++
		}
		if ev.Kind == event.Evicted && b.Age >= 0 && b.Copies < 1 {
			c.ages[history.RoundedAge(b.Age.Milliseconds())]++
		}
	}
}

var levels = map[string]int64{"rollup_seconds": 1, "rollup_minutes": 60, "rollup_hours": 3600}

// rolledUp waits until a writer has rolled up all that it committed, and returns until when.
func rolledUp(t *testing.T, e *engine, w *history.Writer) (until int64) {
	t.Helper()
	eventually(t, "all is rolled up", func() bool { return w.RolledUp() == w.Committed() })
	if err := connect(t, e.config()).QueryRow(t.Context(), "SELECT toInt64(seq) FROM progress FINAL WHERE source = 'rollups'").Scan(&until); err != nil {
		t.Fatal(err)
	}
	return until
}

// checkRollups compares each level with a naive count of what was handed over.
func (r *reading) checkRollups(until int64) {
	t := r.t
	t.Helper()
	rows := 0
	for table, length := range levels {
		got := linesOf(t, r.e, `SELECT concat(toUnixTimestamp(bucket), ' ', source, ' ', epoch, ' \'', tier, '\' ', blocks, ' ', stored, ' ', evicted, ' ', loaded, ' ', cleared, ' ',
  batches, ' ', sequences, ' ', lost, ' ', loads, ' ', load_bytes, ' ', load_us, ' ', toUnixTimestamp(first), ' ', toUnixTimestamp(last), ' ', toString(ages))
FROM `+table+` FINAL WHERE startsWith(source, '`+r.pubs[0].source.Cluster+`.')`)
		want := r.naive(length, until/length*length)
		rows += len(want)
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s: %s", table, diff)
		}
	}
	if rows == 0 {
		t.Error("nothing was counted")
	}
}

// checkRows compares the tables with what was handed over: each row is there, once.
func (r *reading) checkRows() {
	r.t.Helper()
	want := make(map[string][]string)
	for _, steps := range r.steps {
		for _, s := range steps {
			for table, lines := range tables(s.m, s.batch) {
				want[table] = append(want[table], lines...)
			}
		}
	}
	for _, table := range []string{"block_events", "batches", "loads"} {
		slices.Sort(want[table])
		if diff := cmp.Diff(want[table], tableOf(r.t, r.e, table, r.pubs[0].source.Cluster)); diff != "" {
			r.t.Errorf("%s: %s", table, diff)
		}
	}
	runs := func(columns, from string) []string {
		return linesOf(r.t, r.e, `SELECT concat(source, ' ', epoch, ' ', seq, ' ', `+columns+`) FROM `+from+
			` AND startsWith(source, '`+r.pubs[0].source.Cluster+`.')`)
	}
	inRows := runs(`ev, ' ', hash, ' ', run_parent = 0`, `block_events WHERE op = 'STORED' AND pos = 0`)
	inBatches := runs(`run.1, ' ', run.2, ' ', run.3`, `batches ARRAY JOIN arrayZip(run_ev, run_start, run_root) AS run WHERE true`)
	if diff := cmp.Diff(inRows, inBatches); diff != "" || len(inRows) == 0 {
		r.t.Errorf("runs: %s", diff)
	}
	// A writer that began anew between the two tables knows less of what runs continue.
	inRows = runs(`ev, ' ', run_prefix`, `block_events WHERE op = 'STORED' AND pos = 0 AND run_prefix != 0`)
	inBatches = runs(`run.1, ' ', run.2`, `batches ARRAY JOIN arrayZip(run_ev, run_prefix) AS run WHERE run.2 != 0`)
	both := 0
	for _, line := range inRows {
		run := line[:strings.LastIndexByte(line, ' ')+1]
		at, same := slices.BinarySearch(inBatches, line)
		other := slices.ContainsFunc(inBatches, func(l string) bool { return strings.HasPrefix(l, run) })
		if both++; !same && other {
			r.t.Errorf("run %s continues something else in its batch's row: %v", line, inBatches[max(at-1, 0):min(at+2, len(inBatches))])
		}
	}
	if both == 0 {
		r.t.Error("no run continues a known prefix")
	}
}

// linesOf returns the sorted rows of a query of one text.
func linesOf(t *testing.T, e *engine, sql string) []string {
	t.Helper()
	rows, err := connect(t, e.config()).Query(t.Context(), sql)
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	var lines []string
	for rows.Next() {
		var line string
		if err := rows.Scan(&line); err != nil {
			t.Fatal(err)
		}
		lines = append(lines, line)
	}
	if err := rows.Err(); err != nil {
		t.Fatal(err)
	}
	slices.Sort(lines)
	return lines
}

// shift moves a world's messages in time, and some of them much: the bus's clock was set.
func (w *world) shift(by time.Duration) {
	for _, items := range w.lives {
		for _, i := range items {
			if i.message == nil {
				continue
			}
			i.message.Stored += event.Time(by)
			switch w.IntN(12) {
			case 0:
				i.message.Stored -= event.Time(time.Duration(w.IntN(200)) * time.Second)
			case 1:
				i.message.Stored -= event.Time(time.Duration(w.IntN(7200)) * time.Second)
			}
		}
	}
}

// rewind makes the tables forget how far the rounds went, and perhaps what is rolled up: everything is delivered again.
func rewind(t *testing.T, e *engine, rollups bool) {
	t.Helper()
	which := "source != '" + map[bool]string{true: "", false: "rollups"}[rollups] + "'"
	if rollups {
		which = "true"
	}
	err := connect(t, e.config()).Exec(t.Context(), `INSERT INTO progress (source, round, committed, stream_name, stream, stream_seq, fence, epoch, started, seq, digest)
SELECT source, round + 1, committed, '', 0, 0, 0, 0, 0, 0, 0 FROM progress FINAL WHERE `+which)
	if err != nil {
		t.Fatal(err)
	}
}

// A stream is delivered twice, in rounds of other sizes, by writers that are killed and lose answers, to tables that have it: each roll-up is
// what a naive count over the stream gives, row for row, and questions are answered the same from them as from rows.
func TestRollups(t *testing.T) {
	e := startEngine(t)
	budget := 20 * time.Second
	if testing.Short() {
		budget = 8 * time.Second
	}
	seed := uint64(time.Now().UnixNano())
	if *oneSeed != 0 {
		seed, budget = *oneSeed, 0
	}
	n := 0
	for deadline := time.Now().Add(budget); n < 2 || time.Now().Before(deadline) && !t.Failed(); n++ {
		w := newWholeWorld(seed, 60)
		w.shift(time.Duration(n) * 5 * time.Minute)
		r := &reading{world: w, t: t, e: e, steps: make(map[event.Source][]step)}
		forgetChains(t, e) // worlds tell of the same prefixes
		for _, again := range []bool{false, true} {
			if again {
				rewind(t, e, n%2 == 0)
			}
			r.faults = 20
			r.read()
			last, stop := startWriter(t, e.config())
			resume(t, last)
			until := rolledUp(t, e, last)
			stop()
			r.checkRows()
			r.checkRollups(until)
			r.checkCounting(until)
		}
		if t.Failed() {
			t.Logf("again with -history.seed=%d", seed)
		}
		seed++
	}
	t.Logf("%d worlds", n)
}

// checkCounting asks what only counts, with roll-ups and without, about windows of many lengths.
func (r *reading) checkCounting(until int64) {
	t := r.t
	t.Helper()
	rolled, rows := newReader(t, r.e.config()), newReader(t, r.e.config())
	rows.RowsOnly()
	for range 5 {
		end := until + int64(r.IntN(300)) - 200
		length := []int{5, 90, 600, 5000, 90_000, 800_000}[r.IntN(6)]
		asked := map[string]string{
			"since": strconv.FormatInt((end-int64(1+r.IntN(length)))*1000+int64(r.IntN(1000)), 10), "until": strconv.FormatInt(end*1000+int64(r.IntN(1000)), 10),
		}
		if r.IntN(3) == 0 {
			asked["engine"] = "e1"
		}
		for _, name := range []string{"events", "engines", "evictions", "lifetimes", "storms"} {
			asked := maps.Clone(asked)
			if name == "storms" {
				asked["bucket"], asked["least"], asked["factor"] = []string{"1s", "7s", "60s", "1h"}[r.IntN(4)], "0", "0"
			}
			want, err := rows.Ask(t.Context(), name, asked)
			if err != nil {
				t.Fatal(err)
			}
			got, err := rolled.Ask(t.Context(), name, asked)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(want.Rows, got.Rows); diff != "" {
				t.Errorf("%s %v, rolled up until %d: %s", name, asked, until, diff)
			}
		}
	}
}

var errLostRollup = errors.New("the answer of a roll-up was lost")

// Statements that roll up fail, or only seem to, or are performed twice, the second time late: the count stays the stream's.
func TestRollupsLoseAnswers(t *testing.T) {
	e := startEngine(t)
	w := newWholeWorld(uint64(time.Now().UnixNano()), 60)
	w.shift(0)
	r := &reading{world: w, t: t, e: e, steps: make(map[event.Source][]step)}
	cfg := e.config()
	cfg.MaxRows, cfg.FlushEvery = 20, 5*time.Millisecond
	writer, err := history.NewWriter(cfg, silent(), nil)
	if err != nil {
		t.Fatal(err)
	}
	var late func() error
	n := 0
	writer.InterceptRollups(func(send func() error) error {
		switch n++; n % 7 {
		case 1:
			return errLostRollup
		case 3:
			return errors.Join(send(), errLostRollup)
		case 4:
			late = send
			return errLostRollup
		case 6:
			return errors.Join(late(), send())
		}
		return send()
	})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- writer.Run(ctx) }()
	items, _ := r.resume(ctx, writer)
	for _, i := range items {
		if !r.take(ctx, writer, i) {
			t.Fatal(writer.Trouble())
		}
		writer.Reached(i.at)
		if i.at.Sequence%10 == 0 { // that there are several passes; answers do not wait for them
			eventually(t, "all is committed", func() bool { return writer.Committed() == i.at })
			r.checkCounting(w.now.Unix())
			eventually(t, "all is rolled up", func() bool { return writer.RolledUp() == i.at })
		}
	}
	r.checkRollups(rolledUp(t, e, writer))
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
	if n < 20 {
		t.Errorf("only %d statements", n)
	}
}
