package history_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/ClickHouse/clickhouse-go/v2"
	"github.com/google/go-cmp/cmp"

	"kvstrata/event"
	"kvstrata/indexer/history"
	"kvstrata/indexer/history/archive"
)

// busyDay is a history that has rows in every table: it crosses midnight, loses, restarts, is restored from a checkpoint, loads and moves.
func busyDay(t *testing.T) (e *engine, since, until time.Time) {
	t.Helper()
	e = startEngine(t)
	w, stop := startWriter(t, e.config())
	resume(t, w)
	began := time.Now().UTC().Truncate(24 * time.Hour).Add(-30 * time.Second)
	draw := rand.New(rand.NewPCG(7, 7))
	all := fleet(began, "prefill-0", "decode-1", "text 2")
	for second := range 60 {
		for i, s := range all {
			first := uint64(1 + draw.IntN(200))
			ev := run(event.Stored, hashes(first, first+uint64(draw.IntN(8)))...)
			if first > 1 && draw.IntN(2) == 0 {
				ev = under(ev, first-1)
			}
			events := []event.Event{ev, on(event.CPU, run(event.Stored, first)), run(event.Evicted, uint64(1+draw.IntN(200)))}
			if second == 40 && i == 1 {
				load := run(event.Loaded, 2, 3)
				load.Load = event.Load{From: event.CPU, Peer: "prefill-0", Request: "r\t'\\\"é", Bytes: 4096, Duration: time.Millisecond}
				events = append(events, load, event.Event{Kind: event.Cleared, Cause: event.ByEngine, Group: event.NoGroup, LoRAID: event.NoLoRAID})
			}
			s.now = began.Add(time.Duration(second)*time.Second + time.Duration(draw.IntN(1e6))*time.Microsecond)
			feed(t, w, s.publish(events...))
			if second == 30 && i == 0 {
				feed(t, w, s.lost(5))
				w.Tell(&event.Status{Source: s.source, Epoch: s.epoch, Fence: 1, Seq: s.seq - 1, State: event.StatePartial, Reason: "lost"})
			}
			if second == 35 && i == 2 {
				s.life()
			}
		}
	}
	if _, err := w.Restore(t.Context(), bytes.NewReader(all[2].checkpoint(t))); err != nil {
		t.Fatal(err)
	}
	records := event.Position{Stream: "KV_RECORDS", Created: 9, Sequence: 1}
	if err := w.Records(t.Context(), records, event.UnixTime(began.Add(10*time.Second)), event.Records{
		Transfers: []event.Transfer{
			{Source: all[1].source, Kind: event.TransferLoaded, Transport: "tcp", From: event.CPU, To: event.GPU, Blocks: 4, Ranks: 1, Bytes: 1 << 60, Pieces: 2},
			{Source: all[1].source, Kind: event.LeaseExpired, Transport: "tcp", Blocks: 1, Reason: "nobody came"},
		},
		Lookups: []event.Lookup{
			{Source: all[1].source, Asker: event.AskerIndex, Request: "r", OneIn: 1, BlockSize: 16, Tokens: 99, Prefix: 1 << 63, Longest: 32, Shares: []event.Share{{Tier: event.GPU, Tokens: 32}}},
			{Source: all[1].source, Asker: event.AskerConnector, Request: "r", Tenant: "t\t1", OneIn: 1, BlockSize: 16, Tokens: 99},
		},
		Requests: []event.Request{{Source: all[1].source, Request: "r", Session: "s", Tenant: "t\t1", Prompt: 99, Output: 5, Cached: 32, End: event.EndAborted}},
		Samples:  []event.Sample{{Source: all[1].source, Device: "GPU-0", MemoryUsed: 1 << 40, Busy: 3}},
	}); err != nil {
		t.Fatal(err)
	}
	last := all[2].messages[len(all[2].messages)-1]
	committed(t, w, last)
	eventually(t, "records and the checkpoint are committed", func() bool { return w.CommittedRecords() == records && w.Waiting() == 0 })
	stop()
	return e, began.Add(-time.Second), time.Now().Add(time.Minute).Truncate(time.Second)
}

func window(since, until time.Time) map[string]string {
	return map[string]string{"since": since.Format(time.RFC3339), "until": until.Format(time.RFC3339)}
}

// dumpLines writes a window as JSON lines.
func dumpLines(t *testing.T, r *history.Reader, asked map[string]string, tables ...string) []byte {
	t.Helper()
	d, err := r.Dump(t.Context(), asked, tables)
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	w, err := archive.NewLineWriter(&out, d.Head())
	for _, table := range d.Tables() {
		err = errors.Join(err, d.Rows(t.Context(), table, w.Write))
	}
	if err = errors.Join(err, w.Close()); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

// dumpParquet writes a window as Parquet, a file a table.
func dumpParquet(t *testing.T, r *history.Reader, asked map[string]string) (files [][]byte) {
	t.Helper()
	d, err := r.Dump(t.Context(), asked, nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, table := range d.Tables() {
		var out bytes.Buffer
		w := archive.NewParquetWriter(&out, table, d.Head())
		if err := errors.Join(d.Rows(t.Context(), table, w.Write), w.Close()); err != nil {
			t.Fatal(err)
		}
		files = append(files, out.Bytes())
	}
	return files
}

func newLoader(t *testing.T, e *engine) *history.Loader {
	t.Helper()
	l, err := history.NewLoader(t.Context(), e.config())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	return l
}

// load puts files into a database.
func load(t *testing.T, l *history.Loader, files ...[]byte) {
	t.Helper()
	if err := l.Begin(t.Context(), "sum"); err != nil {
		t.Fatal(err)
	}
	c := history.NewContents()
	for _, data := range files {
		var r interface{ Next() (archive.Row, error) }
		var err error
		if archive.IsParquet(data) {
			r, err = archive.NewParquetReader(bytes.NewReader(data), int64(len(data)), l.Tables())
		} else {
			r, err = archive.NewLineReader(bytes.NewReader(data), l.Tables())
		}
		for err == nil {
			var row archive.Row
			if row, err = r.Next(); err == nil {
				err = errors.Join(l.Check(c, row), l.Add(t.Context(), row))
			}
		}
		if !errors.Is(err, io.EOF) {
			t.Fatal(err)
		}
	}
	if err := l.Finish(t.Context(), "sum"); err != nil {
		t.Fatal(err)
	}
}

// answers asks every question about a window.
func answers(t *testing.T, r *history.Reader, since, until time.Time) map[string]string {
	t.Helper()
	all := make(map[string]string)
	for _, q := range history.Queries() {
		for _, engine := range []string{"", "prefill-0"} {
			asked := about(q, prefixOf(1, 2, 3), window(since, until))
			for _, p := range q.Params {
				if p.Name == "before_since" || p.Name == "before_until" {
					asked["before_since"], asked["before_until"] = since.Format(time.RFC3339), since.Add(30*time.Second).Format(time.RFC3339)
				}
				if p.Name == "engine" && engine != "" {
					asked["engine"] = engine
				}
			}
			a, err := r.Ask(t.Context(), q.Name, asked)
			if err != nil {
				t.Fatalf("%s: %v", q.Name, err)
			}
			all[q.Name+" "+engine] = fmt.Sprint(a.Exactness, a.Columns, a.Rows, a.Truncated, a.Notes)
		}
	}
	story, err := r.Explain(t.Context(), prefixOf(1, 2, 3), since.Format(time.RFC3339))
	if err != nil {
		t.Fatal(err)
	}
	// How long ago things were changes from one to the other; a snapshot's tiers are of one moment.
	var events []string
	for _, ev := range story.Events {
		text, err := json.Marshal(ev)
		if err != nil {
			t.Fatal(err)
		}
		events = append(events, string(text))
	}
	slices.Sort(events)
	all["explain"] = fmt.Sprint(story.Found, len(story.Summary), *story.Parent, events)
	return all
}

// What was exported and imported answers every question as the history that it came from, and is exported again byte for byte.
func TestWhatIsImportedAnswersAlike(t *testing.T) {
	from, since, until := busyDay(t)
	asked := window(since, until)
	reader := newReader(t, from.config())
	lines, files := dumpLines(t, reader, asked), dumpParquet(t, reader, asked)
	for _, table := range history.KeptTables() {
		if !bytes.Contains(lines, []byte(`"table":"`+table+`"`)) {
			t.Fatalf("the history that is exported has no row of %s", table)
		}
	}
	want := answers(t, reader, since, until)
	for form, data := range map[string][][]byte{"jsonl": {lines}, "parquet": files, "jsonl to a server": {lines}} {
		t.Run(form, func(t *testing.T) {
			to := startEngine(t)
			l := newLoader(t, to)
			if empty, err := l.Empty(t.Context()); err != nil || !empty {
				t.Fatalf("empty %v, %v", empty, err)
			}
			if strings.HasSuffix(form, "server") {
				l.ToServer()
			}
			if err := l.Keep(t.Context()); err != nil {
				t.Fatal(err)
			}
			load(t, l, data...)
			again := newReader(t, to.config())
			if got := dumpLines(t, again, asked); !bytes.Equal(lines, got) {
				t.Errorf("%d bytes are exported again as %d: %s", len(lines), len(got), cmp.Diff(strings.Split(string(lines), "\n"), strings.Split(string(got), "\n")))
			}
			if got := dumpParquet(t, again, asked); !slices.EqualFunc(files, got, bytes.Equal) {
				t.Error("the Parquet is another")
			}
			if diff := cmp.Diff(want, answers(t, again, since, until)); diff != "" {
				t.Error(diff)
			}
			if empty, err := l.Empty(t.Context()); err != nil || empty {
				t.Errorf("empty %v, %v", empty, err)
			}
			if live, err := l.Live(t.Context()); err != nil || live {
				t.Errorf("live %v, %v", live, err)
			}
			if err := l.Imported(t.Context(), "sum"); !errors.Is(err, history.ErrImported) {
				t.Errorf("imported twice: %v", err)
			}
			if err := l.Imported(t.Context(), "another"); err != nil {
				t.Error(err)
			}
			// A writer goes on in what was imported.
			w, _ := startWriter(t, to.config())
			resume(t, w)
			s := newStream("later")
			feed(t, w, s.publish(run(event.Stored, 1)))
			committed(t, w, s.messages[0])
		})
	}
}

// ClickHouse itself reads in the Parquet what it has in its tables.
func TestParquetIsReadByOthers(t *testing.T) {
	from, since, until := busyDay(t)
	conn := connect(t, from.config())
	for i, data := range dumpParquet(t, newReader(t, from.config()), window(since, until)) {
		table := history.KeptTables()[i]
		path := filepath.Join(t.TempDir(), table+".parquet")
		if err := os.WriteFile(path, data, 0o600); err != nil {
			t.Fatal(err)
		}
		columns := history.DumpedColumns(t.Context(), conn, table)
		sum := "SELECT concat(count(), ' ', groupBitXor(cityHash64(" + strings.Join(columns, ", ") + "))) FROM "
		var want, got string
		if err := conn.QueryRow(t.Context(), sum+table+" FINAL").Scan(&want); err != nil {
			if err := conn.QueryRow(t.Context(), sum+table).Scan(&want); err != nil {
				t.Fatal(err)
			}
		}
		if err := conn.QueryRow(t.Context(), sum+"file('"+path+"', Parquet)").Scan(&got); err != nil {
			t.Fatal(err)
		}
		if got != want || strings.HasPrefix(got, "0 ") {
			t.Errorf("%s: %s in the file, %s in the table", table, got, want)
		}
	}
}

// However few rows are asked for at once, all come, in an order that the rows alone make.
func TestADumpIsCutIntoPieces(t *testing.T) {
	from, since, until := busyDay(t)
	reader := newReader(t, from.config())
	sorted := func() []string {
		list := strings.Split(string(dumpLines(t, reader, window(since, until))), "\n")
		slices.Sort(list)
		return list
	}
	want := sorted()
	rows := uint64(strings.Count(strings.Join(want, ""), `"table":"block_events"`))
	asks := func() uint64 {
		d, err := reader.Dump(t.Context(), window(since, until), nil)
		if err != nil {
			t.Fatal(err)
		}
		n, err := d.Asks(t.Context(), "block_events")
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	if n := asks(); n != 1 {
		t.Errorf("%d rows are asked for %d times", rows, n)
	}
	defer history.RowsAtOnce(7)()
	if n := asks(); n < rows/7 {
		t.Errorf("%d rows are asked for %d times, 7 at once", rows, n)
	}
	if diff := cmp.Diff(want, sorted()); diff != "" {
		t.Error(diff)
	}
}

// A dump of a part has the rows of that part.
func TestADumpOfAPart(t *testing.T) {
	from, since, until := busyDay(t)
	reader := newReader(t, from.config())
	asked := window(since, until)
	asked["engine"] = "decode-1"
	got := string(dumpLines(t, reader, asked, "block_events", "ledger"))
	if !strings.Contains(got, "decode-1") || strings.Contains(got, "prefill-0") || strings.Contains(got, `"batches"`) {
		t.Errorf("the part has others: %.2000s", got)
	}
	parts := make(map[string]bool)
	middle := since.Add(31 * time.Second)
	for _, half := range []map[string]string{window(since, middle), window(middle, until)} {
		for line := range strings.SplitSeq(string(dumpLines(t, reader, half, "batches", "block_events")), "\n") {
			if strings.Contains(line, `"table"`) && parts[line] {
				t.Errorf("in both halves: %s", line)
			}
			parts[line] = true
		}
	}
	whole := dumpLines(t, reader, window(since, until), "batches", "block_events")
	for line := range strings.SplitSeq(string(whole), "\n") {
		if strings.Contains(line, `"table"`) && !parts[line] {
			t.Errorf("in neither half: %s", line)
		}
	}
}

// Rows that the tables could not take, or that nobody could read there, are refused before anything is inserted.
func TestRowsThatAreRefused(t *testing.T) {
	l := newLoader(t, startEngine(t))
	begin := `{"kvstrata_history":1,"since":"2026-11-29T18:00:00Z","until":"2026-11-29T19:00:00Z"}` + "\n"
	row := func(source, committed, op string) string {
		return fmt.Sprintf(`{"table":"block_events","committed":%q,"source":%q,"epoch":"1","seq":"1","ev":0,"pos":0,"op":%q}`+"\n", committed, source, op)
	}
	const source, at = "default.m.e.0.engine", "2026-11-29T18:00:00Z"
	for _, tt := range []struct{ line, want string }{
		{row(source, at, "STORED"), ""},
		{row(source, at, "STOLEN"), "column op: no such word"},
		{row("engine", at, "STORED"), "column source: "},
		{row("default.m.e.00.engine", at, "STORED"), "column source: "},
		{row("kvstrata.import.x.0.store", at, "STORED"), "column source: "},
		{row(source, "1999-11-29T18:00:00Z", "STORED"), "before the year 2000"},
		{row(source, "2100-11-29T18:00:00Z", "STORED"), "to come"},
	} {
		r, err := archive.NewLineReader(strings.NewReader(begin+tt.line), l.Tables())
		if err != nil {
			t.Fatal(err)
		}
		row, err := r.Next()
		if err == nil {
			err = l.Check(history.NewContents(), row)
		}
		if (err == nil) != (tt.want == "") || err != nil && !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v, want %q", tt.line, err, tt.want)
		}
	}
}

// Columns of lists are texts in files, and lists again in the tables; a file that has no such column gives empty ones.
func TestColumnsOfLists(t *testing.T) {
	from, since, until := busyDay(t)
	before := dumpLines(t, newReader(t, from.config()), window(since, until))
	alter := func(e *engine) clickhouse.Conn {
		conn := connect(t, e.config())
		for _, typ := range []string{"UInt8", "UInt32", "UInt64"} {
			if err := conn.Exec(t.Context(), "ALTER TABLE batches ADD COLUMN list_"+typ+" Array("+typ+")"); err != nil {
				t.Fatal(err)
			}
		}
		return conn
	}
	conn := alter(from)
	if err := conn.Exec(t.Context(), `ALTER TABLE batches UPDATE list_UInt8 = [seq % 256], list_UInt32 = range(toUInt32(seq % 5)), list_UInt64 = [18446744073709551615, seq]
WHERE 1 SETTINGS mutations_sync = 1`); err != nil {
		t.Fatal(err)
	}
	reader := newReader(t, from.config())
	lines, files := dumpLines(t, reader, window(since, until)), dumpParquet(t, reader, window(since, until))
	if !bytes.Contains(lines, []byte(`"list_UInt32":"[0,1,2]","list_UInt64":"[18446744073709551615,`)) {
		t.Fatal("no lists are exported")
	}
	for i, data := range [][][]byte{{lines}, files, {lines}} {
		to := startEngine(t)
		newLoader(t, to)
		alter(to)
		l := newLoader(t, to)
		if i == 2 {
			l.ToServer()
		}
		load(t, l, data...)
		if got := dumpLines(t, newReader(t, to.config()), window(since, until)); !bytes.Equal(lines, got) {
			t.Error(cmp.Diff(strings.Split(string(lines), "\n"), strings.Split(string(got), "\n")))
		}
	}
	to := startEngine(t)
	newLoader(t, to)
	conn = alter(to)
	l := newLoader(t, to)
	load(t, l, before)
	var rows, empty uint64
	if err := conn.QueryRow(t.Context(), "SELECT count(), countIf(list_UInt32 = []) FROM batches").Scan(&rows, &empty); err != nil || rows == 0 || rows != empty {
		t.Errorf("%d rows, %d with empty lists, %v", rows, empty, err)
	}
	for _, text := range []string{"[1,2", "1", "[-1]", "[256]", "[1,,2]", "['a']"} {
		wrong := strings.Replace(string(lines), `"list_UInt8":"[0]"`, `"list_UInt8":"`+text+`"`, 1)
		r, err := archive.NewLineReader(strings.NewReader(wrong), l.Tables())
		if err != nil {
			t.Fatal(err)
		}
		row, err := r.Next()
		if err == nil {
			err = l.Check(history.NewContents(), row)
		}
		if err == nil || !strings.Contains(err.Error(), "column list_UInt8") {
			t.Errorf("%s: %v", text, err)
		}
	}
}

// What is imported stays, however old it is.
func TestOldRowsAreKept(t *testing.T) {
	e := startEngine(t)
	l := newLoader(t, e)
	if err := l.Keep(t.Context()); err != nil {
		t.Fatal(err)
	}
	load(t, l, []byte(`{"kvstrata_history":1,"since":"2010-11-29T18:00:00Z","until":"2010-11-29T19:00:00Z"}
{"table":"block_events","committed":"2010-11-29T18:00:00Z","source":"default.m.e.0.engine","epoch":"1","seq":"1","ev":0,"pos":0,"op":"STORED"}
{"kvstrata_end":{"block_events":1}}`))
	conn := connect(t, e.config())
	if err := conn.Exec(t.Context(), "OPTIMIZE TABLE block_events FINAL"); err != nil {
		t.Fatal(err)
	}
	var n uint64
	if err := conn.QueryRow(t.Context(), "SELECT count() FROM block_events").Scan(&n); err != nil || n != 1 {
		t.Errorf("%d rows, %v", n, err)
	}
}

// What is there already is found before it is told twice.
func TestOverlapsAreFound(t *testing.T) {
	e, since, until := busyDay(t)
	lines := dumpLines(t, newReader(t, e.config()), window(since, until), "ledger")
	l := newLoader(t, e)
	r, err := archive.NewLineReader(bytes.NewReader(lines), l.Tables())
	c := history.NewContents()
	for err == nil {
		var row archive.Row
		if row, err = r.Next(); err == nil {
			err = l.Check(c, row)
		}
	}
	if !errors.Is(err, io.EOF) {
		t.Fatal(err)
	}
	if table, err := l.Overlaps(t.Context(), c); err != nil || table != "ledger" {
		t.Errorf("%q, %v", table, err)
	}
	if live, err := l.Live(t.Context()); err != nil || !live {
		t.Errorf("live %v, %v", live, err)
	}
	if table, err := l.Overlaps(t.Context(), history.NewContents()); err != nil || table != "" {
		t.Errorf("%q, %v", table, err)
	}
	if err := l.Begin(t.Context(), "cut"); err != nil {
		t.Fatal(err)
	}
	if err := l.Imported(t.Context(), "other"); !errors.Is(err, history.ErrInterrupted) {
		t.Error(err)
	}
}

// What was counted by time before rows came from a file is not believed, and counted again.
func TestImportedRowsAreCounted(t *testing.T) {
	from, since, until := busyDay(t)
	file := dumpLines(t, newReader(t, from.config()), window(since, until))
	e := startEngine(t)
	w, stop := startWriter(t, e.config())
	resume(t, w)
	live := fleet(until.Add(-time.Second), "", "", "", "live")[3] // behind all that is in the file, in time and in the stream
	feed(t, w, live.publish(run(event.Stored, 1, 2)))
	live.now = live.now.Add(2 * time.Minute)
	feed(t, w, live.publish(run(event.Stored, 3)))
	committed(t, w, live.messages[1])
	rolledUp(t, e, w)
	stop()
	events := func(count func(*history.Reader)) string {
		t.Helper()
		r := newReader(t, e.config())
		count(r)
		a, err := r.Ask(t.Context(), "engines", window(since, until.Add(time.Hour)))
		if err != nil {
			t.Fatal(err)
		}
		return fmt.Sprint(a.Rows)
	}
	alone := events((*history.Reader).RowsOnly)
	load(t, newLoader(t, e), file)
	want := events((*history.Reader).RowsOnly)
	if got := events(func(*history.Reader) {}); got != want || got == alone {
		t.Errorf("%s, want %s", got, want)
	}
	w, _ = startWriter(t, e.config())
	resume(t, w)
	feed(t, w, live.publish(run(event.Stored, 4)))
	committed(t, w, live.messages[2])
	rolledUp(t, e, w)
	want = events((*history.Reader).RowsOnly)
	if got := events(func(*history.Reader) {}); got != want {
		t.Errorf("counted again: %s, want %s", got, want)
	}
}
