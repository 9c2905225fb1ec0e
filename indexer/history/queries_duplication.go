package history

// unheard are the sources whose blocks lookups leave out at the end of the window: of those that are stale or gone nobody knows
// whether they still hold them.
const unheard = `SELECT source FROM ledger WHERE kind = 'state' AND committed < fromUnixTimestamp64Micro({until:Int64})
  GROUP BY source HAVING argMax(state, (committed, stream_seq)) IN ('stale', 'gone')`

// beginnings are, for each source, where its resident set began last: place is epoch, sequence and event. A set that began with a
// checkpoint has its snapshot.
const beginnings = `SELECT source, max((epoch, seq, ev, snapshot)) AS place FROM (
    SELECT source, epoch, seq, toInt64(ev) AS ev, toInt64(0) AS snapshot FROM block_events
    WHERE hash = 0 AND op = 'CLEARED' AND ` + inSeconds + `
    UNION ALL SELECT source, epoch, if(kind = 'life', seq, last) AS seq, if(kind = 'life' OR snapshot = 0, -1, 4294967296) AS ev, snapshot FROM ledger
    WHERE kind IN ('life', 'resync') AND committed < fromUnixTimestamp64Micro({until:Int64}) AND ` + ofSources + `)
  GROUP BY source`

var duplications = []Query{
	{
		Name: "duplication", Title: "Duplication",
		Help: "How many sources hold the same prefix at the window's end, and what that takes.",
		Params: []Param{
			{"since", "duration", "24h", "A duration back from now, as 15m or 7d, or a time: how old resident blocks may be."}, until, model, engine, sample, limit,
		},
		sql: `WITH began AS (` + beginnings + `),
held AS (
  SELECT source, hash, max(size) AS size, sum(copies) AS copies FROM (
    SELECT source, tier, greatest(kv_group, 0) AS grp, hash, engine_hash, max(block_size) AS size, sum(toInt64(effect)) AS copies
    FROM block_events LEFT JOIN began USING source
    WHERE effect != 0 AND named = 1 AND (epoch, seq, toInt64(ev)) > (place.1, place.2, place.3) AND ` + inSample + ` AND ` + inSeconds + `
    GROUP BY source, tier, grp, hash, engine_hash
    UNION ALL SELECT source, tier, greatest(kv_group, 0) AS grp, hash, engine_hash, 0 AS size, toInt64(max(copies)) AS copies
    FROM snapshots WHERE named = 1 AND snapshot != 0 AND (source, snapshot) IN (SELECT source, place.4 FROM began) AND ` + inSample + `
    GROUP BY source, tier, grp, hash, engine_hash)
  GROUP BY source, tier, grp, hash, engine_hash HAVING copies > 0)
SELECT model, if(GROUPING(owners) = 1, 'any', owners) AS held_by, sum(prefixes) * {share:UInt64} AS unique_blocks,
  if(min(known) = 0, NULL, sum(prefix_tokens) * {share:UInt64}), sum(holders) * {share:UInt64} AS resident,
  if(min(known) = 0, NULL, sum(holder_tokens) * {share:UInt64}), unique_blocks / resident
FROM (
  SELECT model, multiIf(n < 4, toString(n), '4 or more') AS owners, count() AS prefixes, sum(size) AS prefix_tokens, sum(n) AS holders,
    sum(n * size) AS holder_tokens, min(size) > 0 AS known
  FROM (
    SELECT ` + modelOf + ` AS model, hash, uniqExact(source) AS n, max(size) AS size FROM (
      SELECT source, hash, if(max(size) = 0, max(max(size)) OVER (PARTITION BY source), max(size)) AS size FROM held
      WHERE source NOT IN (` + unheard + `) GROUP BY source, hash)
    GROUP BY model, hash)
  GROUP BY model, owners)
GROUP BY GROUPING SETS ((model, owners), (model)) ORDER BY model, held_by
LIMIT {limit:UInt64}`,
		columns: []Column{
			{"model", "text", ""},
			{"owners", "text", ""},
			{"unique", "number", "blocks"},
			{"unique tokens", "number", "tokens"},
			{"resident", "number", "blocks"},
			{"resident tokens", "number", "tokens"},
			{"unique share", "ratio", ""},
		},
		chart: Chart{"bar", "owners", []string{"unique", "resident"}},
		notes: []string{
			"an owner is a source: an engine, with each of its data-parallel ranks, a connector or a store; a block counts once for each, whatever its tiers, groups and copies",
			"unique share is unique over resident blocks; what is resident and not unique is held more than once",
			"only blocks stored since the window began, or in a checkpoint from which history went on, and not since evicted or reset; sources that are stale or gone are left out",
			"blocks without a prefix hash are left out: engines may call the same prefix by different hashes",
		},
		sampled: true,
	},
}
