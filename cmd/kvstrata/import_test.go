package main

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"kvstrata/event"
	"kvstrata/indexer/history"
	"kvstrata/indexer/history/embedded"
)

// put writes a file.
func put(t *testing.T, dir, name string, parts ...string) string {
	t.Helper()
	path := filepath.Join(dir, name)
	if err := os.WriteFile(path, []byte(strings.Join(parts, "")), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func packed(t *testing.T, text string) string {
	t.Helper()
	var out bytes.Buffer
	w := gzip.NewWriter(&out)
	if _, err := w.Write([]byte(text)); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return out.String()
}

// well runs a command that must succeed, and returns what it prints.
func well(t *testing.T, args ...string) string {
	t.Helper()
	got := command(t, append(args, "--log-level", "warn")...)
	if got.code != exitOK || got.stderr != "" {
		t.Fatalf("kvstrata %s: %d\n%s%s", strings.Join(args, " "), got.code, got.stdout, got.stderr)
	}
	return got.stdout
}

// dynamoStores is a line of Dynamo's recorder: a worker stores the next block of a chain. Blocks are of 16 equal tokens.
func dynamoStores(ms, worker, id, block, parent int) string {
	local := event.LocalHash(tokensOf(block), event.Hasher{}.Seed("", ""))
	under := "null"
	if parent > 0 {
		under = fmt.Sprint(parent)
	}
	return fmt.Sprintf(`{"timestamp":%d,"event":{"worker_id":%d,"storage_tier":"device","event":{"event_id":%d,"data":{"stored":{"parent_hash":%s,"blocks":`+
		`[{"block_hash":%d,"tokens_hash":%d,"mm_extra_info":null}]}},"dp_rank":0}}}`+"\n", ms, worker, id, under, block, local)
}

func dynamoRemoves(ms, worker, id, block int) string {
	return fmt.Sprintf(`{"timestamp":%d,"event":{"worker_id":%d,"storage_tier":"device","event":{"event_id":%d,"data":{"removed":{"block_hashes":[%d]}},"dp_rank":0}}}`+"\n",
		ms, worker, id, block)
}

func tokensOf(block int) []uint32 {
	tokens := make([]uint32, 16)
	for i := range tokens {
		tokens[i] = uint32(block)
	}
	return tokens
}

// chainOf returns the prefix hashes of a chain of such blocks, as SQL writes them.
func chainOf(blocks ...int) (hashes []string) {
	var last event.PrefixHash
	for _, b := range blocks {
		local := event.LocalHash(tokensOf(b), event.Hasher{}.Seed("", ""))
		if last == 0 {
			last = event.PrefixHash(local)
		} else {
			last = event.Chain(last, local)
		}
		hashes = append(hashes, last.String())
	}
	return hashes
}

const eventsOf = `SELECT toString(committed) AS at, source, op, leftPad(lower(hex(hash)), 16, '0') AS prefix, named, effect, copies FROM block_events ORDER BY committed, source, seq`

// What Dynamo's recorder wrote last week is a history of last week: two workers, one of which began anew, and a line that was lost.
func TestImportOfDynamosRecorder(t *testing.T) {
	dir := t.TempDir()
	began := time.Now().UTC().AddDate(0, 0, -7).Truncate(time.Hour)
	file := put(t, dir, "recorder.jsonl",
		dynamoStores(0, 7, 0, 1, 0), dynamoStores(1000, 7, 1, 2, 1), dynamoStores(1500, 9, 0, 1, 0), dynamoRemoves(61_000, 7, 2, 2),
		dynamoStores(62_000, 7, 5, 4, 0), // 3 and 4 never came
		dynamoStores(63_000, 7, 0, 1, 0)) // another life
	data := filepath.Join(dir, "history")
	said := well(t, "import", file, "--data", data, "--model", "m", "--block", "16", "--began", began.Format(time.RFC3339))
	for _, want := range []string{"Dynamo recorder, 6 lines", "m@worker-7 ", "m@worker-9 "} {
		if !strings.Contains(said, want) {
			t.Errorf("%q is not said:\n%s", want, said)
		}
	}
	chain, four := chainOf(1, 2), chainOf(4)[0]
	row := func(second int, worker, op, prefix, rest string) string {
		return began.Add(time.Duration(second)*time.Second).Format("2006-01-02 15:04:05") + ",default.m.worker-" + worker + ".0.engine," + op + "," + prefix + "," + rest
	}
	const nothing = "0000000000000000"
	want := []string{
		"at,source,op,prefix,named,effect,copies",
		row(0, "7", "STORED", chain[0], "1,1,-1"), row(1, "7", "STORED", chain[1], "1,1,-1"), row(1, "9", "STORED", chain[0], "1,1,-1"),
		row(61, "7", "EVICTED", chain[1], "1,-1,-1"), row(62, "7", "CLEARED", nothing, "0,0,-1"), row(62, "7", "STORED", four, "1,1,-1"),
		row(63, "7", "STORED", chain[0], "1,1,-1"),
	}
	got := strings.Split(strings.TrimSpace(well(t, "sql", "--data", data, "--format", "csv", eventsOf)), "\n")
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	lost := well(t, "sql", "--data", data, "--format", "csv", "SELECT toString(committed) AS at, seq, last FROM ledger WHERE kind = 'lost'")
	if want := "at,seq,last\n" + began.Add(62*time.Second).Format("2006-01-02 15:04:05.000000") + ",3,4\n"; lost != want {
		t.Errorf("lost %q, want %q", lost, want)
	}

	// It answers, is exported, and that is imported and answers alike.
	during := []string{"--since", began.Format(time.RFC3339), "--until", began.Add(time.Hour).Format(time.RFC3339)}
	export := filepath.Join(dir, "export.jsonl.gz")
	well(t, append([]string{"export", "--data", data, "--format", "jsonl", "-o", export}, during...)...)
	tables := filepath.Join(dir, "tables")
	well(t, append([]string{"export", "--data", data, "--format", "parquet", "-o", tables}, during...)...)
	for _, from := range []string{export, tables} {
		copied := from + ".history"
		well(t, "import", from, "--data", copied)
		whole := func(data string) string {
			return well(t, append([]string{"export", "--data", data, "--format", "jsonl"}, during...)...)
		}
		if diff := cmp.Diff(whole(data), whole(copied)); diff != "" {
			t.Errorf("%s: %s", from, diff)
		}
		for _, name := range []string{"events", "engines", "loss"} {
			ask := func(data string) any {
				var a history.Answer
				if err := json.Unmarshal([]byte(well(t, append([]string{"query", name, "--data", data, "--format", "json"}, during...)...)), &a); err != nil {
					t.Fatal(err)
				}
				if len(a.Rows) == 0 {
					t.Errorf("%s answers nothing", name)
				}
				return a.Rows
			}
			if diff := cmp.Diff(ask(data), ask(copied)); diff != "" {
				t.Errorf("%s of %s: %s", name, from, diff)
			}
		}
		if story := well(t, "explain", chain[1], "--data", copied); !strings.Contains(story, "EVICTED") {
			t.Errorf("the story is\n%s", story)
		}
	}
}

// rawFrames are frames of SGLang's publisher as its socket brought them, and a replay's.
func rawFrames(t *testing.T) (lines string) {
	t.Helper()
	text, err := os.ReadFile("../../subscriber/testdata/sglang/frames.json")
	if err != nil {
		t.Fatal(err)
	}
	var all []json.RawMessage
	if err := json.Unmarshal(text, &all); err != nil {
		t.Fatal(err)
	}
	for _, line := range all {
		if strings.Contains(string(line), `"0.5.23"`) {
			lines += string(line) + "\n"
		}
	}
	return lines
}

func TestImportOfRawFrames(t *testing.T) {
	dir := t.TempDir()
	file := put(t, dir, "frames.jsonl.gz", packed(t, rawFrames(t)))
	data := filepath.Join(dir, "history")
	said := well(t, "import", file, "--data", data, "--model", "m", "--instance", "e", "--began", "2026-11-20T10:00:00Z")
	if !strings.Contains(said, "raw frames, 6 lines") || !strings.Contains(said, "m@e  3 batches, 3 block operations; 0 sequences lost, 0 lines malformed, 2 told twice; live") {
		t.Errorf("said\n%s", said)
	}
	rows := well(t, "sql", "--data", data, "--format", "csv", "SELECT toString(committed) AS at, source, seq, op, named, effect FROM block_events ORDER BY seq")
	want := "at,source,seq,op,named,effect\n"
	for seq := range 3 {
		want += fmt.Sprintf("2026-11-20 10:00:00,default.m.e.0.engine,%d,STORED,1,1\n", seq)
	}
	if diff := cmp.Diff(want, rows); diff != "" {
		t.Error(diff)
	}
}

// What can't be imported is told in a line that says what to do, and leaves nothing behind that could be taken for a history.
func TestImportRefuses(t *testing.T) {
	dir := t.TempDir()
	if err := os.Mkdir(filepath.Join(dir, "empty"), 0o700); err != nil {
		t.Fatal(err)
	}
	head := `{"kvstrata_history":1,"since":"2026-11-20T10:00:00Z","until":"2026-11-20T11:00:00Z"}` + "\n"
	row := `{"table":"loads","committed":"2026-11-20T10:00:00.000000Z","source":"default.m.e.0.engine","epoch":"1","seq":"1","ev":0}` + "\n"
	end := `{"kvstrata_end":{"loads":1}}` + "\n"
	dynamo := dynamoStores(0, 7, 0, 1, 0)
	for i, tt := range []struct {
		name, text string
		args       []string
		code       int
		want       string
	}{
		{"nothing.jsonl", "", nil, exitFailure, "neither an export"},
		{"other.txt", "hello\n", nil, exitFailure, "neither an export"},
		{"cut.jsonl", head + row, nil, exitFailure, "cut off"},
		{"cut.jsonl.gz", packed(t, head+row+end)[:90], nil, exitFailure, "unexpected EOF"},
		{"rows.parquet", "PAR1 and no more", nil, exitFailure, "cut off"},
		{"line.jsonl", head + row + row[:50] + "\n" + end, nil, exitFailure, "line 3: not a JSON object"},
		{"type.jsonl", head + strings.Replace(row, `"seq":"1"`, `"seq":1`, 1) + end, nil, exitFailure, "line 2: column seq"},
		{"table.jsonl", head + strings.Replace(row, "loads", "users", 1) + end, nil, exitFailure, `line 2: no table "users"`},
		{"source.jsonl", head + strings.Replace(row, "default.m.e", "default.m", 1) + end, nil, exitFailure, "line 2: column source"},
		{"bomb.jsonl.gz", packed(t, head+strings.Repeat("x", 65<<20)+"\n"), nil, exitFailure, "line 2: a line of more than 64 MiB"},
		{"model.jsonl", dynamo, nil, exitUsage, "--model"},
		{"block.jsonl", dynamo, []string{"--model", "m"}, exitUsage, "--block"},
		{"began.jsonl", dynamo, []string{"--model", "m", "--block", "16", "--began", "yesterday"}, exitUsage, "--began"},
		{"dialect.jsonl", dynamo, []string{"--model", "m", "--block", "16", "--dialect", "latin"}, exitUsage, "--dialect"},
		{"workers.jsonl", dynamo + dynamoStores(1, 8, 0, 1, 0), []string{"--model", "m", "--block", "16", "--instance", "e"}, exitUsage, "workers 7 and 8"},
		{"mixed.jsonl", dynamo + rawFrames(t), []string{"--model", "m", "--block", "16"}, exitFailure, "line 2: a line of raw frames in a recording of Dynamo recorder"},
		{"broken.jsonl", dynamo + `{"timestamp":1,` + "\n", []string{"--model", "m", "--block", "16"}, exitFailure, "line 2: not a JSON object"},
		{"empty", "", nil, exitUsage, "a folder without"},
		{"missing", "", nil, exitUsage, "no such file"},
	} {
		file := filepath.Join(dir, tt.name)
		if tt.name != "empty" && tt.name != "missing" {
			file = put(t, dir, tt.name, tt.text)
		}
		data := filepath.Join(dir, fmt.Sprint("history", i))
		got := command(t, append([]string{"import", file, "--data", data, "--log-level", "warn"}, tt.args...)...)
		if got.code != tt.code || !strings.Contains(got.stderr, tt.want) || strings.Count(got.stderr, "\n") != 1 {
			t.Errorf("%s: %d %s, want %d and %q", tt.name, got.code, got.stderr, tt.code, tt.want)
		}
		if got := command(t, "sql", "--data", data, "--format", "csv", "SELECT count() FROM loads UNION ALL SELECT count() FROM block_events"); got.code == exitOK &&
			got.stdout != "count()\n0\n0\n" {
			t.Errorf("%s: in history are\n%s", tt.name, got.stdout)
		}
	}
}

// A recording goes to no place where another writer is, or was: history has one.
func TestImportOfARecordingKeepsApart(t *testing.T) {
	dir := t.TempDir()
	data := filepath.Join(dir, "data")
	file := put(t, dir, "a.jsonl", dynamoStores(0, 7, 0, 1, 0))
	p := start(t, append([]string{"run", "--roles", "history", "--data", data, "--log-level", "error"}, anyPorts...)...)
	admin := p.says(`admin +(http://\S+)`)
	eventually(t, "history is ready", func() bool { return string(fetch(t, admin+"/readyz")) == "ready\n" }, p.output)
	for _, where := range [][]string{{"--data", data}, {"--clickhouse", "unix://" + embedded.SocketPath(engineDir(data))}} {
		got := command(t, append([]string{"import", file, "--append", "--model", "m", "--block", "16"}, where...)...)
		if got.code != exitUsage || !strings.Contains(got.stderr, "open in another process") {
			t.Errorf("%v: %+v", where, got)
		}
	}
}

// A file goes in once, and not beside others unless told so; bad lines are passed over when asked.
func TestImportOnce(t *testing.T) {
	dir := t.TempDir()
	data := filepath.Join(dir, "history")
	file := put(t, dir, "a.jsonl", dynamoStores(0, 7, 0, 1, 0), "{broken\n", dynamoStores(1, 7, 1, 2, 1))
	recording := func(file string, more ...string) outcome {
		return command(t, append([]string{"import", file, "--data", data, "--model", "m", "--block", "16", "--log-level", "warn"}, more...)...)
	}
	count := func(want string) {
		t.Helper()
		if got := well(t, "sql", "--data", data, "--format", "csv", "SELECT count() AS n FROM block_events"); got != "n\n"+want+"\n" {
			t.Errorf("%s events, want %s", got, want)
		}
	}
	if got := recording(file, "--skip-bad"); got.code != exitOK || !strings.Contains(got.stdout, "1 lines passed over\n    line 2: ") {
		t.Fatalf("%d %s%s", got.code, got.stdout, got.stderr)
	}
	count("2")
	again := put(t, dir, "b.jsonl", dynamoStores(0, 7, 0, 3, 0))
	other := put(t, dir, "c.jsonl", dynamoStores(0, 8, 0, 3, 0))
	for _, tt := range []struct {
		file string
		args []string
		code int
		want string
	}{
		{file, []string{"--append", "--skip-bad"}, exitFailure, "before"},
		{other, nil, exitUsage, "--append"},
		{again, []string{"--append"}, exitUsage, "history of m@worker-7 already"},
		{other, []string{"--append"}, exitOK, ""},
		{again, []string{"--append", "--instance", "second"}, exitOK, ""},
	} {
		if got := recording(tt.file, tt.args...); got.code != tt.code || !strings.Contains(got.stderr, tt.want) {
			t.Errorf("%s %v: %d %s, want %d and %q", tt.file, tt.args, got.code, got.stderr, tt.code, tt.want)
		}
	}
	count("4")
	export := filepath.Join(dir, "export.jsonl")
	well(t, "export", "--data", data, "--since", "1d", "--format", "jsonl", "-o", export)
	if got := command(t, "import", export, "--data", data, "--append"); got.code != exitUsage || !strings.Contains(got.stderr, "told twice") {
		t.Errorf("%d %s", got.code, got.stderr)
	}
	count("4")
	if got := command(t, "export", "--data", data, "--since", "1d", "--format", "jsonl", "-o", export); got.code != exitUsage || !strings.Contains(got.stderr, "--force") {
		t.Errorf("%d %s", got.code, got.stderr)
	}
	well(t, "export", "--data", data, "--since", "1d", "--format", "jsonl", "-o", export, "--force")
	if got := command(t, "export", "--data", data, "--format", "jsonl", "--table", "block_event"); got.code != exitUsage || !strings.Contains(got.stderr, `did you mean "block_events"`) {
		t.Errorf("%d %s", got.code, got.stderr)
	}
}
