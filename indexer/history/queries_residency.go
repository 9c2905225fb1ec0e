package history

// within is how soon after its eviction a block is stored again for that to count.
var within = Param{"within", "duration", "5m", "How soon after its eviction a block must be stored again."}

// lives are what each block that is looked at, by what its engine calls it, went through in each tier of each source, in the source's own
// order: what stored it, and what took its last copy away. Of one entry 1 to 4 are its place, 5 is its second, 6 whether it was stored, and 7 its
// age when it was not, in ms.
const lives = livesHead + `op = 'STORED' AND effect > 0 OR ` + livesTail

// toldLives have, beside that, every STORED that told a resident block again.
const toldLives = livesHead + `op = 'STORED' OR ` + livesTail

const (
	livesHead = `SELECT source, tier, greatest(kv_group, 0) AS grp, hash, named, max(block_size) AS told_size,
    arraySort(groupArray((epoch, seq, ev, pos, toUnixTimestamp(committed), op = 'STORED', age_ms))) AS life
  FROM block_events WHERE (`
	livesTail = `op = 'EVICTED' AND effect < 0 AND copies < 1) AND ` + inSample + ` AND ` + inReach + `
  GROUP BY source, tier, grp, hash, named, engine_hash`
)

// gapsOf are how many seconds each block was away until it was stored again.
const gapsOf = `arrayFilter(gap -> gap >= 0, arrayMap((a, b) -> if(b.6 AND NOT a.6, greatest(toInt64(b.5) - a.5, 0), -1),
      arrayPopBack(life), arrayPopFront(life)))`

// Notes that questions about single blocks share.
const (
	tokensBySize = "tokens are blocks times the block size of the source's group; unknown where it stored nothing in the window"
	gapsByBus    = "gaps are by the bus's clock, in whole seconds"
	agesByEngine = "age is from when copies rose from 0 until they fell to 0, by the engine's clock"
	noHits       = "engines report no hits"
)

// tokensOf multiplies blocks by the size of a block; unknown where that is.
func tokensOf(blocks string) string {
	return `if(min(size) = 0, NULL, sum(` + blocks + ` * size) * {share:UInt64})`
}

// residencyBy is how long blocks stay and how soon they come back, by columns of ours and their tier.
func residencyBy(columns, depth, joined string) string {
	return `SELECT ` + columns + `, tier, sum(evicted) * {share:UInt64} AS all_evicted, ` + tokensOf("evicted") + `,
  sum(aged) * {share:UInt64}, (quantilesArrayMerge(0.01, 0.5, 0.99)(age) AS a)[1] / 1e3, a[2] / 1e3, a[3] / 1e3,
  sum(again) * {share:UInt64} AS all_again, ` + tokensOf("again") + `, all_again / all_evicted,
  (quantilesArrayMerge(0.5, 0.99)(gap) AS g)[1], g[2]
FROM (
  SELECT source, tier, ` + depth + ` AS depth_of, max(max(told_size)) OVER (PARTITION BY source, grp) AS size,
    sum(arrayCount(x -> NOT x.6, life)) AS evicted, sum(length(ages)) AS aged, sum(length(gaps)) AS again,
    quantilesArrayState(0.01, 0.5, 0.99)(arrayFilter(x -> x >= 0, arrayMap(x -> if(x.6, -1, x.7), life)) AS ages) AS age,
    quantilesArrayState(0.5, 0.99)(` + gapsOf + ` AS gaps) AS gap
  FROM (` + lives + `) AS told` + joined + `
  GROUP BY source, tier, grp, depth_of)
WHERE evicted > 0
GROUP BY ` + columns + `, tier `
}

// residencyColumns are those of residencyBy, behind those that it is by.
var residencyColumns = []Column{
	{"tier", "text", ""},
	{"evicted", "number", "blocks"},
	{"evicted tokens", "number", "tokens"},
	{"with known age", "number", "blocks"},
	{"age p1", "seconds", "s"},
	{"age p50", "seconds", "s"},
	{"age p99", "seconds", "s"},
	{"stored again", "number", "blocks"},
	{"stored again tokens", "number", "tokens"},
	{"share", "ratio", ""},
	{"gap p50", "seconds", "s"},
	{"gap p99", "seconds", "s"},
}

var residencyNotes = []string{
	agesByEngine + "; p1 is what 99 of 100 blocks outlive",
	"stored again counts evictions that the same block's next STORED on that engine follows within the window, and share is of those evicted; " + gapsByBus,
	"how long blocks were idle before is not reported: " + noHits,
	"percentiles of more than 8,192 values are of a sample",
	tokensBySize,
}

// depthBands name how far from the root a block is.
const depthBands = `multiIf(depth = 0, 'unknown', depth <= 4, '1–4', depth <= 16, '5–16', depth <= 64, '17–64', depth <= 256, '65–256', '> 256')`

// depthOrder sorts them.
func depthOrder(column string) string {
	return `indexOf(['1–4', '5–16', '17–64', '65–256', '> 256', 'unknown'], ` + column + `)`
}

// knownDepths are the depths of the blocks that are looked at, of those stored since a day before the window.
const knownDepths = `
  LEFT JOIN (SELECT hash, named, max(depth) AS depth FROM chains
    WHERE ` + inSample + ` AND day >= toDate(toDateTime({from:Int64}, 'UTC')) - 1 GROUP BY hash, named) AS known USING (hash, named)`

var residencies = []Query{
	{
		Name: "residency", Title: "Residency",
		Help:   "How long blocks stay on each engine, by tier, and how soon those that were evicted are stored again.",
		Params: []Param{since, until, model, engine, sample, limit},
		sql: residencyBy(modelOf+` AS model, `+instanceOf+` AS instance`, `''`, ``) + `ORDER BY all_evicted DESC, instance, tier, model
LIMIT {limit:UInt64}`,
		columns: append([]Column{{"model", "text", ""}, {"engine", "text", ""}}, residencyColumns...),
		chart:   Chart{"bar", "engine", []string{"age p1", "age p50"}},
		notes:   residencyNotes,
		sampled: true,
	},
	{
		Name: "residency-depth", Title: "Residency by depth",
		Help:   "How long blocks stay, and how soon they are stored again, by how far from the root they are.",
		Params: []Param{since, until, model, engine, sample, limit},
		sql: residencyBy(modelOf+` AS model, depth_of`, depthBands, knownDepths) +
			`ORDER BY model, ` + depthOrder("depth_of") + `, tier
LIMIT {limit:UInt64}`,
		columns: append([]Column{{"model", "text", ""}, {"depth", "text", "blocks"}}, residencyColumns...),
		chart:   Chart{"bar", "depth", []string{"age p1", "age p50"}},
		notes:   append([]string{"depth is counted in blocks from the root, and known of prefixes stored since the day before the window"}, residencyNotes...),
		sampled: true,
	},
	{
		Name: "thrash", Title: "Thrash",
		Help:   "Blocks that were stored again soon after they had been evicted from the same tier of the same engine.",
		Params: []Param{since, until, model, engine, within, sample, limit},
		sql: `SELECT ` + modelOf + ` AS model, ` + instanceOf + ` AS instance, tier,
  sum(again) * {share:UInt64} AS all_again, ` + tokensOf("again") + `, sum(stored) * {share:UInt64} AS all_stored, ` + tokensOf("stored") + `,
  all_again / all_stored AS ratio
FROM (
  SELECT source, tier, max(max(told_size)) OVER (PARTITION BY source, grp) AS size,
    sum(arrayCount(x -> x.6 AND x.5 >= {first:Int64}, life)) AS stored,
    sum(arrayCount((a, b) -> b.6 AND NOT a.6 AND b.5 >= {first:Int64} AND toInt64(b.5) - a.5 <= {within:UInt32},
      arrayPopBack(life), arrayPopFront(life))) AS again
  FROM (` + lives + `)
  GROUP BY source, tier, grp)
WHERE stored > 0
GROUP BY model, instance, tier ORDER BY all_again DESC, instance, tier, model
LIMIT {limit:UInt64}`,
		columns: []Column{
			{"model", "text", ""},
			{"engine", "text", ""},
			{"tier", "text", ""},
			{"stored again", "number", "blocks"},
			{"stored again tokens", "number", "tokens"},
			{"stored", "number", "blocks"},
			{"stored tokens", "number", "tokens"},
			{"share", "ratio", ""},
		},
		chart: Chart{"bar", "engine", []string{"stored again", "stored"}},
		notes: []string{
			countsEffects, "a block counts each time that its STORED follows within that time the EVICTED of its last copy there; " + gapsByBus, tokensBySize,
		},
		sampled: true,
	},
	{
		Name: "wasted", Title: "Wasted stores",
		Help:   "Blocks that were evicted and, as far as events tell, had not been used.",
		Params: []Param{since, until, model, engine, sample, limit},
		sql: `WITH used AS (
  SELECT hash, named, groupArray(toUnixTimestamp(committed)) AS at FROM block_events
  WHERE op = 'LOADED' AND ` + inSample + ` AND ` + inReachOfAll + ` GROUP BY hash, named)
SELECT ` + modelOf + ` AS model, ` + instanceOf + ` AS instance, tier,
  sum(unused) * {share:UInt64} AS all_unused, ` + tokensOf("unused") + `, sum(whole) * {share:UInt64} AS all_whole, ` + tokensOf("whole") + `,
  all_unused / all_whole, sum(older) * {share:UInt64}
FROM (
  SELECT source, tier, max(max(told_size)) OVER (PARTITION BY source, grp) AS size,
    sum(arrayCount(x -> length(x) = 1, ended)) AS older,
    sum(arrayCount(x -> length(x) > 1, ended)) AS whole,
    sum(arrayCount(x -> length(x) = 2 AND NOT arrayExists(t -> t >= x[1].5 AND t <= x[2].5, at), ended)) AS unused
  FROM (
    SELECT source, tier, grp, hash, named, told_size, at, arrayFilter(x -> NOT x[-1].6,
      arraySplit((x, before) -> NOT before.6 OR before.1 != x.1, life, arrayPushFront(arrayPopBack(life), life[1]))) AS ended
    FROM (` + toldLives + `) AS told LEFT JOIN used USING (hash, named))
  GROUP BY source, tier, grp)
WHERE older + whole > 0
GROUP BY model, instance, tier ORDER BY all_unused DESC, instance, tier, model
LIMIT {limit:UInt64}`,
		columns: []Column{
			{"model", "text", ""},
			{"engine", "text", ""},
			{"tier", "text", ""},
			{"without a use", "number", "blocks"},
			{"without a use tokens", "number", "tokens"},
			{"stored and evicted", "number", "blocks"},
			{"stored and evicted tokens", "number", "tokens"},
			{"share", "ratio", ""},
			{"stored before", "number", "blocks"},
		},
		chart: Chart{"bar", "engine", []string{"without a use", "stored and evicted"}},
		notes: []string{
			"inferred: " + noHits + ", so that a block which only hits used counts as unused; the number is what was wasted at most",
			"a use is a STORED that told the block again while it was resident, as engines do that tell a longer run whole, or a LOADED of it by anybody who knows its prefix hash",
			"a block that was stored again after a reset within one epoch counts as told again; resets are rare",
			"blocks stored before the window are not judged, and counted in stored before",
			"a block that is stored again after its eviction was wasted in the life before; thrash counts it",
			tokensBySize,
		},
		sampled: true, inferred: true,
	},
}
