package history

import (
	"context"
	"strconv"
	"strings"

	"github.com/ClickHouse/clickhouse-go/v2"
)

// Questions that only count read what is counted already, by hours, minutes and seconds, and the rows of block_events behind that: the
// answer is the same.

// counting says how a question counts.
type counting uint8

const (
	notCounting      counting = iota
	wholeWindow               // buckets of any length may be read
	countingInStep            // no longer ones than those of the answer
	countingInBucket          // likewise, by the parameter bucket
)

// counted reads columns of roll-ups in the window. A column may be an expression that is named.
func counted(columns string) string {
	var levels []string
	for _, l := range []string{"hours", "minutes", "seconds"} {
		levels = append(levels, `SELECT `+columns+` FROM rollup_`+l+` FINAL WHERE (`+inBuckets("early_"+l)+` OR `+inBuckets("late_"+l)+`) AND `+ofSources)
	}
	return strings.Join(levels, `
  UNION ALL `)
}

func inBuckets(span string) string {
	return `bucket >= toDateTime({` + span + `_from:Int64}, 'UTC') AND bucket < toDateTime({` + span + `_to:Int64}, 'UTC')`
}

// inTail are the rows of block events in the window that are behind what is counted.
const inTail = `committed BETWEEN toDateTime({tail:Int64}, 'UTC') AND toDateTime({last:Int64}, 'UTC') AND ` + ofSources

// bindCounted finds how far the roll-ups go, and binds which of their buckets are read, and where rows begin.
func (r *Reader) bindCounted(ctx context.Context, bound clickhouse.Parameters, how counting) error {
	first, err := strconv.ParseInt(bound["first"], 10, 64)
	if err != nil {
		return err
	}
	last, err := strconv.ParseInt(bound["last"], 10, 64)
	if err != nil {
		return err
	}
	until, err := r.countedUntil(ctx)
	if err != nil {
		return err
	}
	step := int64(3600)
	if name := map[counting]string{countingInStep: "step", countingInBucket: "bucket"}[how]; name != "" {
		if step, err = strconv.ParseInt(bound[name], 10, 64); err != nil {
			return err
		}
	}
	for name, s := range split(first, min(until, last+1), step) {
		bound[name+"_from"], bound[name+"_to"] = strconv.FormatInt(s.from, 10), strconv.FormatInt(s.to, 10)
	}
	bound["tail"] = strconv.FormatInt(max(first, until), 10)
	return nil
}

// countedUntil returns until which second everything that is kept is counted. What came late since makes that earlier.
func (r *Reader) countedUntil(ctx context.Context) (until int64, err error) {
	if r.rowsOnly {
		return 0, nil
	}
	var stream, late int64
	var after uint64
	err = r.query(ctx, `SELECT toInt64(seq), stream, stream_seq FROM progress FINAL WHERE source = '`+rollupsName+`'`, nil,
		func(scan func(...any) error) error { return scan(&until, &stream, &after) })
	if err != nil || until == 0 {
		return 0, err
	}
	late = until
	bound := clickhouse.Parameters{
		"stream": strconv.FormatInt(stream, 10), "after": strconv.FormatUint(after, 10), "until": strconv.FormatInt(until, 10),
	}
	err = r.query(ctx, `SELECT toInt64(toUnixTimestamp(min(committed))) FROM batches WHERE `+beyondPlace+`
  AND committed < fromUnixTimestamp64Micro(1000000 * {until:Int64}) HAVING count() > 0`, bound,
		func(scan func(...any) error) error { return scan(&late) })
	return min(until, late), err
}

// span is a time in whole seconds, its end not in it.
type span struct{ from, to int64 }

// split divides a time into the buckets that cover it, those that a step is a multiple of: early and late ones of each length.
func split(from, to, step int64) map[string]span {
	spans := make(map[string]span)
	for _, l := range []struct {
		name         string
		length, next int64
	}{{"seconds", 1, 60}, {"minutes", 60, 3600}, {"hours", 3600, 0}} {
		innerFrom, innerTo := to, to
		if l.next > 0 && step%l.next == 0 {
			if up, down := (from+l.next-1)/l.next*l.next, to/l.next*l.next; up < down {
				innerFrom, innerTo = up, down
			}
		}
		spans["early_"+l.name], spans["late_"+l.name] = span{from, innerFrom}, span{innerTo, to}
		from, to = innerFrom, innerTo
	}
	return spans
}
