package embedded_test

import (
	"context"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"kvstrata/indexer/history/embedded"
)

func TestReadPoolsRefuse(t *testing.T) {
	r := start(t, config(""))
	w := r.open(t, embedded.Writer)
	exec(t, w, numbersTable)
	dir := t.TempDir()
	secret := filepath.Join(dir, "secret")
	if err := os.WriteFile(secret, []byte("the secret"), 0o600); err != nil {
		t.Fatal(err)
	}
	out := filepath.Join(dir, "out")
	quoted := "'" + secret + "'"
	statements := []string{
		"SELECT 1 INTO OUTFILE '" + out + "'",
		"SELECT 1 UNION ALL SELECT 2 INTO/**/OUTFILE '" + out + "' AND STDOUT",
		"EXPLAIN SELECT 1 INTO OUTFILE '" + out + "'",
		"SHOW TABLES INTO OUTFILE '" + out + "'",
		"SELECT 1 INTO OUTFILE '" + out + "'; SELECT FROM FROM",
		"SELECT * FROM file(" + quoted + ", 'LineAsString')",
		"SELECT file(" + quoted + ")",
		"SELECT FiLe(" + quoted + ")",
		"SELECT `f\\x69le`(" + quoted + ")",
		`SELECT "file"(` + quoted + ")",
		"SELECT file /* */ (" + quoted + ")",
		"SELECT * APPLY(file) FROM (SELECT " + quoted + ")",
		"SELECT arrayMap(file, [" + quoted + "])",
		"SELECT arrayMap(x -> file(x), [" + quoted + "])",
		"EXPLAIN SELECT file(" + quoted + ")",
		"WITH (SELECT file(" + quoted + ")) AS x SELECT x",
		"SELECT * FROM eval('SELECT fi' || 'le(''" + secret + "'')')",
		"SELECT arrayMap({f:Identifier}, [" + quoted + "])",
		"SELECT b FROM generateRandom('a UInt8, b String ALIAS fi' || 'le(''" + secret + "'')') LIMIT 1",
		"SELECT b FROM values('a UInt8, b String ALIAS fi' || 'le(''" + secret + "'')', 1)",
		"SELECT * FROM format('JSONEachRow', 'a UInt8, b String DEFAULT fi' || 'le(''" + secret + "'')', '{\"a\":1}')",
		"DESCRIBE TABLE url('http://127.0.0.1:1/a.csv')",
		"DESCRIBE TABLE `url`('http://127.0.0.1:1/a.csv')",
		"DESCRIBE TABLE s3('http://127.0.0.1:1/a.csv')",
		"DESCRIBE TABLE file(" + quoted + ", 'LineAsString')",
		"EXPLAIN TABLE OVERRIDE mysql('127.0.0.1:1', 'a', 'b', 'c', 'd') COLUMNS (x UInt8)",
		"SELECT 1 PARALLEL WITH SELECT 2",
		"SELECT * FROM url('http://127.0.0.1:1/', 'LineAsString')",
		"SELECT * FROM s3('http://127.0.0.1:1/a', 'CSV')",
		"SELECT * FROM remote('127.0.0.1:1', system.one)",
		"SELECT * FROM executable('x', 'TSV', 'a String')",
		"SELECT * FROM sqlite('x', 'y')",
		"SELECT * FROM filesystem('/')",
		"INSERT INTO numbers VALUES (1, 1)",
		"INSERT INTO numbers SELECT 1, 1",
		"INSERT INTO FUNCTION file('" + out + "', 'CSV', 'a UInt8') VALUES (1)",
		"DROP TABLE numbers",
		"TRUNCATE TABLE numbers",
		"ALTER TABLE numbers DELETE WHERE 1",
		"OPTIMIZE TABLE numbers",
		"CREATE TABLE x (a UInt8) ENGINE = Memory",
		"CREATE TEMPORARY TABLE x (a UInt8)",
		"CREATE FUNCTION f AS x -> x",
		"SET readonly = 0",
		"SET max_memory_usage = 0",
		"SELECT 1 SETTINGS readonly = 0",
		"SELECT 1 SETTINGS max_execution_time = 1000",
		"USE system",
		"KILL QUERY WHERE 1",
		"SYSTEM RELOAD CONFIG",
		"SYSTEM SHUTDOWN",
		"BACKUP DATABASE default TO File('" + out + "')",
		"ATTACH TABLE x",
		"DETACH TABLE numbers",
		"GRANT ALL ON *.* TO default",
		"SELECT 1; SELECT 2",
		"SELECT 1; DROP TABLE numbers",
		"EXPLAIN DROP TABLE numbers; DROP TABLE numbers",
	}
	for _, pool := range []embedded.Pool{embedded.Dashboard, embedded.Free, ""} {
		for _, sql := range statements {
			got := r.post(t, pool, "param_f=file", sql)
			if got.status != 500 || got.code == "" || strings.Contains(got.body, "the secret") {
				t.Errorf("%s pool: %s: %v", pool, sql, got)
			}
		}
		for _, query := range []string{
			"max_memory_usage=0", "readonly=0", "max_threads=1", "compress=1", "max_execution_time=soon", "insert_deduplication_token=a",
			"query=" + url.QueryEscape("INSERT INTO numbers FORMAT TSV"),
		} {
			if got := r.post(t, pool, query, "SELECT 1"); got.status != 500 {
				t.Errorf("%s pool: %s: %v", pool, query, got)
			}
		}
		// A connection remembers nothing of what was refused.
		if got := r.post(t, pool, "", "SELECT count(), getSetting('readonly'), currentDatabase() FROM numbers"); got.body != "0\t1\tdefault\n" {
			t.Errorf("%s pool afterwards: %v", pool, got)
		}
	}
	if _, err := os.Stat(filepath.Join(r.dir, "x")); !os.IsNotExist(err) { // sqlite() made its file before it was refused
		t.Errorf("a file in the data folder: %v", err)
	}
	if files, err := os.ReadDir(dir); err != nil || len(files) != 1 {
		t.Errorf("files were written: %v, %v", files, err)
	}
}

func TestReadPoolsRead(t *testing.T) {
	r := start(t, config(""))
	exec(t, r.open(t, embedded.Writer), numbersTable)
	for _, tt := range []struct{ query, sql, want string }{
		{"", "SELECT 'file(x)', 'eval' -- file()", "file(x)\teval\n"},
		{"", "SELECT count() FROM numbers;", "0\n"},
		{"", "SELECT sum(number) FROM numbers(4)", "6\n"},
		{"", "SELECT format('{} {}', 'a', 'b'), 1 AS url, 2 AS identifier", "a b\t1\t2\n"},
		{"param_t=numbers", "SELECT count() FROM merge('default', {t:String})", "0\n"},
		{"", "SHOW TABLES", "numbers\n"},
		{"", "EXISTS TABLE numbers", "1\n"},
		{"", "WITH x AS (SELECT 1 AS a) SELECT a FROM x", "1\n"},
		{"", "(SELECT 1)", "1\n"},
		{"", "SELECT a FROM numbers", ""},
		{"max_execution_time=5", "SELECT 1", "1\n"},
		{"default_format=CSVWithNames", "SELECT a FROM numbers", "\"a\"\n"},
		{"query=" + url.QueryEscape("SELECT 1"), "", "1\n"},
	} {
		if got := r.post(t, embedded.Free, tt.query, tt.sql); got.status != 200 || got.body != tt.want {
			t.Errorf("%s %s: %v, want %q", tt.query, tt.sql, got, tt.want)
		}
	}
	// A format with a head comes once, whatever the size.
	body := r.post(t, embedded.Free, "", "SELECT number FROM numbers(200000) FORMAT CSVWithNames").body
	if heads := strings.Count(body, "number"); heads != 1 || strings.Count(body, "\n") != 200_001 {
		t.Errorf("%d heads, %d lines", heads, strings.Count(body, "\n"))
	}
}

func TestASyntaxErrorTellsItsPlace(t *testing.T) {
	r := start(t, config(""))
	for _, pool := range []embedded.Pool{embedded.Free, embedded.Writer} {
		if got := r.post(t, pool, "", "SELECT 1 1"); got.code != "62" || !strings.Contains(got.body, "position 10") {
			t.Errorf("%s: %v", pool, got)
		}
		if got := r.post(t, pool, "", "SELECT * FROM nowhere"); got.code != "60" || strings.Contains(got.body, "kvstrata:") {
			t.Errorf("%s: %v", pool, got)
		}
	}
}

func TestTheWriterKeepsNoSettings(t *testing.T) {
	r := start(t, config(""))
	for _, sql := range []string{"SET max_threads = 1", " /* a */ use system", "-- b\nSET max_threads = 1"} {
		if got := r.post(t, embedded.Writer, "", sql); got.status != 500 {
			t.Errorf("%s: %v", sql, got)
		}
	}
	const threads = "SELECT getSetting('max_threads')"
	before := r.post(t, embedded.Writer, "", threads)
	if got := r.post(t, embedded.Writer, "max_threads=77", threads); got.body != "77\n" {
		t.Errorf("with the request's setting: %v", got)
	}
	if got := r.post(t, embedded.Writer, "max_threads=77", "SELECT nothing"); got.status != 500 {
		t.Errorf("a statement that fails: %v", got)
	}
	if got := r.post(t, embedded.Writer, "", threads); got != before {
		t.Errorf("the setting leaks: %v, before %v", got, before)
	}
	if got := r.post(t, embedded.Writer, "max_memory_usage=1", "SELECT 1"); got.status != 500 || got.code != "115" {
		t.Errorf("a setting that no request may bring: %v", got)
	}
}

func TestMemoryIsRefusedAndTheChildSurvives(t *testing.T) {
	cfg := config("")
	cfg.Limits.Memory, cfg.Limits.QueryMemory, cfg.Limits.AnswerBytes = 600<<20, 100<<20, 16<<20
	r := start(t, cfg)
	pid := r.PID()
	for _, tt := range []struct {
		name string
		pool embedded.Pool
		sql  string
		code string
		text string
	}{
		{"a query's memory", embedded.Free, "SELECT groupArray(number) FROM numbers(1000000000)", "241", "Query memory limit"},
		{"the process's memory", embedded.Writer, "SELECT groupArray(number) FROM numbers(1000000000)", "241", "memory limit"},
		{"an answer in one piece", embedded.Free, "SELECT number FROM numbers(100000000) FORMAT JSON", "396", "result"},
		{"an answer in one piece that outgrows the process", embedded.Writer, "SELECT number FROM numbers(1000000000) FORMAT JSON", "241", "memory limit"},
		{"an answer in pieces", embedded.Free, "SELECT number FROM numbers(100000000)", "", "__exception__"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := r.post(t, tt.pool, "", tt.sql); got.code != tt.code || !strings.Contains(got.body, tt.text) {
				t.Errorf("got %v", got)
			}
			if got := r.post(t, tt.pool, "", "SELECT 1"); got.body != "1\n" {
				t.Errorf("afterwards: %v", got)
			}
		})
	}
	if r.PID() != pid {
		t.Error("the child died")
	}
}

func TestInsertsAndStatementsAreBounded(t *testing.T) {
	cfg := config("")
	cfg.Limits.InsertBytes = 1 << 20
	r := start(t, cfg)
	exec(t, r.open(t, embedded.Writer), numbersTable)
	insert := "query=" + url.QueryEscape("INSERT INTO numbers FORMAT TSV")
	for _, tt := range []struct{ name, query, sql, code string }{
		{"a large INSERT", insert, strings.Repeat("1\t2\n", 300_000), "307"},
		{"broken data", insert, "1\t2\nx", "27"},
		{"a long statement", "", "INSERT INTO numbers VALUES " + strings.Repeat("(1,1),", 50_000) + "(1,1)", "62"},
		{"no statement", "", " ", "62"},
		{"no such table", "query=" + url.QueryEscape("INSERT INTO nowhere FORMAT TSV"), strings.Repeat("1\t2\n", 100_000), "60"},
	} {
		if got := r.post(t, embedded.Writer, tt.query, tt.sql); got.status != 500 || got.code != tt.code {
			t.Errorf("%s: %v, want code %s", tt.name, got, tt.code)
		}
	}
	if got := r.post(t, embedded.Writer, "", "SELECT count() FROM numbers"); got.body != "0\n" {
		t.Errorf("rows of refused INSERTs: %v", got)
	}
	if got := r.post(t, embedded.Free, "", "SELECT query FROM system.processes WHERE query LIKE '%INSERT%' AND query NOT LIKE '%processes%'"); got.body != "" {
		t.Errorf("refused INSERTs that go on: %v", got)
	}
	if got := r.post(t, embedded.Writer, insert, "1\t2\n"); got.status != 200 {
		t.Errorf("an INSERT afterwards: %v", got)
	}
}

// slow takes longer than any test.
const slow = "SELECT max(sipHash64(number)) FROM numbers(100000000000)"

func TestAQueueIsBounded(t *testing.T) {
	cfg := config("")
	cfg.Limits.Queue, cfg.Limits.QueueWait = 1, 200*time.Millisecond
	r := start(t, cfg)
	answers := make(chan string, 3)
	for range 3 { // one runs, one waits, one finds the queue full
		go func() {
			got, err := r.send(t.Context(), embedded.Free, "/?max_execution_time=2", slow)
			answers <- fmt.Sprint(got.status, " ", got.code, " ", err)
		}()
	}
	got := make(map[string]int)
	for range 3 {
		got[<-answers]++
	}
	if diff := cmp.Diff(map[string]int{"503 202 <nil>": 2, "500 159 <nil>": 1}, got); diff != "" {
		t.Error(diff)
	}
}

func TestAQueryEndsWithItsClient(t *testing.T) {
	cfg := config("")
	cfg.Limits.QueryTime = 10 * time.Minute
	r := start(t, cfg)
	for _, sql := range []string{slow, slow + " FORMAT JSON", "SELECT number, sipHash64(number) FROM numbers(100000000000)"} {
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() {
			_, err := r.send(ctx, embedded.Free, "/", sql)
			done <- err
		}()
		running := func() bool {
			return r.post(t, embedded.Writer, "", "SELECT count() FROM system.processes WHERE query LIKE '%1000000000%' AND query NOT LIKE '%processes%'").body == "1\n"
		}
		eventually(t, "running", running)
		cancel()
		if err := <-done; err == nil {
			t.Errorf("%s: it was answered", sql)
		}
		eventually(t, "ended", func() bool { return !running() })
	}
}
