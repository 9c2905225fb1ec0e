package history

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"strings"
	"sync"
	"time"

	"github.com/ClickHouse/clickhouse-go/v2"
	"github.com/cenkalti/backoff/v5"
	"golang.org/x/sync/errgroup"

	"kvstrata/event"
	"kvstrata/indexer/history/embedded"
)

// errAnotherWriter says that the tables were moved on by somebody else.
var errAnotherWriter = errors.New("another writer has written to this history")

// Run brings the database to the present schema, reads where the tables stand, and inserts rounds until ctx ends, or
// another writer is found to have gone on in its place. While ClickHouse does not answer it tries again.
func (w *Writer) Run(ctx context.Context) error {
	defer w.stop()
	conn, err := w.cfg.open(embedded.Writer)
	if err != nil {
		return err
	}
	defer conn.Close()
	aside, err := w.cfg.open(embedded.Aside)
	if err != nil {
		return err
	}
	defer aside.Close()
	if w.native != nil {
		defer w.native.close()
	}
	err = w.insist(ctx, "start history", func(ctx context.Context) error {
		if _, err := Migrate(ctx, w.cfg); err != nil {
			return err
		}
		return w.begin(ctx, conn)
	})
	if err == nil {
		group, ctx := errgroup.WithContext(ctx)
		group.Go(func() error {
			for {
				if err := w.pass(ctx, conn); err != nil {
					return err
				}
			}
		})
		group.Go(func() error { return (&roller{w: w, conn: aside}).run(ctx) })
		err = group.Wait()
	}
	if ctx.Err() != nil {
		return nil
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.trouble = err.Error()
	return err
}

// notRunning is the trouble of a writer that does not run, or has not begun.
const notRunning = "history is not written by this process"

// stop gives the rounds up: whoever waits for room is refused, and the next Run begins where the tables stand.
func (w *Writer) stop() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.open, w.spare = nil, nil
	if w.trouble == "" {
		w.trouble = notRunning
	}
	w.tellTaken()
	select {
	case <-w.running:
		w.running = make(chan struct{})
	default: // whoever waits for it waits for the next Run
	}
}

// tellTaken wakes all who wait for room. The caller holds the lock.
func (w *Writer) tellTaken() {
	close(w.taken)
	w.taken = make(chan struct{})
}

// begin takes the tables over from a writer before this one, which may not know that it lost them, and reads where they
// stand.
func (w *Writer) begin(ctx context.Context, conn clickhouse.Conn) error {
	life := time.Now().UnixNano()
	w.mu.Lock()
	w.life = life
	w.mu.Unlock()
	if err := claim(ctx, conn); err != nil {
		return err
	}
	if err := w.endInserts(ctx, conn, queryIDPrefix); err != nil {
		return err
	}
	at, err := readProgress(ctx, conn)
	if err != nil {
		return err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.sources = at.sources
	w.reached = at.committed.at
	w.records = recordPlaces{reached: at.committed.records, skip: at.skipRecords}
	w.committed, w.rolled = at.committed, at.rolled
	w.open, w.spare = newRound(), newRound()
	w.lineage = newLineage()
	select {
	case <-w.running:
	default:
		close(w.running)
	}
	return nil
}

// claim enters a round of its own at the place where the tables stand: a writer before this one finds it, and inserts no more.
func claim(ctx context.Context, conn clickhouse.Conn) error {
	err := conn.Exec(ctx, `INSERT INTO progress (source, round, committed, stream_name, stream, stream_seq, fence, epoch, started, seq, digest)
SELECT '', max(round) + 1, now64(6), argMax(stream_name, round), argMax(stream, round), argMax(stream_seq, round), 0, 0, 0, 0, 0
FROM progress WHERE source = ''`)
	if err != nil {
		return fmt.Errorf("claim the tables: %w", err)
	}
	return nil
}

// queryID is the id of a writer's inserts into a table.
func queryID(life int64, table string) string {
	return fmt.Sprintf("%s%d-%s", queryIDPrefix, life, table)
}

// endInserts ends whatever still runs of inserts whose answer was not awaited, by what their ids begin with. The embedded
// engine has a single connection that writes: there, what is asked next is answered behind them.
func (w *Writer) endInserts(ctx context.Context, conn clickhouse.Conn, begin string) error {
	a, err := w.cfg.address()
	if err != nil || a.socket != "" {
		return err
	}
	if err := conn.Exec(ctx, "KILL QUERY"+a.onCluster()+" WHERE startsWith(initial_query_id, '"+begin+"') SYNC"); err != nil {
		return fmt.Errorf("end earlier inserts: %w", err)
	}
	return nil
}

// pass waits for a round to be due and inserts it.
func (w *Writer) pass(ctx context.Context, conn clickhouse.Conn) error {
	due := time.NewTicker(w.cfg.FlushEvery / 10)
	defer due.Stop()
	var r *round
	for r == nil {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-w.full:
			r = w.take(true)
		case <-due.C:
			r = w.take(false)
		}
	}
	began := time.Now()
	if err := w.insertRound(ctx, conn, r); err != nil {
		return err
	}
	w.metrics.rounds.Observe(time.Since(began).Seconds())
	if r.rows() > 0 {
		w.metrics.lag.Observe(max(time.Since(r.oldest).Seconds(), 0))
	}
	w.mu.Lock()
	w.committed.at, w.committed.records = r.at, r.records
	maps.Copy(w.committed.marks, r.marks)
	w.mu.Unlock()
	if w.cfg.Committed != nil {
		for name, m := range r.marks {
			w.cfg.Committed(name, m.Mark)
		}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	r.reset()
	w.spare = r
	return nil
}

// idleRounds is how many flush intervals pass before the place in the stream is written, while no rows come.
const idleRounds = 5

// take takes the open round if it is due, and opens the spare one.
func (w *Writer) take(now bool) *round {
	w.mu.Lock()
	defer w.mu.Unlock()
	r := w.open
	rows := r.rows()
	if r.began.IsZero() && (w.reached != w.committed.at || w.records.reached != w.committed.records) {
		r.began = time.Now() // only the place has moved
	}
	wait := w.cfg.FlushEvery
	if rows == 0 {
		wait *= idleRounds
	}
	if r.began.IsZero() || !now && rows < w.cfg.MaxRows && time.Since(r.began) < wait {
		return nil
	}
	r.at, r.records = w.reached, w.records.reached
	w.open, w.spare = w.spare, nil
	w.tellTaken()
	return r
}

// delivery is rows that are inserted as one block: all of them, or none.
type delivery struct {
	table   string
	rows    int
	columns func() []column // made when they are sent: those of a checkpoint's pieces are copies
	adds    bool            // rows add up to the same however often they are stored
	queryID string
	clear   func() error // asked when all is ready to be sent: nothing is, after an error
}

// insertRound inserts the tables of a round, those whose rows add up beside the others, and then its place, until all are in.
func (w *Writer) insertRound(ctx context.Context, conn clickhouse.Conn, r *round) error {
	w.mu.Lock()
	number, life := w.committed.round+1, w.life
	w.mu.Unlock()
	deliver := func(ctx context.Context, list ...delivery) error {
		for i, d := range list {
			if d.rows == 0 {
				continue
			}
			d.queryID = queryID(life, d.table)
			token := fmt.Sprintf("%d:%d:%s:%d", life, number, d.table, i) // another life cuts its rounds elsewhere
			if err := w.deliver(ctx, conn, d, number, token); err != nil {
				return err
			}
			w.metrics.rows.WithLabelValues(d.table).Add(float64(d.rows))
		}
		return nil
	}
	rows, rowsCtx := errgroup.WithContext(ctx)
	rows.Go(func() error { return deliver(rowsCtx, r.adding()) })
	rows.Go(func() error { return deliver(rowsCtx, r.telling()...) })
	err := rows.Wait()
	if err == nil {
		err = deliver(ctx, r.place(number))
	}
	if err != nil {
		return err
	}
	w.mu.Lock()
	w.committed.round = number
	w.mu.Unlock()
	return nil
}

// adding returns the rows of a round that add up.
func (r *round) adding() delivery {
	return delivery{table: "chains", rows: r.chains.len(), columns: func() []column { return r.chains.columns(r.day) }, adds: true}
}

// place returns the rows that say that all others of the round are in.
func (r *round) place(number uint64) delivery {
	var p progressRows
	now := time.Now()
	p.add("", number, now, r.at, mark{})
	p.add(recordsName, number, now, r.records, mark{})
	for name, m := range r.marks {
		p.add(name.Tokens(), number, now, r.at, m)
	}
	return delivery{table: "progress", rows: len(p.source), columns: p.columns}
}

// telling returns the rows of a round that are told once, in the order in which they are inserted.
func (r *round) telling() []delivery {
	var list []delivery
	for _, s := range r.snapshots {
		for from := 0; from < s.len(); from += snapshotChunk {
			to := min(from+snapshotChunk, s.len())
			list = append(list, delivery{table: "snapshots", rows: to - from, columns: func() []column { return s.columns(from, to) }})
		}
	}
	for _, day := range r.told {
		list = append(list, day.deliveries()...)
	}
	return append(
		list,
		delivery{table: tableNames[batchTable], rows: r.batches.len(), columns: r.batches.columns},
		delivery{table: tableNames[blockTable], rows: r.blocks.len(), columns: r.blocks.columns},
		delivery{table: tableNames[loadTable], rows: r.loads.len(), columns: r.loads.columns},
		delivery{table: tableNames[ledgerTable], rows: r.ledger.len(), columns: r.ledger.columns},
	)
}

// errSwallowed says that ClickHouse acknowledged rows and does not have them: it remembers a token before it has the
// rows, and may die in between.
var errSwallowed = errors.New("ClickHouse takes the rows for ones that it has, and has not; sending them under another token")

// deliver inserts rows until they are in, once. After an error it is unknown whether they are: they are looked for, and
// when they are not there sent again with the same token, and looked for again. Nothing is sent once another writer has claimed the
// tables; that is asked while rows are made ready. Rows that add up are only sent again, under another token, whoever has the tables. On a
// cluster one shard may have its part and another not: there rows are sent with the same token until that is answered, since
// replicas keep a token with its rows; but for the writer's place, which lies on one.
func (w *Writer) deliver(ctx context.Context, conn clickhouse.Conn, d delivery, number uint64, token string) error {
	tries, swallowed := 0, 0
	inParts := w.cfg.Cluster != "" && d.table != "progress"
	return w.insist(ctx, "insert into "+d.table, func(ctx context.Context) error {
		if tries > 0 && !d.adds {
			if there, err := w.has(ctx, conn, d); err != nil || there && !inParts {
				return err
			}
		}
		tries++
		if d.adds {
			d.clear = func() error { return nil }
			return w.insert(ctx, conn, d, fmt.Sprintf("%s:%d", token, tries))
		}
		var looking sync.WaitGroup
		defer looking.Wait()
		var found error
		looking.Go(func() { found = w.alone(ctx, conn, number) })
		d.clear = func() error { looking.Wait(); return found }
		if err := w.insert(ctx, conn, d, fmt.Sprintf("%s:%d", token, swallowed)); err != nil || tries == 1 || inParts {
			return err
		}
		if there, err := w.has(ctx, conn, d); there || err != nil {
			return err
		}
		swallowed++
		return errSwallowed
	})
}

// has ends an insert that may go on, and looks for the last row of a delivery in its table.
func (w *Writer) has(ctx context.Context, conn clickhouse.Conn, d delivery) (bool, error) {
	if err := w.endInserts(ctx, conn, d.queryID); err != nil {
		return false, err
	}
	where, bound := d.condition()
	var n uint64
	err := conn.QueryRow(clickhouse.Context(ctx, clickhouse.WithParameters(bound)),
		"SELECT count() FROM "+d.table+" WHERE "+where).Scan(&n)
	if err != nil {
		return false, fmt.Errorf("look for rows in %s: %w", d.table, err)
	}
	return n > 0, nil
}

// alone checks that the last round in the table is this writer's.
func (w *Writer) alone(ctx context.Context, conn clickhouse.Conn, number uint64) error {
	var last uint64
	if err := conn.QueryRow(ctx, "SELECT max(round) FROM progress WHERE source = ''").Scan(&last); err != nil {
		return err
	}
	if last >= number {
		return backoff.Permanent(fmt.Errorf("%w: round %d is there, and this one would be %d", errAnotherWriter, last, number))
	}
	return nil
}

// insist does something until it works, ctx ends, or the error is permanent. Meanwhile Trouble says why it does not.
func (w *Writer) insist(ctx context.Context, what string, do func(context.Context) error) error {
	policy := backoff.NewExponentialBackOff()
	policy.InitialInterval, policy.MaxInterval = 50*time.Millisecond, 5*time.Second
	_, err := backoff.Retry(ctx, func() (struct{}, error) {
		attempt, cancel := context.WithTimeout(ctx, w.cfg.InsertTimeout)
		defer cancel()
		err := do(attempt)
		permanent := (*backoff.PermanentError)(nil)
		if err != nil && ctx.Err() == nil && !errors.As(err, &permanent) {
			err = hinted(err)
			w.say(what, err)
		}
		return struct{}{}, err
	}, backoff.WithBackOff(policy), backoff.WithMaxElapsedTime(0))
	if err == nil {
		w.say(what, nil)
	}
	return err
}

// sayEvery is how often a trouble that lasts is logged again.
const sayEvery = time.Minute

// say keeps why inserts do not go through, and logs when that begins, that it lasts, and when it ends.
func (w *Writer) say(what string, err error) {
	w.mu.Lock()
	before := w.trouble
	if err == nil && before != notRunning && !strings.HasPrefix(before, what+": ") {
		w.mu.Unlock()
		return // whatever is in trouble is something else
	}
	w.trouble = ""
	log := err != nil && (before == "" || before == notRunning || time.Since(w.said) >= sayEvery)
	if err != nil {
		w.trouble = what + ": " + err.Error()
		w.metrics.retries.Inc()
	}
	if log {
		w.said = time.Now()
	}
	w.mu.Unlock()
	switch {
	case log:
		w.log.Warn("ClickHouse takes nothing; trying again, and NATS keeps what comes meanwhile", "doing", what, "err", err)
	case before != "" && before != notRunning && err == nil:
		w.log.Info("ClickHouse takes rows again")
	}
}

// standing is where the tables stand.
type standing struct {
	committed   committed
	sources     map[event.Source]*sourceState
	skipRecords recordSkips
	rolled      rollups
}

// readProgress reads the last round's place, and what each table holds beyond it.
func readProgress(ctx context.Context, conn clickhouse.Conn) (*standing, error) {
	s := &standing{
		sources: make(map[event.Source]*sourceState), committed: committed{marks: make(map[event.Source]mark)},
	}
	rows, err := conn.Query(ctx, `SELECT source, round, stream_name, stream, stream_seq, fence, epoch, started, seq, digest FROM progress FINAL ORDER BY round`)
	if err != nil {
		return nil, fmt.Errorf("read progress: %w", err)
	}
	defer rows.Close()
	for rows.Next() {
		var source, name string
		var round, streamSeq, fence, epoch, seq, digest uint64
		var stream int64
		var started uint8
		if err := rows.Scan(&source, &round, &name, &stream, &streamSeq, &fence, &epoch, &started, &seq, &digest); err != nil {
			return nil, fmt.Errorf("read progress: %w", err)
		}
		at := event.Position{Stream: name, Created: event.Time(stream), Sequence: streamSeq}
		switch source {
		case "":
			s.committed.at, s.committed.round = at, round
			continue
		case recordsName:
			s.committed.records = at
			continue
		case rollupsName:
			s.rolled = rollups{at: at, until: int64(seq)}
			continue
		}
		state, err := s.source(source)
		if err != nil {
			return nil, err
		}
		state.mark = mark{
			Mark:   event.Mark{Fence: event.Fence(fence), Epoch: event.Epoch(epoch), Started: started != 0, Seq: event.Seq(seq)},
			digest: event.Digest(digest),
		}
	}
	if err := rows.Err(); err != nil {
		return nil, fmt.Errorf("read progress: %w", err)
	}
	for name, state := range s.sources {
		s.committed.marks[name] = state.mark
	}
	for t, table := range tableNames {
		if err := s.readBeyond(ctx, conn, t, table); err != nil {
			return nil, err
		}
	}
	return s, s.readRecordsBeyond(ctx, conn)
}

func (s *standing) source(tokens string) (*sourceState, error) {
	name, err := event.ParseSource(tokens)
	if err != nil {
		return nil, fmt.Errorf("read progress: %w", err)
	}
	state := s.sources[name]
	if state == nil {
		state = newSourceState(tokens)
		s.sources[name] = state
	}
	return state, nil
}

// readBeyond reads how far a table goes beyond the last finished round, in each source's own sequence.
func (s *standing) readBeyond(ctx context.Context, conn clickhouse.Conn, t int, table string) error {
	ctx = clickhouse.Context(ctx, clickhouse.WithParameters(clickhouse.Parameters{
		"stream": fmt.Sprint(int64(s.committed.at.Created)), "after": fmt.Sprint(s.committed.at.Sequence),
	}))
	// Spelled out, so that the index of stream and stream_seq serves it.
	const beyond = "(stream > {stream:Int64} OR stream = {stream:Int64} AND stream_seq > {after:UInt64})"
	last, where := "seq", beyond
	switch t {
	case ledgerTable:
		last, where = "last", beyond+" AND kind IN ('lost', 'dropped', 'life')"
	case blockTable: // every row's batch is in, and says from when on the rows are
		where = "committed >= (SELECT if(count() = 0, toDateTime('2106-01-01', 'UTC'), toDateTime(min(committed), 'UTC')) FROM batches WHERE " + beyond + ")"
	}
	rows, err := conn.Query(ctx, `SELECT toString(source), max((epoch, `+last+`)) AS far, far.1, far.2 FROM `+table+` WHERE `+where+` GROUP BY source`)
	if err != nil {
		return fmt.Errorf("read how far %s goes: %w", table, err)
	}
	defer rows.Close()
	for rows.Next() {
		var tokens string
		var far []any
		var epoch, seq uint64
		if err := rows.Scan(&tokens, &far, &epoch, &seq); err != nil {
			return fmt.Errorf("read how far %s goes: %w", table, err)
		}
		state, err := s.source(tokens)
		if err != nil {
			return err
		}
		state.skip[t] = point{epoch: event.Epoch(epoch), seq: event.Seq(seq), set: true}
	}
	return rows.Err()
}
