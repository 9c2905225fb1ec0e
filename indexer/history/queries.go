package history

import "slices"

// Parameters that most questions have.
var (
	since  = Param{"since", "duration", "1h", "A duration back from now, as 15m or 7d, or a time."}
	until  = Param{"until", "duration", "", "The end; empty: now."}
	model  = Param{"model", "text", "", "Only this model."}
	engine = Param{"engine", "text", "", "Only this engine (instance)."}
	limit  = Param{"limit", "number", "1000", "Rows at most."}
)

// inWindow are the rows that a question is about. The time is when the bus took the event: engines' clocks may be wrong. Block events
// have whole seconds: inSeconds are those of a window that begins and ends with them, and reads no hour beyond.
const (
	inWindow  = `committed >= fromUnixTimestamp64Micro({since:Int64}) AND committed < fromUnixTimestamp64Micro({until:Int64}) AND ` + ofSources
	inSeconds = `committed BETWEEN toDateTime({first:Int64}, 'UTC') AND toDateTime({last:Int64}, 'UTC') AND ` + ofSources
)

// inWindowSeconds are those in inSeconds, of tables with a finer time. That is not compared with whole seconds: the engine would take half a
// second before one for as late.
const inWindowSeconds = `committed >= fromUnixTimestamp64Micro(1000000 * {first:Int64}) AND committed < fromUnixTimestamp64Micro(1000000 * ({last:Int64} + 1)) AND ` + ofSources

// inReach are those, and the rows before them that say what came before.
const (
	inReach = inReachOfAll + ` AND ` + ofSources

	inReachOfAll = `committed BETWEEN toDateTime({from:Int64}, 'UTC') AND toDateTime({to:Int64}, 'UTC')`
)

// ofSources are the rows of the model and the engine that are asked about. Sources are named once, not in every row.
const ofSources = `({model:String} = '' AND {engine:String} = '' OR source IN (SELECT source FROM progress WHERE source != ''
    AND ({model:String} = '' OR ` + modelOf + ` = {model:String})
    AND ({engine:String} = '' OR ` + instanceOf + ` = {engine:String})))`

// Parts of a source's name. Taking a name apart costs more than counting a row: it is done after adding up by source.
const (
	modelOf    = `decodeURLComponent(splitByChar('.', toString(source))[2])`
	instanceOf = `decodeURLComponent(splitByChar('.', toString(source))[3])`
)

const countsEffects = "stored and evicted count what changed copies; a block that was told again is not counted"

var queries = slices.Concat(totals, residencies, uses, storms, comparisons, duplications, lineages, losses, transfers, tiers, states, lookupQueries)

var totals = []Query{
	{
		Name: "events", Title: "Events over time",
		Help:   "Blocks stored, evicted and loaded, and resets, by time.",
		Params: []Param{since, until, model, engine, limit},
		sql: `SELECT time, sum(n_stored) AS stored, sum(n_evicted) AS evicted, sum(n_loaded) AS loaded, sum(n_cleared) AS cleared
FROM (
  ` + counted(`toStartOfInterval(bucket, toIntervalSecond({step:UInt32})) AS time, stored AS n_stored, evicted AS n_evicted, loaded AS n_loaded,
    cleared AS n_cleared, blocks`) + `
  UNION ALL SELECT toStartOfInterval(committed, toIntervalSecond({step:UInt32})) AS time, ` + countStored + `, ` + countEvicted + `,
    ` + countLoaded + `, ` + countCleared + `, count()
  FROM block_events WHERE ` + inTail + ` GROUP BY time)
WHERE blocks > 0
GROUP BY time ORDER BY time
WITH FILL FROM toStartOfInterval(fromUnixTimestamp64Micro({since:Int64}, 'UTC'), toIntervalSecond({step:UInt32}))
  TO toDateTime(fromUnixTimestamp64Micro({until:Int64}), 'UTC') STEP toIntervalSecond({step:UInt32})
LIMIT {limit:UInt64}`,
		columns: []Column{
			{"time", "time", ""},
			{"stored", "number", "blocks"},
			{"evicted", "number", "blocks"},
			{"loaded", "number", "blocks"},
			{"cleared", "number", "resets"},
		},
		chart:    Chart{"line", "time", []string{"stored", "evicted", "loaded"}},
		notes:    []string{countsEffects},
		counting: countingInStep,
	},
	{
		Name: "engines", Title: "Totals by engine",
		Help:   "What each engine told, and since when.",
		Params: []Param{since, until, model, engine, limit},
		sql: `SELECT ` + modelOf + ` AS model, ` + instanceOf + ` AS instance,
  toUInt32OrZero(splitByChar('.', toString(source))[4]) AS dp_rank, splitByChar('.', toString(source))[5] AS origin,
  stored, evicted, loaded, cleared, lives, first, last
FROM (
  SELECT source, sum(n_stored) AS stored, sum(n_evicted) AS evicted, sum(n_loaded) AS loaded, sum(n_cleared) AS cleared, uniqExact(epoch) AS lives,
    min(began) AS first, max(ended) AS last
  FROM (
    ` + counted(`source, epoch, stored AS n_stored, evicted AS n_evicted, loaded AS n_loaded, cleared AS n_cleared, first AS began, last AS ended, blocks`) + `
    UNION ALL SELECT source, epoch, ` + countStored + `, ` + countEvicted + `, ` + countLoaded + `, ` + countCleared + `,
      min(committed), max(committed), count()
    FROM block_events WHERE ` + inTail + ` GROUP BY source, epoch)
  WHERE blocks > 0
  GROUP BY source)
ORDER BY stored DESC, instance, dp_rank, origin, model
LIMIT {limit:UInt64}`,
		columns: []Column{
			{"model", "text", ""},
			{"engine", "text", ""},
			{"rank", "number", ""},
			{"origin", "text", ""},
			{"stored", "number", "blocks"},
			{"evicted", "number", "blocks"},
			{"loaded", "number", "blocks"},
			{"cleared", "number", "resets"},
			{"lives", "number", ""},
			{"first", "time", ""},
			{"last", "time", ""},
		},
		chart:    Chart{"bar", "engine", []string{"stored", "evicted"}},
		notes:    []string{countsEffects},
		counting: wholeWindow,
	},
	{
		Name: "evictions", Title: "Evictions by engine",
		Help:   "How many blocks each engine evicted from each tier, and how old they were then.",
		Params: []Param{since, until, model, engine, limit},
		sql: `SELECT ` + modelOf + ` AS model, ` + instanceOf + ` AS instance, tier, sum(n) AS evicted, sum(known) AS aged,
  (quantilesExactWeightedArray(0.01, 0.5, 0.99)(mapKeys(ages), mapValues(ages)) AS q)[1] / 1e3, q[2] / 1e3, q[3] / 1e3
FROM (
  SELECT source, tier, sum(some) AS n, sumMap(some_ages) AS ages, arraySum(mapValues(ages)) AS known
  FROM (
    ` + counted(`source, tier, evicted AS some, ages AS some_ages`) + `
    UNION ALL SELECT source, tier, ` + countEvicted + `, if(` + agesKnown + `, map(` + roundedAge + `, count()), CAST(map(), 'Map(UInt64, UInt64)'))
    FROM block_events WHERE op = 'EVICTED' AND ` + inTail + ` GROUP BY source, tier, ` + agesKnown + `, ` + roundedAge + `)
  WHERE some > 0 OR notEmpty(some_ages)
  GROUP BY source, tier)
GROUP BY model, instance, tier ORDER BY evicted DESC, instance, tier, model
LIMIT {limit:UInt64}`,
		columns: []Column{
			{"model", "text", ""},
			{"engine", "text", ""},
			{"tier", "text", ""},
			{"evicted", "number", "blocks"},
			{"with known age", "number", "blocks"},
			{"age p1", "seconds", "s"},
			{"age p50", "seconds", "s"},
			{"age p99", "seconds", "s"},
		},
		chart: Chart{"bar", "engine", []string{"evicted"}},
		notes: []string{
			"age is from when copies rose from 0 until they fell to 0, by the engine's clock; engines tell no reason",
			"percentiles are of ages rounded down to 8 binary digits: by 0.8 % at most",
		},
		counting: wholeWindow,
	},
	{
		Name: "lifetimes", Title: "Block lifetimes",
		Help:   "How long evicted blocks had been resident.",
		Params: []Param{since, until, model, engine, limit},
		sql: `SELECT ` + bandOf("age") + ` AS lifetime, sum(n) AS blocks, sum(blocks) OVER () AS known, blocks / known AS share
FROM (
  SELECT age, n FROM (` + counted(`ages`) + `)
  ARRAY JOIN mapKeys(ages) AS age, mapValues(ages) AS n
  UNION ALL SELECT ` + roundedAge + ` AS age, count() FROM block_events WHERE ` + agesKnown + ` AND ` + inTail + ` GROUP BY age)
GROUP BY lifetime ORDER BY min(age)
LIMIT {limit:UInt64}`,
		columns: []Column{
			{"lifetime", "text", ""}, {"evicted", "number", "blocks"}, {"of", "number", "blocks"}, {"share", "ratio", ""},
		},
		chart:    Chart{"bar", "lifetime", []string{"evicted"}},
		notes:    []string{"only blocks that lost their last copy and whose age is known; those still resident are not in it"},
		counting: wholeWindow,
	},
	{
		Name: "hot-prefixes", Title: "Hot prefixes",
		Help:   "The prefixes that most stored runs continued, how often their last block was stored and loaded, and the tokens that loads saved.",
		Params: []Param{since, until, model, engine, {"limit", "number", "50", "Rows at most."}},
		sql: `WITH (SELECT groupArray((model, prefix, continued, engines, last)) FROM (
  SELECT ` + modelOf + ` AS model, run_prefix AS prefix, sum(runs) AS continued, uniqExact(source) AS engines, max(newest) AS last
  FROM (
    SELECT source, told_prefix AS run_prefix, count() AS runs, max(toDateTime(committed, 'UTC')) AS newest FROM batches
    ARRAY JOIN arrayFilter(p -> p != 0, run_prefix) AS told_prefix
    WHERE ` + inWindowSeconds + `
    GROUP BY source, told_prefix)
  GROUP BY model, prefix ORDER BY continued DESC, prefix
  LIMIT {limit:UInt64})) AS hot
SELECT model, prefix, continued, engines, last, stored, loaded, nullIf(saved, 0), if(saved = 0 OR size = 0, NULL, saved * size)
FROM (SELECT (arrayJoin(hot) AS h).1 AS model, h.2 AS prefix, h.3 AS continued, h.4 AS engines, h.5 AS last) AS hottest
LEFT JOIN (
  SELECT ` + modelOf + ` AS model, hash AS prefix, sum(n_stored) AS stored, sum(n_loaded) AS loaded, sum(n_saved) AS saved, max(block_tokens) AS size FROM (
    SELECT source, hash, countIf(op = 'STORED' AND effect > 0) AS n_stored, countIf(op = 'LOADED') AS n_loaded,
      sumIf(toUInt64(pos) + 1, op = 'LOADED') AS n_saved, max(block_size) AS block_tokens
    FROM block_events WHERE hash IN (SELECT arrayJoin(hot).2) AND named = 1 AND ` + inSeconds + ` GROUP BY source, hash)
  GROUP BY model, prefix) AS told USING (model, prefix)
ORDER BY continued DESC, prefix`,
		columns: []Column{
			{"model", "text", ""},
			{"prefix", "hash", ""},
			{"continued", "number", "runs"},
			{"engines", "number", ""},
			{"last", "time", ""},
			{"stored", "number", "times"},
			{"loaded", "number", "times"},
			{"saved by loads", "number", "blocks"},
			{"saved by loads tokens", "number", "tokens"},
		},
		chart: Chart{"none", "", nil},
		notes: []string{
			"engines report no hits: a request that was cached whole leaves no trace, and is not counted",
			"runs that continue a block that was stored long ago, and not since history was started, are not counted",
			"stored and loaded are of the prefix's last block; saved by loads are the blocks of the prefix that came with it, each time",
		},
	},
	{
		Name: "loads", Title: "Loads",
		Help:   "Blocks loaded, their bytes, and how long that took, by who loaded from where.",
		Params: []Param{since, until, model, engine, limit},
		sql: `SELECT ` + instanceOf + ` AS instance, peer, from_tier, tier, sum(n) AS loads, sum(n_blocks) AS all_blocks, sum(n_bytes) AS all_bytes,
  (quantilesMerge(0.5, 0.99)(durations) AS q)[1] / 1e6, q[2] / 1e6, all_bytes / greatest(sum(duration) / 1e6, 1e-9) AS rate
FROM (
  SELECT source, peer, from_tier, tier, count() AS n, sum(blocks) AS n_blocks, sum(bytes) AS n_bytes, sum(duration_us) AS duration,
    quantilesState(0.5, 0.99)(duration_us) AS durations
  FROM loads
  WHERE ` + inWindow + `
  GROUP BY source, peer, from_tier, tier)
GROUP BY instance, peer, from_tier, tier ORDER BY all_bytes DESC, instance, peer, from_tier, tier
LIMIT {limit:UInt64}`,
		columns: []Column{
			{"engine", "text", ""},
			{"peer", "text", ""},
			{"from", "text", ""},
			{"to", "text", ""},
			{"loads", "number", ""},
			{"blocks", "number", "blocks"},
			{"bytes", "bytes", "B"},
			{"duration p50", "seconds", "s"},
			{"duration p99", "seconds", "s"},
			{"rate", "bytes", "B/s"},
		},
		chart: Chart{"bar", "engine", []string{"bytes"}},
		notes: []string{
			"percentiles of more than 8,192 loads are of a sample",
			"rate is the sum of bytes over the sum of durations: loads that ran side by side add up to less than the link carried",
		},
	},
	{
		Name: "ledger", Title: "Gaps and states",
		Help:   "Lives that began, ranges that were lost or dropped, digests that differed, resyncs, and changes of state.",
		Params: []Param{since, until, model, engine, limit},
		sql: `SELECT committed, model, instance, kind, state, epoch, seq, last, reason
FROM ledger
WHERE ` + inWindow + `
ORDER BY committed DESC, instance, seq DESC, kind
LIMIT {limit:UInt64}`,
		columns: []Column{
			{"time", "time", ""},
			{"model", "text", ""},
			{"engine", "text", ""},
			{"kind", "text", ""},
			{"state", "text", ""},
			{"epoch", "number", ""},
			{"first", "number", ""},
			{"last", "number", ""},
			{"reason", "text", ""},
		},
		chart: Chart{"none", "", nil},
	},
	{
		Name: "capacity", Title: "Other sizes",
		Help: "How much of what engines stored more memory, or a store that they share, would have had.",
		Params: []Param{
			since, until, model, engine,
			{"blocks", "number", "0", "Blocks that each engine's memory has; 0: as many as are resident when the window ends."},
			{"block_bytes", "number", "0", "Bytes of a block; 0: unknown."},
			limit,
		},
		tell:    (*Reader).capacity,
		columns: capacityColumns,
		chart:   Chart{"none", "", nil},
		notes:   capacityNotes,
	},
}
