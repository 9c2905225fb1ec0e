package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/ClickHouse/clickhouse-go/v2"
	"github.com/prometheus/client_golang/prometheus"

	"kvstrata/event"
	"kvstrata/indexer/history"
	"kvstrata/indexer/history/embedded"
)

type benchHistoryCmd struct {
	Traces   string `help:"Folder that has the Mooncake trace." type:"path" placeholder:"DIR" env:"KVSTRATA_TRACES"`
	Events   int    `help:"Block events that are kept." default:"10000000"`
	PerHour  int    `help:"Block events in an hour of the bus's clock." default:"10000000"`
	Prepared int    `help:"Block events that are made before the writer's time begins; its rate is of these." default:"2000000"`
	Engines  int    `help:"Engines." default:"16"`
	Pool     int    `help:"Blocks that each engine holds." default:"16384"`
	Unlike   bool   `help:"Engines hash each its own way, as vLLM does without PYTHONHASHSEED."`
	Rounds   int    `help:"How often each named query is asked, about an hour each." default:"20"`
	Explains int    `help:"Blocks that are explained, half by their prefix and half by what an engine calls them." default:"200"`
	CHDB     string `name:"chdb" help:"Library of the embedded engine (libchdb.so)." type:"path" placeholder:"FILE" env:"KVSTRATA_CHDB"`
	Memory   uint64 `name:"clickhouse-memory" help:"Bytes that the embedded engine may hold." default:"2147483648" env:"KVSTRATA_CLICKHOUSE_MEMORY"`
	Format   string `help:"table or json." enum:"table,json" default:"table"`
	Bus      bool   `help:"Only measure from publish to committed rows, through an embedded NATS server, with the prepared events."`
	KeepData bool   `help:"Keep the tables, and say where."`
}

// Help shows how it is used and what is measured.
func (benchHistoryCmd) Help() string {
	return `Engines with LRU pools serve the Mooncake conversation trace, copy after copy, each with prompts of its own; a hash id is
four blocks of 128 tokens, a step stores up to 64 blocks. What they evict and store goes through history's writer into the
embedded ClickHouse engine, a message a step. The rate is that of prepared messages, from the first to the last committed row.

Then the parts are merged, and the bytes are those on disk: bytes_per_row of block_events with its indexes, bytes_per_event of
all tables for each block event. Each named query is asked about hours chosen at random, and blocks chosen at random are
explained; query_p95_ms is the slowest query's.

Example:

  kvstrata bench history --events 100000000 --format json

With --bus the prepared events are published instead, each engine's through a stream of its own, and read from the bus as the history role
does: bus_events_per_s is from the first publish until all is committed.`
}

// Run measures and prints.
func (c *benchHistoryCmd) Run(a *app) error {
	if c.Events < 1 || c.PerHour < 1 || c.Prepared < 1 || c.Engines < 1 || c.Pool < 1 || c.Rounds < 1 || c.Explains < 2 {
		return usagef("--events, --per-hour, --prepared, --engines, --pool and --rounds: want 1 or more; --explains: 2 or more")
	}
	dir, err := os.MkdirTemp("", "kvstrata-bench-")
	if err != nil {
		return fmt.Errorf("make temporary folder: %w", err)
	}
	if c.KeepData {
		fmt.Fprintln(a.stderr, "tables are in", dir)
	} else {
		defer os.RemoveAll(dir)
	}
	length := time.Duration(float64(c.Events) / float64(c.PerHour) * float64(time.Hour))
	began := time.Now().UTC().Truncate(24 * time.Hour).Add(-time.Hour - length)
	work, err := newReplay(c.Traces, c.Engines, c.Pool, float64(c.PerHour), c.Unlike, began)
	if err != nil {
		return err
	}
	if c.Bus {
		r, err := c.overBus(a, work, dir)
		if err != nil {
			return err
		}
		return r.print(a.stdout, c.Format)
	}
	cfg := embedded.DefaultConfig()
	cfg.Dir, cfg.Library, cfg.Args = filepath.Join(dir, "clickhouse"), c.CHDB, []string{historyEngineArg}
	cfg.Limits.Memory, cfg.Limits.QueryMemory = c.Memory, min(cfg.Limits.QueryMemory, c.Memory/2)
	engine, err := embedded.New(cfg, a.log, prometheus.NewRegistry())
	if err != nil {
		return err
	}
	ctx, stop := context.WithCancel(a.ctx)
	defer stop()
	done := make(chan error, 1)
	go func() { done <- engine.Run(ctx) }()
	r, err := c.measure(ctx, a, engine, work)
	stop()
	if err := errors.Join(err, <-done); err != nil {
		return err
	}
	return r.print(a.stdout, c.Format)
}

func (c *benchHistoryCmd) measure(ctx context.Context, a *app, engine *embedded.Engine, work *replay) (*result, error) {
	if err := engine.WaitReady(ctx); err != nil {
		return nil, err
	}
	cfg := history.DefaultConfig()
	cfg.Address = "unix://" + engine.Socket()
	cfg.FlushEvery = 100 * time.Millisecond // what is left at the end waits no longer
	r := &result{
		Bench: "history", Machine: machine(), KeptUp: true, Figures: make(map[string]figure),
	}
	blocks, err := c.write(ctx, a, cfg, engine, work, r)
	if err != nil {
		return nil, err
	}
	r.Workload = fmt.Sprintf("%d block events of %d engines that hold %d blocks each and serve the Mooncake conversation trace, %d an hour%s",
		work.events, c.Engines, c.Pool, c.PerHour, map[bool]string{true: ", each with hashes of its own", false: ""}[c.Unlike])
	if err := c.sizes(ctx, engine, float64(work.events), r); err != nil {
		return nil, err
	}
	if err := c.ask(ctx, cfg, work, blocks, r); err != nil {
		return nil, err
	}
	r.Figures["clickhouse_peak_rss_mb"] = figure{Value: peakRSS(strconv.Itoa(engine.PID())), Unit: "MB", Goal: goal(1536)}
	return r, nil
}

// write keeps the work, enters how many rows a second the writer takes, and returns some blocks.
func (c *benchHistoryCmd) write(
	ctx context.Context, a *app, cfg history.Config, engine *embedded.Engine, work *replay, r *result,
) (blocks []event.Block, err error) {
	w, err := history.NewWriter(cfg, a.log, nil)
	if err != nil {
		return nil, err
	}
	ctx, stop := context.WithCancel(ctx)
	done := make(chan error, 1)
	go func() { done <- w.Run(ctx) }()
	defer func() {
		stop()
		err = errors.Join(err, <-done)
	}()
	prepared := c.prepare(work)
	rows := float64(work.events)
	if _, _, err := w.Resume(ctx); err != nil {
		return nil, err
	}
	every := max(c.Events/c.Explains/100, 1) // some hundred times as many messages as are explained
	feed := func(m *event.Message) error {
		if _, err := w.Apply(ctx, m); err != nil {
			return err
		}
		w.Reached(m.Position)
		if len(blocks) == 0 || m.Position.Sequence%uint64(every) == 0 {
			events := m.Batches[0].Events
			blocks = append(blocks, events[len(events)-1].Blocks[0])
		}
		return nil
	}
	await := func(at func() event.Position, m *event.Message) error {
		tick := time.NewTicker(time.Millisecond)
		defer tick.Stop()
		for at() != m.Position {
			select {
			case <-tick.C:
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		return nil
	}
	child := strconv.Itoa(engine.PID())
	began, used, usedThere := time.Now(), processorTime("self"), processorTime(child)
	for _, m := range prepared {
		if err := feed(m); err != nil {
			return nil, err
		}
	}
	last := prepared[len(prepared)-1]
	if err := await(w.Committed, last); err != nil {
		return nil, err
	}
	r.Figures["rows_per_s"] = figure{Value: rows / time.Since(began).Seconds(), Unit: "1/s", Goal: goal(1_000_000)}
	r.Figures["writer_cpu_ns_per_row"] = figure{Value: float64(processorTime("self")-used) / rows, Unit: "ns"}
	r.Figures["clickhouse_cpu_ns_per_row"] = figure{Value: float64(processorTime(child)-usedThere) / rows, Unit: "ns"}
	prepared = nil
	for work.events < uint64(c.Events) {
		last = work.message()
		if err := feed(last); err != nil {
			return nil, err
		}
	}
	ended := time.Now()
	if err := await(w.RolledUp, last); err != nil {
		return nil, err
	}
	r.Figures["rolled_up_after_ms"] = figure{Value: float64(time.Since(ended).Milliseconds()), Unit: "ms"}
	return blocks, nil
}

// prepare makes the messages that are measured.
func (c *benchHistoryCmd) prepare(work *replay) []*event.Message {
	var prepared []*event.Message
	for work.events < uint64(min(c.Prepared, c.Events)) {
		prepared = append(prepared, work.message())
	}
	return prepared
}

// processorTime returns what a process has used, in steps of 10 ms.
func processorTime(pid string) time.Duration {
	stat, err := os.ReadFile("/proc/" + pid + "/stat")
	if err != nil {
		return 0
	}
	fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
	ticks := int64(0)
	for _, f := range fields[11:13] { // utime and stime, in hundredths of a second
		n, _ := strconv.ParseInt(f, 10, 64)
		ticks += n
	}
	return time.Duration(ticks) * 10 * time.Millisecond
}

// sizes merges the parts, and enters what lies on disk.
func (c *benchHistoryCmd) sizes(ctx context.Context, engine *embedded.Engine, events float64, r *result) error {
	options := embedded.Dial(engine.Socket(), embedded.Writer)
	options.Auth.Database = "kvstrata"
	options.ReadTimeout = time.Hour
	conn, err := clickhouse.Open(options)
	if err != nil {
		return err
	}
	defer conn.Close()
	var tables []string
	err = conn.QueryRow(ctx, "SELECT groupArray(name) FROM system.tables WHERE database = currentDatabase() AND engine LIKE '%MergeTree'").Scan(&tables)
	if err != nil {
		return fmt.Errorf("list tables: %w", err)
	}
	for _, table := range tables {
		if err := conn.Exec(ctx, "OPTIMIZE TABLE "+table+" FINAL"); err != nil {
			return fmt.Errorf("merge %s: %w", table, err)
		}
	}
	rows, err := conn.Query(ctx, `SELECT table, '' AS column, sum(bytes_on_disk) FROM system.parts
WHERE active AND database = currentDatabase() GROUP BY table
UNION ALL SELECT table, column, sum(column_data_compressed_bytes) FROM system.parts_columns
WHERE active AND database = currentDatabase() AND table = 'block_events' GROUP BY table, column
UNION ALL SELECT table, name, sum(data_compressed_bytes) FROM system.data_skipping_indices
WHERE database = currentDatabase() AND table = 'block_events' GROUP BY table, name`)
	if err != nil {
		return fmt.Errorf("ask for sizes: %w", err)
	}
	defer rows.Close()
	everything := 0.0
	for rows.Next() {
		var table, column string
		var bytes uint64
		if err := rows.Scan(&table, &column, &bytes); err != nil {
			return err
		}
		each := figure{Value: float64(bytes) / events, Unit: "B"}
		switch {
		case column != "":
			r.Figures["row_"+column+"_bytes"] = each
			continue
		case table == "block_events":
			r.Figures["bytes_per_row"] = figure{Value: each.Value, Unit: "B", Goal: goal(12)}
		default:
			r.Figures["event_"+table+"_bytes"] = each
		}
		everything += each.Value
	}
	r.Figures["bytes_per_event"] = figure{Value: everything, Unit: "B", Goal: goal(20)}
	return rows.Err()
}

// ask asks the named queries and explains blocks, in turn.
func (c *benchHistoryCmd) ask(ctx context.Context, cfg history.Config, work *replay, blocks []event.Block, r *result) error {
	reader, err := history.NewReader(cfg)
	if err != nil {
		return err
	}
	defer reader.Close()
	took := make(map[string][]float64)
	timed := func(name string, do func() error) error {
		began := time.Now()
		if err := do(); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		took[name] = append(took[name], float64(time.Since(began).Microseconds())/1000)
		return nil
	}
	length := time.Duration(work.lastStamp - work.began)
	for i := range c.Rounds {
		since := time.Unix(0, int64(work.began))
		if spare := int64((length - time.Hour) / time.Millisecond); spare > 0 {
			since = since.Add(time.Duration(mixed(uint64(i+1))%uint64(spare)) * time.Millisecond)
		}
		window := map[string]string{
			"since": strconv.FormatInt(since.UnixMilli(), 10), "until": strconv.FormatInt(since.Add(time.Hour).UnixMilli(), 10),
		}
		for _, q := range history.Queries() {
			asked := maps.Clone(window)
			if slices.ContainsFunc(q.Params, func(p history.Param) bool { return p.Name == "at" }) {
				asked = map[string]string{"at": window["until"]}
			}
			if slices.ContainsFunc(q.Params, func(p history.Param) bool { return p.Kind == "hash" }) {
				asked["hash"] = fmt.Sprintf("%016x", uint64(blocks[mixed(uint64(i+1))%uint64(len(blocks))].Prefix))
			}
			if err := timed("query_"+q.Name, func() error {
				_, err := reader.Ask(ctx, q.Name, asked)
				return err
			}); err != nil {
				return err
			}
		}
	}
	for i := range c.Explains {
		b := blocks[mixed(uint64(i+1))%uint64(len(blocks))]
		name, hash := "explain", fmt.Sprintf("%016x", uint64(b.Prefix))
		if i%2 == 1 {
			name, hash = "explain_by_engine_hash", b.Hash.String()
		}
		if err := timed(name, func() error {
			story, err := reader.Explain(ctx, hash, "")
			if err == nil && !story.Found {
				err = fmt.Errorf("%w: no row of block %s", errMismatch, hash)
			}
			return err
		}); err != nil {
			return err
		}
	}
	slowest := 0.0
	for name, times := range took {
		slices.Sort(times)
		p95 := quantile(times, 0.95)
		f := figure{Value: p95, Unit: "ms"}
		if name == "explain" || name == "explain_by_engine_hash" {
			f.Goal = goal(50)
		} else {
			slowest = max(slowest, p95)
		}
		r.Figures[name+"_p95_ms"] = f
	}
	r.Figures["query_p95_ms"] = figure{Value: slowest, Unit: "ms", Goal: goal(300)}
	return nil
}
