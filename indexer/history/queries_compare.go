package history

import (
	"fmt"
	"slices"
	"time"
)

// The window that another is compared with.
var (
	beforeSince = Param{"before_since", "duration", "", "The beginning of the window to compare with; empty: as long before its end as the other is."}
	beforeUntil = Param{"before_until", "duration", "", "The end of the window to compare with; empty: where the other begins."}
)

// compares reports whether a question is about two windows.
func (q *Query) compares() bool { return slices.Contains(q.Params, beforeSince) }

// windowBefore reads the window that w is compared with.
func windowBefore(values map[string]string, w window, now time.Time) (window, error) {
	before := window{until: w.since}
	var err error
	if text := values[beforeUntil.Name]; text != "" {
		if before.until, err = parseTime(text, now); err != nil {
			return before, fmt.Errorf("%w %s: %w", ErrBadParam, beforeUntil.Name, err)
		}
		before.until = earlier(before.until, now.Add(aheadAtMost))
	}
	before.since = later(before.until.Add(-w.until.Sub(w.since)), time.Unix(0, 0))
	if text := values[beforeSince.Name]; text != "" {
		if before.since, err = parseTime(text, now); err != nil {
			return before, fmt.Errorf("%w %s: %w", ErrBadParam, beforeSince.Name, err)
		}
	}
	if !before.since.Before(before.until) {
		return before, fmt.Errorf("%w %s: %s is not before %s", ErrBadParam, beforeSince.Name,
			before.since.UTC().Format(time.RFC3339), before.until.UTC().Format(time.RFC3339))
	}
	return before, nil
}

var comparisons = []Query{
	{
		Name: "compare", Title: "Two windows",
		Help:   "What changed from one window to another, by engine and by prefix, the largest change first.",
		Params: []Param{since, until, beforeSince, beforeUntil, model, engine, sample, {"limit", "number", "100", "Rows at most."}},
		sql: `WITH committed BETWEEN toDateTime({first:Int64}, 'UTC') AND toDateTime({last:Int64}, 'UTC') AS is_now,
committed BETWEEN toDateTime({before_first:Int64}, 'UTC') AND toDateTime({before_last:Int64}, 'UTC') AS is_before,
counts AS (
  SELECT source, start, at_root, max(max(block_size)) OVER (PARTITION BY source, grp) AS size,
    [countIf(op = 'STORED' AND is_before), countIf(op = 'STORED' AND is_now), countIf(op = 'EVICTED' AND is_before),
      countIf(op = 'EVICTED' AND is_now), countIf(op = 'LOADED' AND is_before), countIf(op = 'LOADED' AND is_now)] AS n
  FROM (
    SELECT source, greatest(kv_group, 0) AS grp, hash, named, op, block_size, committed FROM block_events
    WHERE (op = 'STORED' AND effect > 0 OR op = 'EVICTED' AND effect < 0 OR op = 'LOADED') AND (is_now OR is_before)
      AND ` + inSample + ` AND ` + inReach + `) AS told
  LEFT JOIN (` + runStarts(`(is_now OR is_before)`) + `) AS starts USING (hash, named)
  GROUP BY source, grp, start, at_root)
SELECT row.1, model, row.2, nullIf(row.3, 0), if(row.3 = 0, '', if(row.4, 'root', 'continuation')),
  (sumForEach(n) AS s)[1] * {share:UInt64}, s[2] * {share:UInt64}, s[3] * {share:UInt64}, s[4] * {share:UInt64}, s[5] * {share:UInt64},
  s[6] * {share:UInt64}, (abs(toInt64(s[2]) - s[1]) + abs(toInt64(s[4]) - s[3]) + abs(toInt64(s[6]) - s[5])) * {share:UInt64} AS change,
  if(min(size) = 0, NULL, (abs(toInt64(sum(n[2] * size)) - sum(n[1] * size)) + abs(toInt64(sum(n[4] * size)) - sum(n[3] * size))
    + abs(toInt64(sum(n[6] * size)) - sum(n[5] * size))) * {share:UInt64})
FROM (
  SELECT ` + modelOf + ` AS model, n, size, arrayJoin([('engine', ` + instanceOf + `, toUInt64(0), false), ('prefix', '', start, at_root != 0)]) AS row
  FROM counts)
GROUP BY row, model ORDER BY change DESC, row, model
LIMIT {limit:UInt64}`,
		columns: []Column{
			{"by", "text", ""},
			{"model", "text", ""},
			{"engine", "text", ""},
			{"prefix", "hash", ""},
			{"begins at", "text", ""},
			{"stored before", "number", "blocks"},
			{"stored", "number", "blocks"},
			{"evicted before", "number", "blocks"},
			{"evicted", "number", "blocks"},
			{"loaded before", "number", "blocks"},
			{"loaded", "number", "blocks"},
			{"change", "number", "blocks"},
			{"change in tokens", "number", "tokens"},
		},
		chart: Chart{"none", "", nil},
		notes: []string{
			countsEffects,
			"change is the sum of what each of the three changed by, up or down; windows of different lengths are compared as they are",
			startsByRun + "; blocks whose run is not known are in a row of their own",
			tokensBySize,
		},
		sampled: true,
	},
}
