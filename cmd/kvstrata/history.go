package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"

	"kvstrata/bus"
	"kvstrata/event"
	"kvstrata/indexer/history"
	"kvstrata/indexer/history/embedded"
	"kvstrata/migrations"
	"kvstrata/server"
	"kvstrata/subscriber"
)

// historyFlags say which ClickHouse to use.
type historyFlags struct {
	ClickHouse string            `name:"clickhouse" help:"ClickHouse: clickhouse://host:9000/db, http://host:8123/db, or unix:///path/clickhouse.sock of an engine that another process embeds. Empty: the embedded engine." placeholder:"URL" env:"KVSTRATA_CLICKHOUSE"`
	Cluster    string            `name:"clickhouse-cluster" help:"Cluster in the servers' configuration: tables are sharded and replicated over it, and questions go to all its shards." placeholder:"NAME" env:"KVSTRATA_CLICKHOUSE_CLUSTER"`
	Retention  map[string]string `help:"How long a table of history keeps its rows, as block_events=7d; all=7d is of those that are not named. May be repeated." placeholder:"TABLE=DAYS" env:"KVSTRATA_RETENTION"`
	CHDB       string            `name:"chdb" help:"Library of the embedded engine (libchdb.so); make setup installs it." type:"path" placeholder:"FILE" env:"KVSTRATA_CHDB"`
	Memory     uint64            `name:"clickhouse-memory" help:"Bytes that the embedded engine may hold." default:"2147483648" env:"KVSTRATA_CLICKHOUSE_MEMORY"`
}

// engineDir is where the embedded engine's data lie in a data folder.
func engineDir(data string) string { return filepath.Join(data, "clickhouse") }

// config returns the history configuration; without an address it is the engine's in the data folder.
func (f historyFlags) config(data string) (history.Config, error) {
	cfg := history.DefaultConfig()
	cfg.Address, cfg.Cluster = f.ClickHouse, f.Cluster
	if f.Cluster != "" && (f.ClickHouse == "" || strings.HasPrefix(f.ClickHouse, "unix:")) {
		return cfg, usagef("--clickhouse-cluster: goes with a server (--clickhouse); the embedded engine is one")
	}
	var err error
	if cfg.Keep, err = f.keep(); err != nil {
		return cfg, err
	}
	if cfg.Address == "" {
		dir, err := filepath.Abs(engineDir(data))
		if err != nil {
			return cfg, err
		}
		cfg.Address = "unix://" + embedded.SocketPath(dir)
	}
	if err := cfg.Validate(); err != nil {
		return cfg, usagef("%w", err)
	}
	return cfg, nil
}

// keep returns for how many days tables keep their rows, of those that are named.
func (f historyFlags) keep() (map[string]int, error) {
	keep := make(map[string]int)
	for table, text := range f.Retention {
		number, ok := strings.CutSuffix(text, "d")
		days, err := strconv.Atoi(number)
		if !ok || err != nil {
			return nil, usagef("--retention %s=%s: want days, as 7d", table, text)
		}
		keep[table] = days
	}
	days, all := keep["all"]
	if !all {
		return keep, nil
	}
	delete(keep, "all")
	tables, err := migrations.Tables()
	if err != nil {
		return nil, err
	}
	for _, t := range tables {
		if _, named := keep[t.Name]; !named {
			keep[t.Name] = days
		}
	}
	return keep, nil
}

// historyEngineCmd is what the embedded engine's child process runs.
type historyEngineCmd struct{}

// Run serves the engine until the parent is gone.
func (historyEngineCmd) Run(a *app) error {
	ctx, stop := signal.NotifyContext(context.WithoutCancel(a.ctx), syscall.SIGTERM) // an interrupt from the terminal is the parent's to handle
	defer stop()
	cfg, err := embedded.ReadChildConfig(os.Stdin)
	if err != nil {
		return err
	}
	return embedded.Serve(ctx, cfg, a.log)
}

// historyEngineArg is the name of that command.
const historyEngineArg = "history-engine"

// addHistory adds the writer of history, with the embedded engine when no ClickHouse is given.
// committed, which may be nil, is told what is kept for good.
func (s *stack) addHistory(hashKey string, flags historyFlags, data string, committed func(event.Source, event.Mark)) error {
	cfg, err := flags.config(data)
	if err != nil {
		return err
	}
	cfg.Committed, cfg.HashKey = committed, hashKey
	if flags.ClickHouse == "" {
		if err := s.addEngine(flags, data); err != nil {
			return err
		}
	}
	if s.writer, err = history.NewWriter(cfg, s.app.log, s.registry); err != nil {
		return usagef("%w", err)
	}
	consumer := subscriber.NewConsumer(subscriber.DefaultConsumerConfig(), s.bus, s.writer, "history", s.app.log, s.registry)
	s.ready = append(s.ready, server.Ready{Name: "history", Check: func() error {
		if s.engine != nil {
			if up, reason := s.engine.State(); !up {
				return errors.New(reason)
			}
		}
		if trouble := s.writer.Trouble(); trouble != "" {
			return errors.New(trouble)
		}
		if !consumer.CaughtUp() {
			return errors.New("not caught up with the stream")
		}
		return nil
	}})
	s.runs = append(s.runs, func(ctx context.Context) error { return s.writeHistory(ctx, consumer) })
	return s.addReader(cfg)
}

func (s *stack) addEngine(flags historyFlags, data string) error {
	cfg := embedded.DefaultConfig()
	dir, err := filepath.Abs(engineDir(data))
	if err != nil {
		return err
	}
	cfg.Dir, cfg.Library, cfg.Args = dir, flags.CHDB, []string{historyEngineArg}
	cfg.Limits.Memory = flags.Memory
	cfg.Limits.QueryMemory = min(cfg.Limits.QueryMemory, flags.Memory/2)
	if s.engine, err = embedded.New(cfg, s.app.log, s.registry); err != nil {
		return fmt.Errorf("%w; or give a server with --clickhouse", err)
	}
	if s.watch != nil { // the web role came first
		s.watch.engine = s.engine
	}
	s.runs = append(s.runs, s.engine.Run)
	return nil
}

// historyLease is the lease of whoever writes history: one at a time for the whole stream.
var historyLease = event.Source{Cluster: "kvstrata", Model: "history", Instance: "writer", Origin: event.Store}

// writeHistory writes while this process holds the lease.
func (s *stack) writeHistory(ctx context.Context, consumer *subscriber.Consumer) error {
	if s.engine != nil {
		if err := s.engine.WaitReady(ctx); err != nil {
			return nil // stopped before it was
		}
	}
	for ctx.Err() == nil {
		err := s.holdHistory(ctx, consumer)
		if ctx.Err() != nil {
			break
		}
		s.app.log.Warn("history is not written by this process for now; trying again", "err", err)
		select {
		case <-ctx.Done():
		case <-time.After(time.Second):
		}
	}
	return nil
}

func (s *stack) holdHistory(ctx context.Context, consumer *subscriber.Consumer) error {
	host, err := os.Hostname()
	if err != nil {
		host = "unknown host"
	}
	lease, err := s.bus.Acquire(ctx, historyLease, fmt.Sprintf("%s:%d", host, os.Getpid()))
	if err != nil {
		return err
	}
	group, held := errgroup.WithContext(ctx)
	group.Go(func() error { return lease.Keep(held) })
	group.Go(func() error { return s.writer.Run(held) })
	group.Go(func() error { return consumer.Run(held) })
	group.Go(func() error { return s.keepRecords(held) })
	err = group.Wait()
	if !errors.Is(err, bus.ErrLeaseLost) {
		release, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		err = errors.Join(err, lease.Release(release))
	}
	return err
}

// keepRecords hands the stream of records to the writer until ctx ends.
func (s *stack) keepRecords(ctx context.Context) error {
	for {
		behind, err := s.writer.ResumeRecords(ctx)
		if err == nil {
			err = s.readRecords(ctx, behind)
		}
		if ctx.Err() != nil {
			return nil
		}
		s.app.log.Warn("records are not kept for now; trying again", "err", err)
		select {
		case <-ctx.Done():
		case <-time.After(500 * time.Millisecond):
		}
	}
}

// readRecords hands over the records behind a place until that fails.
func (s *stack) readRecords(ctx context.Context, behind event.Position) error {
	reader, err := s.bus.ReadRecords(ctx, behind)
	if err != nil {
		return err
	}
	defer reader.Close()
	at := reader.Identity()
	for {
		d, err := reader.Next(ctx)
		if err != nil {
			return err
		}
		records, err := d.Records()
		if err != nil {
			s.app.log.Warn("a message of records can't be read; left out", "kind", d.Kind, "source", d.Source.String(), "stream_sequence", d.Sequence, "err", err)
		}
		at.Sequence = d.Sequence
		if err := s.writer.Records(ctx, at, d.Stored, records); err != nil {
			return err
		}
		if err := d.Ack(); err != nil {
			return err
		}
	}
}

// addReader adds the queries; once is enough.
func (s *stack) addReader(cfg history.Config) error {
	if s.reader != nil {
		return nil
	}
	reader, err := history.NewReader(cfg)
	if err != nil {
		return usagef("%w", err)
	}
	s.reader = reader
	h := reader.Handler()
	for _, path := range []string{"/v1/queries", "/v1/query/", "/v1/explain", "/v1/explain/"} {
		s.handlers[path] = h
	}
	s.watch = &historyWatch{reader: reader, bus: s.bus, engine: s.engine}
	s.watch.doc = serviceDoc{Name: "history", State: "down", Reason: "not asked yet"}
	s.registry.MustRegister(
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "kvstrata_history_behind_messages", Help: "Messages of the stream that are not in ClickHouse yet.",
		}, func() float64 { return float64(s.watch.get().Detail.BehindMessages) }),
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "kvstrata_history_lost_messages", Help: "Messages that left NATS before they were in ClickHouse; 0 = none.",
		}, func() float64 { return float64(s.watch.get().Detail.LostMessages) }),
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "kvstrata_history_waiting_seconds", Help: "How long the oldest message that is not in ClickHouse has waited, as far as this process saw.",
		}, func() float64 { return s.watch.get().Detail.LagSeconds }))
	s.runs = append(s.runs, s.watch.run)
	return nil
}

// serviceDoc is the document service/NAME of the live socket.
type serviceDoc struct {
	Name   string         `json:"name"`
	State  string         `json:"state"` // ok, behind, down or off
	Reason string         `json:"reason"`
	Detail *historyDetail `json:"detail,omitempty"`
}

// historyDetail is how far history is.
type historyDetail struct {
	Rows           uint64  `json:"rows"`
	LagSeconds     float64 `json:"lag_seconds"` // since when messages wait, as far as this process saw; 0 = none does
	BehindMessages uint64  `json:"behind_messages"`
	LostMessages   uint64  `json:"lost_messages"` // that left NATS before they were kept
}

// historyWatch looks how far history is: at the tables themselves and at the stream, so that it is the same whichever
// process writes.
type historyWatch struct {
	reader *history.Reader
	bus    *bus.Bus
	engine *embedded.Engine // nil when another process has it, or a server is used

	mu  sync.Mutex
	doc serviceDoc

	// Of run's goroutine.
	last   history.Standing // the last that was told
	stuck  uint64           // the place that history stood at when messages began to wait
	since  time.Time        // when that was; zero = none waits
	pid    int              // of the engine when it was last looked at
	reborn time.Time        // when it was seen to be another than before
}

// Bounds of historyWatch: behind is told from there on.
const (
	watchEvery  = time.Second
	behindAfter = 10 * time.Second
	rebornFor   = 15 * time.Second // how long a death of the engine is told after it is up again
)

func (w *historyWatch) get() serviceDoc {
	w.mu.Lock()
	defer w.mu.Unlock()
	doc := w.doc
	if doc.Detail == nil {
		doc.Detail = &historyDetail{}
	}
	return doc
}

func (w *historyWatch) run(ctx context.Context) error {
	tick := time.NewTicker(watchEvery)
	defer tick.Stop()
	for {
		doc := w.look(ctx)
		w.mu.Lock()
		if doc.Detail == nil {
			doc.Detail = w.doc.Detail // the last known
		}
		w.doc = doc
		w.mu.Unlock()
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

func (w *historyWatch) look(ctx context.Context) serviceDoc {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	doc := serviceDoc{Name: "history", State: "ok"}
	end, err := w.bus.Position(ctx)
	first := uint64(0)
	if err == nil {
		first, err = w.bus.First(ctx)
	}
	if err != nil {
		doc.State, doc.Reason = "down", "NATS does not say how far the stream is"
		return doc
	}
	at, down := w.reader.Standing(ctx)
	if down == nil {
		w.last = at
	}
	// What waits grows while ClickHouse is away: from where it stood when it last told.
	doc.Detail = w.detail(end, first, time.Now())
	died := w.died(time.Now())
	switch {
	case down != nil:
		doc.State, doc.Reason = "down", strings.TrimSpace(down.Error())
	case died != "":
		doc.State, doc.Reason = "behind", died
	case doc.Detail.LostMessages > 0:
		doc.State, doc.Reason = "behind", fmt.Sprintf("%d messages left NATS before they were kept", doc.Detail.LostMessages)
	case doc.Detail.LagSeconds > behindAfter.Seconds():
		doc.State, doc.Reason = "behind", fmt.Sprintf("%d messages wait in NATS for %.0f s; is a history role running, and ClickHouse well?",
			doc.Detail.BehindMessages, doc.Detail.LagSeconds)
	}
	return doc
}

// detail works out how far history is behind a stream's end and beginning.
func (w *historyWatch) detail(end event.Position, first uint64, now time.Time) *historyDetail {
	d := &historyDetail{Rows: w.last.Rows}
	kept := w.last.At.Sequence
	if !w.last.At.SameStream(end) {
		kept = 0
	}
	d.BehindMessages = end.Sequence - min(kept, end.Sequence)
	if kept > 0 && kept+1 < first {
		d.LostMessages = first - 1 - kept
	}
	switch {
	case d.BehindMessages == 0:
		w.since = time.Time{}
	case w.since.IsZero() || kept != w.stuck:
		w.since, w.stuck = now, kept
	}
	if !w.since.IsZero() {
		d.LagSeconds = now.Sub(w.since).Round(100 * time.Millisecond).Seconds()
	}
	return d
}

// died tells of a death of the engine that is not long ago; its restart takes less than the eye needs to see it.
func (w *historyWatch) died(now time.Time) string {
	if w.engine == nil {
		return ""
	}
	if pid := w.engine.PID(); pid != 0 && pid != w.pid {
		if w.pid != 0 {
			w.reborn = now
		}
		w.pid = pid
	}
	if w.reborn.IsZero() || now.Sub(w.reborn) > rebornFor {
		return ""
	}
	return fmt.Sprintf("the ClickHouse engine died and was started again at %s; what came meanwhile waited in NATS",
		w.reborn.Format(time.TimeOnly))
}

// migrateCmd brings a ClickHouse to the present schema.
type migrateCmd struct {
	ClickHouse string            `name:"clickhouse" help:"ClickHouse: clickhouse://host:9000/db, http://host:8123/db, or unix:///path/clickhouse.sock." required:"" placeholder:"URL" env:"KVSTRATA_CLICKHOUSE"`
	Cluster    string            `name:"clickhouse-cluster" help:"Cluster in the servers' configuration: tables are sharded and replicated over it." placeholder:"NAME" env:"KVSTRATA_CLICKHOUSE_CLUSTER"`
	Retention  map[string]string `help:"How long a table keeps its rows, as block_events=7d; all=7d is of those that are not named. May be repeated." placeholder:"TABLE=DAYS" env:"KVSTRATA_RETENTION"`
	DryRun     bool              `help:"Only list what is applied and what waits."`
}

// Help shows how it is used.
func (migrateCmd) Help() string {
	return `The history role does this by itself when it starts. Example:

  kvstrata migrate --clickhouse http://default:secret@10.0.0.7:8123/kvstrata`
}

// Run migrates, and says what was done.
func (c *migrateCmd) Run(a *app) error {
	cfg, err := historyFlags{ClickHouse: c.ClickHouse, Cluster: c.Cluster, Retention: c.Retention}.config("")
	if err != nil {
		return err
	}
	if !c.DryRun {
		steps, err := history.Migrate(a.ctx, cfg)
		if err != nil {
			return err
		}
		for _, step := range steps {
			fmt.Fprintf(a.stdout, "applied  %s\n", filepath.Base(step.File))
		}
	}
	steps, err := history.Status(a.ctx, cfg)
	if err != nil {
		return err
	}
	for _, step := range steps {
		state := map[bool]string{true: "present", false: "waits"}[step.Applied]
		fmt.Fprintf(a.stdout, "%-8s %s\n", state, filepath.Base(step.File))
	}
	return nil
}
