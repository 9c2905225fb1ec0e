package history

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/ClickHouse/clickhouse-go/v2"

	"kvstrata/event"
)

// rollups are how far what was told is counted by time. Seconds before until are counted as of the rows up to a place; so are minutes and
// hours that end at or before it. What comes to them later, by the bus's clock, makes them be counted again.
type rollups struct {
	at    event.Position
	until int64 // in seconds of Unix time
}

// rollupsName is the source of the row of progress that has them: until is its seq.
const rollupsName = "rollups"

// rollChunk bounds over how many minutes rows are counted at once.
const rollChunk = 5

// roller counts by time what rounds have brought, beside them, on a connection of its own.
type roller struct {
	w     *Writer
	conn  clickhouse.Conn
	bound clickhouse.Parameters
	round uint64 // the last whose rows are counted
	tries uint64
}

// rollShare is how many times as long as a pass took nothing is counted.
const rollShare = 5

// run rolls up until ctx ends.
func (r *roller) run(ctx context.Context) error {
	for {
		began := time.Now()
		if err := r.pass(ctx); err != nil {
			return err
		}
		pause := time.NewTimer(max(r.w.cfg.RollUpEvery, rollShare*time.Since(began)))
		select {
		case <-ctx.Done():
			pause.Stop()
			return ctx.Err()
		case <-pause.C:
		}
	}
}

// RolledUp returns up to which place everything is counted by time.
func (w *Writer) RolledUp() event.Position {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.rolled.at
}

// beyondPlace are rows behind a place in the stream. Spelled out, so that the index of stream and stream_seq serves it.
const beyondPlace = `(stream > {stream:Int64} OR stream = {stream:Int64} AND stream_seq > {after:UInt64})`

// pass counts what came since the last one, but for the second that the bus is in.
func (r *roller) pass(ctx context.Context) error {
	r.w.mu.Lock()
	from, to, round := r.w.rolled, r.w.committed.at, r.w.committed.round
	r.w.mu.Unlock()
	if to == from.at {
		return nil
	}
	r.round, r.bound = round, clickhouse.Parameters{
		"stream": fmt.Sprint(int64(from.at.Created)), "after": fmt.Sprint(from.at.Sequence),
		"to_stream": fmt.Sprint(int64(to.Created)), "to": fmt.Sprint(to.Sequence), "name": to.Stream, "open": fmt.Sprint(from.until),
	}
	until := from.until
	err := r.ask(ctx, `SELECT toInt64(toUnixTimestamp(max(committed))) FROM batches WHERE `+beyondPlace+`
  AND (stream < {to_stream:Int64} OR stream = {to_stream:Int64} AND stream_seq <= {to:UInt64})`,
		func(second int64) { until = max(until, second) })
	if err != nil {
		return err
	}
	var minutes []int64 // to which rows came, and that of the second that was left out the last time
	if from.until > 0 {
		minutes = append(minutes, from.until/60)
	}
	r.bound["until"] = fmt.Sprint(until)
	err = r.ask(ctx, `SELECT DISTINCT toInt64(intDiv(toUnixTimestamp(committed), 60)) FROM batches
WHERE `+beyondPlace+` AND committed < fromUnixTimestamp64Micro(1000000 * {until:Int64})`, func(minute int64) { minutes = append(minutes, minute) })
	if err != nil {
		return err
	}
	slices.Sort(minutes)
	if minutes = slices.Compact(minutes); len(minutes) > 0 {
		if err := r.count(ctx, minutes, until); err != nil {
			return err
		}
		if err := r.exec(ctx, saveRollups); err != nil {
			return err
		}
	}
	r.w.mu.Lock()
	defer r.w.mu.Unlock()
	r.w.rolled = rollups{at: to, until: until}
	return nil
}

const saveRollups = `INSERT INTO progress (source, round, committed, stream_name, stream, stream_seq, fence, epoch, started, seq, digest)
SELECT '` + rollupsName + `', {version:UInt64}, now64(6), {name:String}, {to_stream:Int64}, {to:UInt64}, 0, 0, 0, {until:UInt64}, 0`

// count counts the seconds of minutes to which rows came, those minutes, and the hours that they are in, as far as they have ended.
func (r *roller) count(ctx context.Context, minutes []int64, until int64) error {
	between := func(sql string, from, before int64) error {
		if from >= before {
			return nil
		}
		r.bound["from"], r.bound["before"] = fmt.Sprint(from), fmt.Sprint(before)
		return r.exec(ctx, sql)
	}
	for rest := minutes; len(rest) > 0; {
		n := 1
		for n < min(len(rest), rollChunk) && rest[n] == rest[n-1]+1 {
			n++
		}
		from, before := 60*rest[0], 60*(rest[n-1]+1)
		rest = rest[n:]
		if err := between(countSeconds, from, min(before, until)); err != nil {
			return err
		}
		if err := between(countMinutes, from, min(before, until/60*60)); err != nil {
			return err
		}
	}
	done := int64(-1)
	for _, minute := range minutes {
		if hour := minute / 60; hour > done && 3600*(hour+1) <= until {
			done = hour
			if err := between(countHours, 3600*hour, 3600*(hour+1)); err != nil {
				return err
			}
		}
	}
	return nil
}

// rollDoing is what a roller is told to do when ClickHouse takes nothing.
const rollDoing = "roll history up"

// ask yields the numbers that a query gives, once they are all there.
func (r *roller) ask(ctx context.Context, sql string, yield func(int64)) error {
	var all []int64
	err := r.w.insist(ctx, rollDoing, func(ctx context.Context) error {
		all = nil
		rows, err := r.conn.Query(clickhouse.Context(ctx, clickhouse.WithParameters(r.bound)), sql)
		if err != nil {
			return err
		}
		defer rows.Close()
		for rows.Next() {
			var n int64
			if err := rows.Scan(&n); err != nil {
				return err
			}
			all = append(all, n)
		}
		return rows.Err()
	})
	for _, n := range all {
		yield(n)
	}
	return err
}

// exec runs a statement until it worked. Each try has a version of its own: what one that was given up counts may come late.
func (r *roller) exec(ctx context.Context, sql string) error {
	return r.w.insist(ctx, rollDoing, func(ctx context.Context) error {
		r.tries++
		r.bound["version"] = fmt.Sprint(r.round<<20 | r.tries&(1<<20-1))
		return r.w.exec(clickhouse.Context(ctx, clickhouse.WithParameters(maps.Clone(r.bound))), r.conn, sql)
	})
}

// bands are the lifetimes that are counted, by the milliseconds at which they begin.
var bands = []struct {
	from int64
	name string
}{
	{0, "< 1 s"},
	{1000, "1–10 s"},
	{10_000, "10–60 s"},
	{60_000, "1–5 min"},
	{300_000, "5–30 min"},
	{1_800_000, "30 min–2 h"},
	{7_200_000, "2–12 h"},
	{43_200_000, "> 12 h"},
}

// bandOf names the lifetime that an age in ms is in.
func bandOf(age string) string {
	var b strings.Builder
	for i, band := range bands[1:] {
		fmt.Fprintf(&b, "%s < %d, '%s', ", age, band.from, bands[i].name)
	}
	return "multiIf(" + b.String() + "'" + bands[len(bands)-1].name + "')"
}

// agesKnown are the evictions whose age is counted: of last copies.
const agesKnown = `op = 'EVICTED' AND age_ms >= 0 AND copies < 1`

// roundedAge is an age in ms as it is counted: rounded down to 8 binary digits, and to the bounds of lifetimes.
var roundedAge = func() string {
	borders := make([]string, len(bands))
	for i, b := range bands {
		borders[i] = strconv.FormatInt(b.from, 10)
	}
	const cut = `greatest(toInt64(floor(log2(greatest(age_ms, 1)))) - 7, 0)`
	return `toUInt64(greatest(bitShiftLeft(bitShiftRight(age_ms, ` + cut + `), ` + cut + `), roundDown(age_ms, [` + strings.Join(borders, ", ") + `])))`
}()

// counters are the columns of a roll-up that add up.
var counters = []string{
	"blocks", "stored", "evicted", "loaded", "cleared", "batches", "sequences", "lost", "loads", "load_bytes", "load_us",
}

// counts of rows of block_events.
const (
	countStored  = `countIf(op = 'STORED' AND effect > 0)`
	countEvicted = `countIf(op = 'EVICTED' AND effect < 0)`
	countLoaded  = `countIf(op = 'LOADED')`
	countCleared = `countIf(op = 'CLEARED')`
)

// Rows of block_events, and those with a finer time, of seconds to which rows came, or that were left out the last time. A time in microseconds is
// not compared with whole seconds: the engine takes 0.5 s before one for as late.
const (
	inChunk = `committed >= toDateTime({from:Int64}, 'UTC') AND committed < toDateTime({before:Int64}, 'UTC') AND ` + inTouched

	inFineChunk = fineChunk + ` AND ` + inTouched

	fineChunk = `committed >= fromUnixTimestamp64Micro(1000000 * {from:Int64}) AND committed < fromUnixTimestamp64Micro(1000000 * {before:Int64})`

	inTouched = `toUnixTimestamp(committed) IN (
    SELECT toUnixTimestamp(committed) FROM batches WHERE ` + beyondPlace + ` AND ` + fineChunk + ` UNION ALL SELECT {open:UInt32})`
)

// insertRollup begins a statement that counts, with as many of the counters as are told.
func insertRollup(table, rest string) string {
	sums := make([]string, len(counters))
	for i, c := range counters {
		sums[i] = "sum(" + c + ")"
	}
	return `INSERT INTO ` + table + ` (bucket, source, epoch, tier, version, ` + strings.Join(counters, ", ") + `, ages, first, last)
SELECT bucket, source, epoch, tier, {version:UInt64}, ` + strings.Join(sums, ", ") + `, ` + rest
}

// zeros are the counters, all but those that are told.
func zeros(told map[string]string) string {
	columns := make([]string, len(counters))
	for i, c := range counters {
		columns[i] = "toUInt64(" + told[c] + ") AS " + c
		if told[c] == "" {
			columns[i] = "toUInt64(0) AS " + c
		}
	}
	return strings.Join(columns, ", ")
}

var countSeconds = insertRollup("rollup_seconds", `sumMapIf(map(age, blocks), aged) AS ages,
  if(sum(blocks) > 0, bucket, toDateTime(0, 'UTC')), if(sum(blocks) > 0, bucket, toDateTime(0, 'UTC'))
FROM (
  SELECT committed AS bucket, source, epoch, tier,
    `+agesKnown+` AS aged, if(aged, `+roundedAge+`, toUInt64(0)) AS age, `+
	zeros(map[string]string{"blocks": "count()", "stored": countStored, "evicted": countEvicted, "loaded": countLoaded, "cleared": countCleared})+`
  FROM block_events WHERE `+inChunk+` GROUP BY bucket, source, epoch, tier, aged, age
  UNION ALL SELECT toDateTime(committed, 'UTC') AS bucket, source, epoch, toLowCardinality('') AS tier, toUInt8(0) AS aged, toUInt64(0) AS age, `+
	zeros(map[string]string{"batches": "count()", "sequences": "sumIf(last - seq + 1, way != 'dropped')", "lost": "sumIf(last - seq + 1, way = 'lost')"})+`
  FROM batches WHERE `+inFineChunk+` GROUP BY bucket, source, epoch
  UNION ALL SELECT toDateTime(committed, 'UTC') AS bucket, source, epoch, tier, toUInt8(0) AS aged, toUInt64(0) AS age, `+
	zeros(map[string]string{"loads": "count()", "load_bytes": "sum(bytes)", "load_us": "sum(duration_us)"})+`
  FROM loads WHERE `+inFineChunk+` GROUP BY bucket, source, epoch, tier)
GROUP BY bucket, source, epoch, tier
SETTINGS max_threads = 1, max_bytes_before_external_group_by = 268435456`)

var (
	countMinutes = countAgain("rollup_minutes", "rollup_seconds", "toStartOfMinute(bucket)")
	countHours   = countAgain("rollup_hours", "rollup_minutes", "toStartOfHour(bucket)")
)

// countAgain adds up the buckets of a roll-up into larger ones.
func countAgain(to, from, larger string) string {
	return insertRollup(to, `sumMap(ages), minIf(first, blocks > 0), max(last)
FROM (SELECT * REPLACE (`+larger+` AS bucket) FROM `+from+` FINAL
  WHERE bucket >= toDateTime({from:Int64}, 'UTC') AND bucket < toDateTime({before:Int64}, 'UTC'))
GROUP BY bucket, source, epoch, tier
SETTINGS max_threads = 1, max_bytes_before_external_group_by = 268435456`)
}
