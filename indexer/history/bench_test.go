package history_test

import (
	"context"
	"flag"
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/ClickHouse/clickhouse-go/v2"

	"kvstrata/event"
	"kvstrata/indexer/history"
	"kvstrata/indexer/history/embedded"
)

// busy returns the processor time that this process has used.
func busy() time.Duration {
	var u syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &u)
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// bulk makes messages of a fleet's block events: runs of 16 blocks, four engines, half stored and half evicted.
func bulk(messages int) (made []*event.Message, rows int) {
	const runs, blocks = 32, 16
	now := time.Now().Add(-time.Hour)
	seqs := make([]event.Seq, 4)
	for i := range messages {
		m := &event.Message{
			Source: event.Source{Cluster: event.DefaultCluster, Model: "m/model", Instance: fmt.Sprint("e", i%4), Origin: event.Engine},
			Epoch:  7, Fence: 1, Position: event.Position{Stream: "KV_EVENTS", Created: 1_000, Sequence: uint64(i + 1)},
			Stored: event.UnixTime(now.Add(time.Duration(i) * time.Millisecond)),
		}
		for range 4 {
			seq := seqs[i%4]
			seqs[i%4]++
			b := event.Batch{First: seq, Last: seq, Way: event.Live, Time: m.Stored, Received: m.Stored, Rank: -1}
			for j := range runs / 4 {
				ev := event.Event{Kind: event.Stored, Tier: event.GPU, HasParent: true, Parent: event.IntHash(uint64(i)), BlockSize: 16}
				if i/4%2 == 1 {
					ev = event.Event{Kind: event.Evicted, Tier: event.GPU}
				}
				for k := range blocks {
					h := event.Mix64(event.IntHash(uint64(i/8*4+i%4)<<20+uint64(seq/4*1000)+uint64(j*blocks+k)), 0, event.GPU)
					b := event.Block{Hash: event.IntHash(uint64(h)), Prefix: event.PrefixHash(h ^ 0x5555), Effect: 1, Copies: -1, Age: -1}
					if ev.Kind == event.Evicted {
						b.Effect, b.Copies, b.Age = -1, 0, time.Duration(h%1e9)*time.Microsecond
					}
					ev.Blocks = append(ev.Blocks, b)
					rows++
				}
				b.Events = append(b.Events, ev)
			}
			m.Batches = append(m.Batches, b)
		}
		made = append(made, m)
	}
	return made, rows
}

// vary gives a message other blocks.
func vary(m *event.Message) {
	for i := range m.Batches {
		for j := range m.Batches[i].Events {
			for k := range m.Batches[i].Events[j].Blocks {
				b := &m.Batches[i].Events[j].Blocks[k]
				n, _ := b.Hash.Int()
				b.Hash, b.Prefix = event.IntHash(n*0x9e3779b97f4a7c15+1), b.Prefix*0x9e3779b97f4a7c15+1
			}
		}
	}
}

// childBusy returns the processor time that the engine's process has used.
func childBusy(t testing.TB, e *engine) time.Duration {
	t.Helper()
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", e.PID()))
	if err != nil {
		t.Fatal(err)
	}
	fields := strings.Fields(string(stat[strings.LastIndexByte(string(stat), ')')+2:]))
	ticks := int64(0)
	for _, f := range fields[11:13] { // utime and stime, in hundredths
		n, err := strconv.ParseInt(f, 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		ticks += n
	}
	return time.Duration(ticks) * 10 * time.Millisecond
}

// The whole way from a message to committed rows, into the real engine; the engine's own work is in another process.
func BenchmarkWriter(b *testing.B) {
	e := startEngine(b)
	cfg := e.config()
	cfg.FlushEvery = time.Second
	w, _ := startWriter(b, cfg)
	if _, _, err := w.Resume(b.Context()); err != nil {
		b.Fatal(err)
	}
	messages, rows := bulk(500) // few, so that the collector has little to do with them
	number, created := 0, event.Time(1_000)
	used, usedThere := busy(), childBusy(b, e)
	for b.Loop() {
		for range 8 {
			created++ // another stream each time
			for _, m := range messages {
				m.Epoch, m.Position.Created = event.Epoch(created), created
				vary(m)
				if _, err := w.Apply(b.Context(), m); err != nil {
					b.Fatal(err)
				}
				w.Reached(m.Position)
			}
			number += rows
		}
		last := messages[len(messages)-1].Position
		for w.Committed() != last {
			<-time.After(time.Millisecond)
		}
	}
	b.ReportMetric(float64(number)/b.Elapsed().Seconds(), "rows/s")
	b.ReportMetric(float64(busy()-used)/float64(number), "cpu-ns/row")
	b.ReportMetric(float64(childBusy(b, e)-usedThere)/float64(number), "engine-ns/row")
	b.ReportMetric(diskBytes(b, e, "block_events")/float64(number), "disk-B/row")
}

var manyRows = flag.Uint64("history.rows", 1_000_000, "rows of the day that BenchmarkCapacity asks about")

// The question capacity over a day of 16 engines' block events, half stored, half evicted; an eighth of what is stored was
// evicted before.
func BenchmarkCapacity(b *testing.B) {
	e := startEngine(b)
	cfg := e.config()
	if _, err := history.Migrate(b.Context(), cfg); err != nil {
		b.Fatal(err)
	}
	day := fillDay(b, cfg, *manyRows)
	conn := connect(b, cfg)
	for merging := uint64(1); merging > 0; <-time.After(time.Second) {
		if err := conn.QueryRow(b.Context(), "SELECT count() FROM system.merges").Scan(&merging); err != nil {
			b.Fatal(err)
		}
	}
	cfg.MaxTime = time.Minute
	r := newReader(b, cfg)
	used, usedThere := busy(), childBusy(b, e)
	window := map[string]string{"since": day.Format(time.RFC3339), "until": day.Add(24 * time.Hour).Format(time.RFC3339)}
	b.ResetTimer()
	for b.Loop() {
		a, err := r.Ask(b.Context(), "capacity", window)
		if err != nil || len(a.Rows) == 0 {
			b.Fatal(a, err)
		}
	}
	b.ReportMetric((busy()-used).Seconds()/float64(b.N), "cpu-s/answer")
	b.ReportMetric((childBusy(b, e)-usedThere).Seconds()/float64(b.N), "engine-s/answer")
	b.ReportMetric(float64(peakMemory(b, e))/1024, "child-peak-MiB")
}

// fillDay writes block events of yesterday, and returns when that began.
func fillDay(t testing.TB, cfg history.Config, rows uint64) time.Time {
	t.Helper()
	conn := connect(t, cfg)
	day := time.Now().UTC().Truncate(24 * time.Hour).Add(-24 * time.Hour)
	for from := uint64(0); from < rows; from += 1_000_000 {
		n := min(1_000_000, rows-from)
		err := conn.Exec(t.Context(), fmt.Sprintf(`INSERT INTO block_events
  (committed, stream, stream_seq, source, epoch, seq, ev, pos, op, tier, hash, named, engine_hash, effect, copies, age_us, block_size)
SELECT fromUnixTimestamp64Micro(toInt64(%d + n * %d)), 1, intDiv(n, 512), concat('default.m.e', toString(intDiv(n, 512) %% 16), '.0.engine'), 7,
  intDiv(n, 512), intDiv(n %% 512, 16), n %% 16, if(stores, 'STORED', 'EVICTED'), 'GPU',
  xxh3(if(stores, if(rarely, block - 4 * 131072, block), block - 131072)) AS hash, 1, hash, if(stores, 1, -1), if(stores, -1, 0), -1, 16
FROM (SELECT number + %d AS n, intDiv(n, 16) %% 2 = 0 AS stores, intDiv(n, 32) * 16 + n %% 16 AS block, intDiv(n, 32) %% 8 = 7 AS rarely
  FROM numbers(%d))`, day.UnixMicro(), 86_400_000_000/rows, from, n))
		if err != nil {
			t.Fatal(err)
		}
	}
	return day
}

// peakMemory returns the most that the engine's process held, in KiB.
func peakMemory(t testing.TB, e *engine) int64 {
	t.Helper()
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", e.PID()))
	if err != nil {
		t.Fatal(err)
	}
	_, after, _ := strings.Cut(string(status), "VmHWM:")
	kib, err := strconv.ParseInt(strings.Fields(after)[0], 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	return kib
}

func diskBytes(t testing.TB, e *engine, table string) float64 {
	t.Helper()
	conn := connect(t, e.config())
	if err := conn.Exec(context.Background(), "OPTIMIZE TABLE "+table+" FINAL"); err != nil {
		t.Fatal(err)
	}
	var bytes uint64
	err := conn.QueryRow(context.Background(), "SELECT sum(bytes_on_disk) FROM system.parts WHERE active AND table = '"+table+"'").Scan(&bytes)
	if err != nil {
		t.Fatal(err)
	}
	return float64(bytes)
}

// connect opens a connection that may do everything.
func connect(t testing.TB, cfg history.Config) clickhouse.Conn {
	t.Helper()
	options := embedded.Dial(cfg.Address[len("unix://"):], embedded.Writer)
	options.Auth.Database = "kvstrata"
	conn, err := clickhouse.Open(options)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}
