package embedded_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ClickHouse/clickhouse-go/v2"
	"github.com/google/go-cmp/cmp"

	"kvstrata/indexer/history/embedded"
)

func TestTypesRoundTrip(t *testing.T) {
	r := start(t, config(""))
	w := r.open(t, embedded.Writer)
	exec(t, w, `CREATE TABLE types (
		n UInt64, worker LowCardinality(String), at DateTime64(6), kind Enum8('STORED' = 1, 'EVICTED' = 2),
		tokens Array(UInt32), parent Nullable(UInt64), labels Map(String, UInt64), text String
	) ENGINE = MergeTree ORDER BY n`)
	type row struct {
		N      uint64
		Worker string
		At     time.Time
		Kind   string
		Tokens []uint32
		Parent *uint64
		Labels map[string]uint64
		Text   string
	}
	parent := uint64(1<<64 - 1)
	want := []row{
		{1<<64 - 1, "w1", time.UnixMicro(1764446400123456).UTC(), "EVICTED", []uint32{1, 2, 1<<32 - 1}, &parent, map[string]uint64{"a": 1}, "x'\\\n\x00é"},
		{0, "", time.UnixMicro(0).UTC(), "STORED", []uint32{}, nil, map[string]uint64{}, ""},
	}
	batch, err := w.PrepareBatch(t.Context(), "INSERT INTO types")
	if err != nil {
		t.Fatal(err)
	}
	for _, v := range want {
		if err := batch.Append(v.N, v.Worker, v.At, v.Kind, v.Tokens, v.Parent, v.Labels, v.Text); err != nil {
			t.Fatal(err)
		}
	}
	if err := batch.Send(); err != nil {
		t.Fatal(err)
	}
	for _, pool := range []embedded.Pool{embedded.Writer, embedded.Dashboard, embedded.Free} {
		t.Run(string(pool), func(t *testing.T) {
			rows, err := r.open(t, pool).Query(t.Context(), "SELECT * FROM types ORDER BY n DESC")
			if err != nil {
				t.Fatal(err)
			}
			defer rows.Close()
			var got []row
			for rows.Next() {
				var v row
				if err := rows.Scan(&v.N, &v.Worker, &v.At, &v.Kind, &v.Tokens, &v.Parent, &v.Labels, &v.Text); err != nil {
					t.Fatal(err)
				}
				v.At = v.At.UTC()
				got = append(got, v)
			}
			if err := rows.Err(); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// fill inserts rows with the numbers from first on.
func fill(ctx context.Context, conn clickhouse.Conn, table string, first, n int) error {
	batch, err := conn.PrepareBatch(ctx, "INSERT INTO "+table+" (a, b)")
	if err != nil {
		return err
	}
	numbers := make([]uint64, n)
	for i := range numbers {
		numbers[i] = uint64(first + i)
	}
	if err := errors.Join(batch.Column(0).Append(numbers), batch.Column(1).Append(numbers)); err != nil {
		return err
	}
	return batch.Send()
}

const numbersTable = "CREATE TABLE numbers (a UInt64, b UInt64) ENGINE = MergeTree ORDER BY a SETTINGS non_replicated_deduplication_window = 100"

func TestAnInsertIsNotCut(t *testing.T) {
	r := start(t, config(""))
	w := r.open(t, embedded.Writer)
	exec(t, w, numbersTable)
	const rows = 200_000 // 3.2 MB, more than max_query_size by far
	if err := fill(t.Context(), w, "numbers", 0, rows); err != nil {
		t.Fatal(err)
	}
	var n, sum uint64
	if err := w.QueryRow(t.Context(), "SELECT count(), sum(b) FROM numbers").Scan(&n, &sum); err != nil {
		t.Fatal(err)
	}
	if n != rows || sum != rows*(rows-1)/2 {
		t.Errorf("%d rows with the sum %d, want %d with %d", n, sum, rows, rows*(rows-1)/2)
	}
}

func TestTheDeduplicationTokenCountsForOneInsert(t *testing.T) {
	r := start(t, config(""))
	w := r.open(t, embedded.Writer)
	exec(t, w, numbersTable)
	token := func(s string) context.Context {
		return clickhouse.Context(t.Context(), clickhouse.WithSettings(clickhouse.Settings{"insert_deduplication_token": s}))
	}
	for i, step := range []struct {
		ctx  context.Context
		want uint64
	}{
		{token("one's"), 10},
		{token("one's"), 10},
		{token("two"), 20},
		{t.Context(), 30}, // other rows without a token: that of the last does not stick
		{t.Context(), 40},
	} {
		if err := fill(step.ctx, w, "numbers", 100*i, 10); err != nil {
			t.Fatal(err)
		}
		if n := count(t, w, "numbers"); n != step.want {
			t.Errorf("step %d: %d rows, want %d", i, n, step.want)
		}
	}
}

func TestParametersAreBound(t *testing.T) {
	r := start(t, config(""))
	text := "it's\t`a` \\ {x:UInt8}\n-- \x00 /* */"
	for _, pool := range []embedded.Pool{embedded.Writer, embedded.Dashboard, embedded.Free} {
		t.Run(string(pool), func(t *testing.T) {
			var (
				number uint64
				back   string
				list   []uint64
				at     time.Time
			)
			want := time.UnixMicro(1764446400123456).UTC()
			err := r.open(t, pool).QueryRow(t.Context(), "SELECT {n:UInt64}, {s:String}, {l:Array(UInt64)}, {at:DateTime64(6)}",
				clickhouse.Named("n", uint64(1<<64-1)), clickhouse.Named("s", text), clickhouse.Named("l", []uint64{1, 2}),
				clickhouse.DateNamed("at", want, clickhouse.MicroSeconds)).Scan(&number, &back, &list, &at)
			if err != nil {
				t.Fatal(err)
			}
			if number != 1<<64-1 || back != text || !cmp.Equal(list, []uint64{1, 2}) || !at.Equal(want) {
				t.Errorf("got %d, %q, %v, %v", number, back, list, at)
			}
		})
	}
}

func TestAWrongParameterIsAnError(t *testing.T) {
	r := start(t, config(""))
	if got := r.post(t, embedded.Dashboard, "param_n=one", "SELECT {n:UInt64}"); got.status != 500 || got.code != "457" {
		t.Errorf("got %v", got)
	}
}

func TestReadersWhileTheWriterInserts(t *testing.T) {
	r := start(t, config(""))
	w, d := r.open(t, embedded.Writer), r.open(t, embedded.Dashboard)
	exec(t, w, numbersTable)
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	errs := make(chan error, 8)
	for range 4 {
		wg.Go(func() {
			for before := uint64(0); ctx.Err() == nil; {
				var n uint64
				if err := d.QueryRow(t.Context(), "SELECT count() FROM numbers WHERE a >= {from:UInt64}", clickhouse.Named("from", 0)).Scan(&n); err != nil {
					errs <- err
					return
				}
				if n < before || n%10_000 != 0 {
					errs <- fmt.Errorf("%d rows after %d: want whole batches", n, before)
					return
				}
				before = n
			}
		})
	}
	for i := range 20 {
		if err := fill(t.Context(), w, "numbers", i*10_000, 10_000); err != nil {
			t.Fatal(err)
		}
	}
	cancel()
	wg.Wait()
	close(errs)
	for err := range errs {
		t.Error(err)
	}
}

func TestALargeAnswerComesWhole(t *testing.T) {
	r := start(t, config(""))
	rows, err := r.open(t, embedded.Free).Query(t.Context(), "SELECT number, toString(number) FROM numbers(1000000)")
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	var n, sum uint64
	for rows.Next() {
		var number uint64
		var text string
		if err := rows.Scan(&number, &text); err != nil {
			t.Fatal(err)
		}
		n, sum = n+1, sum+number
	}
	if err := rows.Err(); err != nil || n != 1_000_000 || sum != 499999500000 {
		t.Errorf("%d rows with the sum %d: %v", n, sum, err)
	}
}

func TestAnErrorInTheMiddleOfAnAnswer(t *testing.T) {
	cfg := config("")
	cfg.Limits.AnswerBytes = 4 << 20
	r := start(t, cfg)
	for _, tt := range []struct {
		name, sql string
		code      int32
	}{
		{"of the engine", "SELECT number, throwIf(number = 400000, 'on purpose') FROM numbers(1000000)", 395},
		{"an answer that is too large", "SELECT number FROM numbers(1000000)", 396},
	} {
		t.Run(tt.name, func(t *testing.T) {
			rows, err := r.open(t, embedded.Free).Query(t.Context(), tt.sql)
			if err == nil {
				defer rows.Close()
				for rows.Next() {
				}
				err = rows.Err()
			}
			if e := (*clickhouse.Exception)(nil); !errors.As(err, &e) || e.Code != tt.code {
				t.Errorf("got %v, want code %d", err, tt.code)
			}
		})
	}
}

func TestDatabaseSQL(t *testing.T) {
	r := start(t, config(""))
	db := clickhouse.OpenDB(embedded.Dial(r.Socket(), embedded.Writer))
	defer db.Close()
	if err := db.PingContext(t.Context()); err != nil {
		t.Fatal(err)
	}
	tx, err := db.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience) // clickhouse-go makes a setting of it
	defer cancel()
	for _, sql := range []string{
		"CREATE DATABASE kv",
		"CREATE TABLE kv.version (version_id Int64, is_applied UInt8, tstamp DateTime DEFAULT now()) ENGINE = MergeTree ORDER BY tstamp SETTINGS index_granularity = 128",
	} {
		if _, err := tx.ExecContext(ctx, sql); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := tx.ExecContext(ctx, "INSERT INTO kv.version (version_id, is_applied) VALUES (?, ?)", 7, 1); err != nil {
		t.Fatal(err)
	}
	if err := tx.Commit(); err != nil {
		t.Fatal(err)
	}
	var version int64
	if err := db.QueryRowContext(ctx, "SELECT version_id FROM kv.version WHERE is_applied = ?", 1).Scan(&version); err != nil || version != 7 {
		t.Errorf("version %d: %v", version, err)
	}
	options := embedded.Dial(r.Socket(), embedded.Free)
	options.Auth.Database = "kv"
	other := clickhouse.OpenDB(options)
	defer other.Close()
	if err := other.QueryRowContext(ctx, "SELECT version_id FROM version").Scan(&version); err != nil {
		t.Error("the database of the options: ", err)
	}
	if got := r.post(t, embedded.Free, "", "SELECT currentDatabase()"); got.body != "default\n" {
		t.Errorf("the database leaks into the next request: %v", got)
	}
}

func TestAnswersDoNotMix(t *testing.T) {
	r := start(t, config(""))
	var wg sync.WaitGroup
	errs := make(chan error, 16)
	for i, pool := range []embedded.Pool{embedded.Writer, embedded.Dashboard, embedded.Dashboard, embedded.Dashboard, embedded.Free, embedded.Free} {
		for _, format := range []string{"TabSeparated", "TabSeparatedWithNames"} { // in pieces, and in one
			wg.Go(func() {
				for k := range 30 {
					n := uint64(i*1000 + k)
					sql := fmt.Sprintf("SELECT throwIf(number = %d), {n:UInt64} AS n FROM numbers(%d)", 70_000+k%2*100_000, 100_000) // every other one fails
					got, err := r.send(t.Context(), pool, fmt.Sprintf("/?default_format=%s&param_n=%d", format, n), sql)
					if err != nil {
						errs <- err
						return
					}
					if k%2 == 0 {
						continue
					}
					want := strings.Repeat(fmt.Sprintf("0\t%d\n", n), 100_000)
					if _, rows, _ := strings.Cut(got.body, "n\n"); got.body != want && rows != want {
						errs <- fmt.Errorf("%s, %s: got %v", pool, format, got)
						return
					}
				}
			})
		}
	}
	wg.Wait()
	close(errs)
	for err := range errs {
		t.Error(err)
	}
}

func TestAnInsertThatIsCutOffInsertsNothing(t *testing.T) {
	r := start(t, config(""))
	w := r.open(t, embedded.Writer)
	exec(t, w, numbersTable)
	for range 3 {
		data, send := io.Pipe()
		go func() {
			_, _ = io.WriteString(send, strings.Repeat("1\t2\n", 1000))
			send.CloseWithError(errors.New("on purpose"))
		}()
		request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://localhost/?query="+url.QueryEscape("INSERT INTO numbers FORMAT TSV"), data)
		if err != nil {
			t.Fatal(err)
		}
		request.Header.Set(embedded.PoolHeader, string(embedded.Writer))
		response, err := r.client().Do(request)
		if err == nil {
			response.Body.Close()
			t.Fatal("the request went through")
		}
	}
	if err := fill(t.Context(), w, "numbers", 0, 10); err != nil {
		t.Fatal(err)
	}
	if n := count(t, w, "numbers"); n != 10 {
		t.Errorf("%d rows, want the 10 of the whole INSERT", n)
	}
}
