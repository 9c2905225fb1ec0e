package history

// childrenShown bounds the children whose events a lineage shows.
const childrenShown = `100`

// daysOfWindow are the days of chains on which blocks of the window may have been stored.
const daysOfWindow = `day BETWEEN toDate(toDateTime({first:Int64}, 'UTC')) AND toDate(toDateTime({last:Int64}, 'UTC'))`

// stamped joins the batches of told rows of block_events, for the moments at which the bus took them; atStamp is such a moment,
// or, when the batch is no longer kept, its second.
const (
	atStamp = "greatest(stamps.committed, toDateTime64(told.committed, 6, 'UTC'))"
	stamped = `ANY LEFT JOIN (SELECT source, epoch, seq, committed FROM batches WHERE (source, epoch, seq) IN (SELECT source, epoch, seq FROM told))
AS stamps USING (source, epoch, seq)`
)

var lineages = []Query{
	{
		Name: "lineage", Title: "Lineage",
		Help: "Every event of a block, its parent and its children, on every engine, in order.",
		Params: []Param{
			{"hash", "hash", "", "A prefix hash, or an engine's hash."},
			{"since", "duration", "24h", "A duration back from now, as 15m or 7d, or a time."},
			until, model, engine, limit,
		},
		sql: `WITH (
  SELECT groupUniqArray((hash, named)) FROM (
    SELECT hash, named FROM block_events WHERE hash = {hash:UInt64} AND op != 'CLEARED' AND ` + inSeconds + `
    UNION ALL SELECT hash, named FROM block_events WHERE engine_hash = {hash:UInt64} AND op != 'CLEARED' AND ` + inSeconds + `)) AS self,
(SELECT groupArray((hash, named, near, before, deep)) FROM (
  SELECT hash, named, min(rank) AS near, max(parent) AS before, max(depth) AS deep FROM (
    SELECT self_block.1 AS hash, self_block.2 AS named, 0 AS rank, 0 AS parent, 0 AS depth FROM (SELECT arrayJoin(self) AS self_block)
    UNION ALL SELECT link.1 AS hash, named, link.2 AS rank, link.3 AS parent, link.4 AS depth FROM (
      SELECT named, max(parent) AS before, max(depth) AS deep,
        arrayJoin([(hash, 0, before, toInt64(deep)), (before, 1, 0, greatest(toInt64(deep) - 1, 0))]) AS link
      FROM chains WHERE hash IN (SELECT arrayJoin(self).1) AND (hash, named) IN (SELECT arrayJoin(self)) AND ` + daysOfWindow + `
      GROUP BY hash, named) WHERE link.1 != 0
    UNION ALL SELECT hash, named, 2 AS rank, max(parent), toInt64(max(depth)) FROM chains
      WHERE parent IN (SELECT arrayJoin(self).1) AND (parent, named) IN (SELECT arrayJoin(self)) AND ` + daysOfWindow + `
      GROUP BY hash, named ORDER BY hash, named LIMIT ` + childrenShown + `)
  GROUP BY hash, named)) AS family,
told AS (
  SELECT * FROM block_events WHERE hash IN (SELECT arrayJoin(family).1) AND (hash, named) IN (SELECT (arrayJoin(family) AS f).1, f.2)
    AND op != 'CLEARED' AND ` + inSeconds + `
  UNION ALL SELECT * FROM block_events WHERE hash = 0 AND op = 'CLEARED' AND ` + inSeconds + ` AND source IN (
    SELECT source FROM block_events WHERE hash IN (SELECT arrayJoin(self).1) AND (hash, named) IN (SELECT arrayJoin(self)) AND ` + inSeconds + `))
SELECT ` + atStamp + ` AS at, ` + modelOf + ` AS model, ` + instanceOf + ` AS instance,
  if(op = 'CLEARED', 'all', ['self', 'parent', 'child'][near + 1]) AS relation, if(op = 'CLEARED', NULL, hash) AS block, if(before = 0, NULL, before),
  nullIf(toUInt64(deep), 0), tier, toString(op), effect, if(op = 'EVICTED' AND copies >= 0, toUInt64(copies), NULL),
  if(age_ms < 0, nan, age_ms / 1e3), epoch, seq
FROM told LEFT JOIN (SELECT (arrayJoin(family) AS f).1 AS hash, f.2 AS named, f.3 AS near, f.4 AS before, f.5 AS deep) AS near_by USING (hash, named)
` + stamped + `
ORDER BY at, source, epoch, seq, ev, pos
LIMIT {limit:UInt64}`,
		columns: []Column{
			{"time", "time", ""},
			{"model", "text", ""},
			{"engine", "text", ""},
			{"relation", "text", ""},
			{"block", "hash", ""},
			{"parent", "hash", ""},
			{"depth", "number", "blocks"},
			{"tier", "text", ""},
			{"op", "text", ""},
			{"effect", "number", "copies"},
			{"left", "number", "copies"},
			{"age", "seconds", "s"},
			{"epoch", "number", ""},
			{"seq", "number", ""},
		},
		chart: Chart{"none", "", nil},
		notes: []string{
			"relation all is a reset of an engine that told of the block: it took every block there; an engine's new epoch begins with none",
			"at most " + childrenShown + " children are shown; parents and children are known of blocks stored on the days of the window",
			"an engine's hash may stand for several blocks: all of them are shown as self",
		},
	},
}
