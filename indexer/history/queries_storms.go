package history

// runStarts are, of each block that is looked at, the first block of a run in which it was stored: of the longest before it, so that
// the root is found where any engine stored everything from it in one run. at_root says that it begins there. where says which rows
// are read for that.
func runStarts(where string) string {
	return `SELECT hash, named, start, at_root FROM (
    SELECT hash, named, argMax(` + runKey + `, (pos, ` + runKey + `)) AS run FROM block_events
    WHERE op = 'STORED' AND ` + inSample + ` AND ` + where + ` GROUP BY hash, named) AS stored
  INNER JOIN (
    SELECT ` + runKey + ` AS run, start, at_root FROM (
      SELECT toDateTime(committed, 'UTC') AS committed, source, epoch, seq, ev, start, at_root FROM batches
      ARRAY JOIN run_ev AS ev, run_start AS start, run_root AS at_root)
    WHERE ` + where + `) AS begun USING run`
}

// runKey names a run in a number.
const runKey = `cityHash64(source, epoch, seq, ev)`

// startsByRun says what a prefix is in questions that add up by it.
const startsByRun = "a prefix is named by the first block of the longest run with which its blocks were stored in what was read; the root, where that run begins there"

var storms = []Query{
	{
		Name: "storms", Title: "Eviction storms",
		Help: "When evictions burst on an engine, and the prefix that lost most.",
		Params: []Param{
			since, until, model, engine,
			{"bucket", "duration", "10s", "Evictions are counted in buckets of this length."},
			{"factor", "number", "4", "A storm has more evictions than so many times the engine's median bucket."},
			{"least", "number", "100", "A storm has so many evictions at least."},
			sample, limit,
		},
		sql: `WITH (SELECT groupArray((id, at, n, typical)) FROM (
  SELECT toString(source) AS id, at, sum(some) AS n, quantileExactExclusive(0.5)(sum(some)) OVER (PARTITION BY source) AS typical
  FROM (
    ` + counted(`source, toStartOfInterval(bucket, toIntervalSecond({bucket:UInt32})) AS at, evicted AS some`) + `
    UNION ALL SELECT source, toStartOfInterval(committed, toIntervalSecond({bucket:UInt32})) AS at, ` + countEvicted + `
    FROM block_events WHERE op = 'EVICTED' AND ` + inTail + ` GROUP BY source, at)
  WHERE some > 0 GROUP BY source, at)
WHERE n > {factor:UInt64} * typical AND n >= {least:UInt64}) AS bursts
SELECT at, ` + modelOf + ` AS model, ` + instanceOf + ` AS instance, all_evicted, nullIf(all_evicted * size, 0), typical, all_evicted / typical,
  nullIf(lost.prefix, 0), if(lost.prefix = 0, '', if(lost.root, 'root', 'continuation')), lost.blocks * {share:UInt64}, lost.known * {share:UInt64},
  lost.blocks / lost.known
FROM (SELECT (arrayJoin(bursts) AS b).1 AS source, b.2 AS at, b.3 AS all_evicted, b.4 AS typical) AS storm
LEFT JOIN (
  SELECT toString(source) AS source, if(uniqExact(block_size) = 1, max(block_size), 0) AS size FROM block_events
  WHERE op = 'STORED' AND block_size > 0 AND ` + inSample + ` AND ` + inSeconds + ` GROUP BY source) AS sizes USING source
LEFT JOIN (
  SELECT source, at, argMax(start, (n, start)) AS prefix, argMax(at_root, (n, start)) AS root, max(n) AS blocks, sum(n) AS known FROM (
    SELECT toString(source) AS source, toStartOfInterval(committed, toIntervalSecond({bucket:UInt32})) AS at, start, max(at_root) AS at_root, count() AS n
    FROM block_events INNER JOIN (` + runStarts(`notEmpty(bursts) AND `+inReachOfAll) + `) AS starts USING (hash, named)
    WHERE op = 'EVICTED' AND effect < 0 AND ` + inSample + ` AND ` + inSeconds + ` AND (source, at) IN (SELECT (arrayJoin(bursts) AS b).1, b.2)
    GROUP BY source, at, start)
  GROUP BY source, at) AS lost USING (source, at)
ORDER BY all_evicted DESC, at, instance, source
LIMIT {limit:UInt64}`,
		columns: []Column{
			{"time", "time", ""},
			{"model", "text", ""},
			{"engine", "text", ""},
			{"evicted", "number", "blocks"},
			{"evicted tokens", "number", "tokens"},
			{"median", "number", "blocks"},
			{"times the median", "number", ""},
			{"prefix that lost most", "hash", ""},
			{"begins at", "text", ""},
			{"lost", "number", "blocks"},
			{"of", "number", "blocks"},
			{"share", "ratio", ""},
		},
		chart: Chart{"bar", "time", []string{"evicted"}},
		notes: []string{
			"the median is of the buckets in which the engine evicted something; evicted is exact",
			startsByRun,
			"of are the evicted blocks whose run is known: those stored before the window are not",
			"tokens are blocks times the engine's block size; unknown where it stored nothing in the window, or has several sizes",
		},
		counting: countingInBucket,
		sampled:  true,
	},
}
