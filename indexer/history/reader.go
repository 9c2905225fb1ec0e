package history

import (
	"context"
	"fmt"
	"math"
	"time"

	"github.com/ClickHouse/clickhouse-go/v2"
	"github.com/ClickHouse/clickhouse-go/v2/lib/driver"

	"kvstrata/event"
	"kvstrata/indexer/history/embedded"
)

// Reader asks. It may be used by any number of goroutines.
type Reader struct {
	cfg      Config
	embedded bool
	conn     clickhouse.Conn
	readOnly int    // ClickHouse's: 1 refuses settings within the statement, too
	sample   uint64 // rows that curves are made of, at most about
	rowsOnly bool   // tests ask without roll-ups
	atOnce   uint64 // block events over which a state's blocks are added up at once, about
}

// NewReader returns a reader. ClickHouse need not answer yet. The caller closes it.
func NewReader(cfg Config) (*Reader, error) { return newReader(cfg, embedded.Dashboard) }

func newReader(cfg Config, pool embedded.Pool) (*Reader, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	conn, err := cfg.open(pool)
	if err != nil {
		return nil, err
	}
	a, err := cfg.address()
	if err != nil {
		return nil, err
	}
	return &Reader{cfg: cfg, embedded: a.socket != "", conn: conn, readOnly: 2, sample: sampleRows, atOnce: heldAtOnce}, nil
}

// Close ends the connections.
func (r *Reader) Close() error { return r.conn.Close() }

// query runs a query and yields a scan of each row, into pointers of the columns' types.
func (r *Reader) query(ctx context.Context, sql string, bound clickhouse.Parameters, yield func(scan func(...any) error) error) error {
	return r.each(ctx, sql, bound, func(rows driver.Rows) error {
		if err := yield(rows.Scan); err != nil {
			return fmt.Errorf("read answer: %w", err)
		}
		return nil
	})
}

// grace is how much longer than ClickHouse we wait for its word that a query takes too long.
const grace = 5 * time.Second

// each runs a query and yields each row.
func (r *Reader) each(ctx context.Context, sql string, bound clickhouse.Parameters, yield func(driver.Rows) error) error {
	// Without a deadline: the client library would make one the query's bound, in place of ours.
	waiting, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	defer cancel(nil)
	defer context.AfterFunc(ctx, func() { cancel(context.Cause(ctx)) })()
	timer := time.AfterFunc(r.cfg.MaxTime+grace, func() { cancel(context.DeadlineExceeded) })
	defer timer.Stop()
	settings := clickhouse.Settings{"max_execution_time": int(math.Ceil(r.cfg.MaxTime.Seconds()))}
	if !r.embedded { // whose pools have a bound of their own
		settings["max_memory_usage"], settings["readonly"] = r.cfg.MaxMemory, r.readOnly
		if r.cfg.Cluster != "" { // what one part of a question finds is for all shards to compare with
			settings["distributed_product_mode"], settings["prefer_global_in_and_join"] = "global", 1
		}
	}
	rows, err := r.conn.Query(
		clickhouse.Context(waiting, clickhouse.WithParameters(bound), clickhouse.WithSettings(settings)), sql)
	if err != nil {
		return answerError(waiting, err)
	}
	defer rows.Close()
	for rows.Next() {
		if err := yield(rows); err != nil {
			return err
		}
	}
	return answerError(waiting, rows.Err())
}

// Standing is how far history goes.
type Standing struct {
	At      event.Position // everything up to it is kept
	Written time.Time      // when that was written
	Rows    uint64         // block events kept
}

// Standing asks how far history goes.
func (r *Reader) Standing(ctx context.Context) (Standing, error) {
	var s Standing
	err := r.query(ctx, `SELECT stream_name, stream, stream_seq, committed, assumeNotNull((SELECT count() FROM block_events)) AS rows
FROM progress WHERE source = '' ORDER BY round DESC LIMIT 1`, nil, func(scan func(...any) error) error {
		var created int64
		err := scan(&s.At.Stream, &created, &s.At.Sequence, &s.Written, &s.Rows)
		s.At.Created = event.Time(created)
		return err
	})
	return s, err
}

// Resident is one entry of a resident set as history's rows add up to it.
type Resident struct {
	Hash   uint64 // the engine's, in 64 bits
	Tier   event.Tier
	Group  event.Group
	Copies int64
}

// Resident adds up a source's resident set as of the last round: the effects since its life began, was cleared, or was
// restored from a checkpoint, with that.
func (r *Reader) Resident(ctx context.Context, source event.Source, yield func(Resident)) error {
	m, err := r.Mark(ctx, source)
	if err != nil || !m.Started {
		return err
	}
	bound := clickhouse.Parameters{
		"source": source.Tokens(), "epoch": fmt.Sprint(uint64(m.Epoch)), "last": fmt.Sprint(uint64(m.Seq)),
		"seq": "0", "ev": "-1", "snapshot": "0", "since": "0",
	}
	// Where the set begins: a CLEARED counts from its own place on, a snapshot from behind its sequence. The day before the
	// life began is looked at as well: the bus's clock may have been set back since.
	err = r.query(ctx, `SELECT seq, ev, snapshot, toUnixTimestamp64Micro((SELECT min(committed) - INTERVAL 1 DAY FROM ledger
    WHERE kind = 'life' AND source = {source:String} AND epoch = {epoch:UInt64})) AS since FROM (
  SELECT seq, toInt64(ev) AS ev, toInt64(0) AS snapshot FROM block_events
  WHERE hash = 0 AND op = 'CLEARED' AND source = {source:String} AND epoch = {epoch:UInt64} AND seq <= {last:UInt64}
  UNION ALL SELECT last AS seq, if(snapshot = 0, -1, 4294967296) AS ev, snapshot FROM ledger
  WHERE kind = 'resync' AND source = {source:String} AND epoch = {epoch:UInt64} AND last <= {last:UInt64}
  UNION ALL SELECT 0 AS seq, -1 AS ev, 0 AS snapshot)
ORDER BY seq DESC, ev DESC LIMIT 1`, bound, func(scan func(...any) error) error {
		var seq uint64
		var ev, snapshot int64
		var since *int64
		if err := scan(&seq, &ev, &snapshot, &since); err != nil {
			return err
		}
		bound["seq"], bound["ev"], bound["snapshot"] = fmt.Sprint(seq), fmt.Sprint(ev), fmt.Sprint(snapshot)
		if since != nil {
			bound["since"] = fmt.Sprint(*since)
		}
		return nil
	})
	if err != nil {
		return err
	}
	var rows uint64
	err = r.query(ctx, `SELECT count() FROM block_events
WHERE committed >= fromUnixTimestamp64Micro({since:Int64}) AND source = {source:String} AND epoch = {epoch:UInt64}`, bound,
		func(scan func(...any) error) error { return scan(&rows) })
	if err != nil {
		return err
	}
	// A set is added up a share of its hashes at a time: the memory that a query may take has a bound.
	shares := 1 + rows/rowsAtOnce
	bound["shares"] = fmt.Sprint(shares)
	for share := range shares {
		bound["share"] = fmt.Sprint(share)
		if err := r.addUp(ctx, bound, yield); err != nil {
			return err
		}
	}
	return nil
}

// rowsAtOnce is over how many rows a resident set is added up at once.
const rowsAtOnce = 2_000_000

func (r *Reader) addUp(ctx context.Context, bound clickhouse.Parameters, yield func(Resident)) error {
	return r.query(ctx, `SELECT engine_hash, toString(tier), kv_group, sum(n) AS copies FROM (
  SELECT engine_hash, tier, greatest(kv_group, 0) AS kv_group, toInt64(effect) AS n FROM block_events
  WHERE committed >= fromUnixTimestamp64Micro({since:Int64}) AND source = {source:String} AND epoch = {epoch:UInt64} AND effect != 0
    AND (seq, toInt64(ev)) > ({seq:UInt64}, {ev:Int64}) AND seq <= {last:UInt64}
    AND engine_hash % {shares:UInt64} = {share:UInt64}
  UNION ALL SELECT engine_hash, tier, greatest(kv_group, 0) AS kv_group, toInt64(copies) AS n FROM (
    SELECT DISTINCT hash, engine_hash, tier, kv_group, copies FROM snapshots
    WHERE source = {source:String} AND snapshot = {snapshot:Int64} AND snapshot != 0
      AND engine_hash % {shares:UInt64} = {share:UInt64}))
GROUP BY engine_hash, tier, kv_group HAVING copies != 0`, bound, func(scan func(...any) error) error {
		var b Resident
		var tier string
		var group int32
		err := scan(&b.Hash, &tier, &group, &b.Copies)
		b.Tier, b.Group = event.Tier(tier), event.Group(group)
		if err == nil {
			yield(b)
		}
		return err
	})
}

// Totals are what a source told, of blocks that changed copies.
type Totals struct{ Stored, Evicted, Loaded, Cleared uint64 }

// Totals adds up everything kept of a source.
func (r *Reader) Totals(ctx context.Context, source event.Source) (Totals, error) {
	var t Totals
	err := r.query(ctx, `SELECT countIf(op = 'STORED' AND effect > 0), countIf(op = 'EVICTED' AND effect < 0), countIf(op = 'LOADED'),
  countIf(op = 'CLEARED') FROM block_events WHERE source = {source:String}`,
		clickhouse.Parameters{"source": source.Tokens()}, func(scan func(...any) error) error {
			return scan(&t.Stored, &t.Evicted, &t.Loaded, &t.Cleared)
		})
	return t, err
}

// Mark returns where history stands with a source.
func (r *Reader) Mark(ctx context.Context, source event.Source) (event.Mark, error) {
	var fence, epoch, seq uint64
	var started uint8
	err := r.query(ctx, `SELECT fence, epoch, started, seq FROM progress WHERE source = {source:String} ORDER BY round DESC LIMIT 1`,
		clickhouse.Parameters{"source": source.Tokens()}, func(scan func(...any) error) error {
			return scan(&fence, &epoch, &started, &seq)
		})
	return event.Mark{Fence: event.Fence(fence), Epoch: event.Epoch(epoch), Started: started != 0, Seq: event.Seq(seq)}, err
}
