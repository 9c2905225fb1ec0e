package history

import (
	"context"
	"fmt"
	"math"
	"strconv"
	"strings"

	"github.com/ClickHouse/clickhouse-go/v2"
)

// What the answer to state is by.
const (
	byTier   = "tier"
	byGroup  = "group"
	byDepth  = "depth"
	byBlocks = "blocks"
)

var states = []Query{
	{
		Name: "state", Title: "State at a moment",
		Help: "What each engine held at a moment, by tier, group or depth, or block by block.",
		Params: []Param{
			{"at", "duration", "", "The moment: a time, or a duration back from now, as 15m or 7d; empty: now."},
			{"by", "text", byTier, "tier, group, depth or blocks."},
			model, engine,
			{"sample", "number", "0", "Look at one block in so many; 1: at all of them; 0: at some 300,000 events, and for a list of blocks at all."},
			{"offset", "number", "0", "Rows to leave out: the pages before have shown them."},
			limit,
		},
		tell:    (*Reader).state,
		choices: map[string][]string{"by": {byTier, byGroup, byDepth, byBlocks}},
		chart:   Chart{"bar", "engine", []string{"blocks"}},
		notes: []string{
			"what was resident is the last checkpoint or beginning before the moment, and every effect on copies after that, in the source's own order",
			"a block counts once in each tier and group of a source, whatever its copies",
		},
	},
}

// heldWhere are the blocks that the sources which {sources} names held: what stood in their checkpoints, and what came after. id is a source's
// place in the list: names in every row take more memory than a query may have.
func heldWhere(where, ofEvents string) string {
	return `WITH held AS (
  SELECT id, tier, grp, engine_hash, max(named * hash) AS prefix, max(told) AS told_size, sum(n) AS copies, max(at) AS stored FROM (
    SELECT ` + idOf + ` AS id, tier, greatest(kv_group, 0) AS grp, engine_hash, hash, named, block_size AS told, toInt64(effect) AS n,
      if(effect > 0, committed, toDateTime(0, 'UTC')) AS at
    FROM block_events
    WHERE id != 0 AND epoch = {epochs:Array(UInt64)}[id] AND seq <= {lasts:Array(UInt64)}[id]
      AND (seq, toInt64(ev)) > ({seqs:Array(UInt64)}[id], {evs:Array(Int64)}[id])
      AND committed >= toDateTime({from:Int64}, 'UTC') AND ` + where + ` AND ` + ofEvents + `
    UNION ALL SELECT id, tier, greatest(kv_group, 0) AS grp, engine_hash, hash, named, 0 AS told, toInt64(copies) AS n, toDateTime(stored, 'UTC') AS at
    FROM (SELECT DISTINCT ` + idOf + ` AS id, tier, kv_group, engine_hash, hash, named, copies, stored FROM snapshots
      WHERE snapshot != 0 AND id != 0 AND snapshot = {snapshots:Array(Int64)}[id] AND ` + where + `))
  GROUP BY id, tier, grp, engine_hash HAVING copies > 0),
sized AS (
  SELECT *, {sources:Array(String)}[id] AS source, if(told_size > 0, told_size, max(told_size) OVER (PARTITION BY id, grp)) AS size FROM held)
`
}

// heldAt are those of them that are looked at.
var heldAt = heldWhere(inSample+` AND `+inPass, `effect != 0`)

// idOf is a source's place in {sources}, and inPass the blocks that are added up at once.
const (
	idOf   = `toUInt32(transform(source, {sources:Array(String)}, {ids:Array(UInt32)}, toUInt32(0)))`
	inPass = `engine_hash BETWEEN {pass_first:UInt64} AND {pass_last:UInt64}`
)

// whose are the columns that name a source.
const whose = modelOf + ` AS model, ` + instanceOf + ` AS instance, toUInt32OrZero(splitByChar('.', toString(source))[4]) AS dp_rank,
  splitByChar('.', toString(source))[5] AS origin`

// sinceWhen is what a source's set was added up from.
const sinceWhen = `{known:Array(String)}[id]`

// occupancy counts blocks by a column of ours, and in one order.
func occupancy(by, joined, order string) string {
	return heldAt + `SELECT ` + whose + `, ` + by + ` AS part, n * {share:UInt64}, of * {share:UInt64}, n / of,
  if(least = 0, NULL, tokens * {share:UInt64}), all_copies * {share:UInt64}, ` + sinceWhen + `
FROM (
  SELECT source, id, ` + by + `, count() AS n, sum(count()) OVER (PARTITION BY id) AS of, sum(size) AS tokens, min(size) AS least, sum(copies) AS all_copies
  FROM sized` + joined + `
  GROUP BY source, id, ` + by + `)
ORDER BY model, instance, dp_rank, origin, ` + order + `
LIMIT {limit:UInt64} OFFSET {offset:UInt64}`
}

// stateSQL is what is asked, by what the answer is by.
var stateSQL = map[string]string{
	byTier:  occupancy("tier", "", "n DESC, part"),
	byGroup: occupancy("grp", "", "part"),
	byDepth: occupancy("band", `
  LEFT JOIN (SELECT hash AS prefix, max(depth) AS depth, `+depthBands+` AS band FROM chains
    WHERE hash <= {below:UInt64} AND named = 1 AND day >= toDate(toDateTime({from:Int64}, 'UTC')) - 1 GROUP BY prefix) AS known USING prefix`,
		depthOrder("part")),
	byBlocks: heldAt + `SELECT ` + whose + `, tier, grp, nullIf(prefix, 0), engine_hash, copies, nullIf(size, 0), stored, ` + sinceWhen + `
FROM sized
ORDER BY engine_hash, model, instance, dp_rank, origin, tier, grp
LIMIT {limit:UInt64} OFFSET {offset:UInt64}`,
}

// stateColumns are those of an answer.
func stateColumns(by string) []Column {
	columns := []Column{{"model", "text", ""}, {"engine", "text", ""}, {"rank", "number", ""}, {"origin", "text", ""}}
	if by == byBlocks {
		return append(columns, []Column{
			{"tier", "text", ""},
			{"group", "number", ""},
			{"block", "hash", ""},
			{"engine's hash", "hash", ""},
			{"copies", "number", "copies"},
			{"tokens", "number", "tokens"},
			{"stored", "time", ""},
			{"known", "text", ""},
		}...)
	}
	kind := map[string]string{byGroup: "number"}[by]
	if kind == "" {
		kind = "text"
	}
	return append(columns, []Column{
		{by, kind, map[string]string{byDepth: "blocks"}[by]},
		{"blocks", "number", "blocks"},
		{"of", "number", "blocks"},
		{"share", "ratio", ""},
		{"tokens", "number", "tokens"},
		{"copies", "number", "copies"},
		{"known", "text", ""},
	}...)
}

// heldSampled is over how many block events a state is added up if it may choose, and heldAtOnce over how many at once.
const (
	heldSampled = 300_000
	heldAtOnce  = 1_000_000
)

// state answers what sources held at a moment.
func (r *Reader) state(ctx context.Context, bound clickhouse.Parameters, a *Answer) error {
	by := bound["by"]
	a.Columns = stateColumns(by)
	stands, err := r.standsAt(ctx, bound)
	if err != nil {
		return err
	}
	bindStands(stands, bound)
	a.Since = stands.since() / 1000
	events, err := r.eventsReached(ctx, bound)
	if err != nil {
		return err
	}
	if by == byBlocks && bound["sample"] == "0" {
		bound["sample"] = "1" // a page is of all of them
	}
	share, err := bindShare(bound, events, heldSampled)
	if err != nil {
		return err
	}
	a.sampledOf(share)
	for known, names := range stands.doubtful() {
		a.Exactness = "inferred"
		a.Notes = append(a.Notes, fmt.Sprintf("%s: %s", known, strings.Join(names, ", ")))
	}
	if by == byDepth {
		a.Notes = append(a.Notes, "depth is counted in blocks from the root, and unknown where history did not see the whole chain")
	}
	bindPass(bound, 0, 1)
	if by == byBlocks {
		return r.heldBlocks(ctx, bound, 1+events/share/r.atOnce, a)
	}
	a.SQL = explained(stateSQL[by], bound)
	return r.rows(ctx, stateSQL[by], bound, a)
}

// bindPass binds the n-th of so many ranges of engines' hashes.
func bindPass(bound clickhouse.Parameters, n, passes uint64) {
	width := math.MaxUint64 / passes
	bound["pass_first"], bound["pass_last"] = strconv.FormatUint(n*width, 10), strconv.FormatUint((n+1)*width-1, 10)
	if n == passes-1 {
		bound["pass_last"] = strconv.FormatUint(math.MaxUint64, 10)
	}
}

// heldBlocks adds a page of blocks, one range of engines' hashes after the other: every block that was ever stored is added up, and the memory
// that a query may take has a bound.
func (r *Reader) heldBlocks(ctx context.Context, bound clickhouse.Parameters, passes uint64, a *Answer) error {
	limit, err := strconv.Atoi(bound["limit"])
	if err != nil {
		return err
	}
	offset, err := strconv.ParseUint(bound["offset"], 10, 32)
	if err != nil {
		return err
	}
	for n := uint64(0); n < passes && len(a.Rows) < limit; n++ {
		bindPass(bound, n, passes)
		if offset > 0 && passes > 1 {
			var held uint64
			if err := r.query(ctx, heldAt+`SELECT count() FROM held`, bound, func(scan func(...any) error) error { return scan(&held) }); err != nil {
				return err
			}
			if held <= offset {
				offset -= held
				continue
			}
		}
		bound["limit"], bound["offset"] = strconv.Itoa(limit-len(a.Rows)), strconv.FormatUint(offset, 10)
		a.SQL += explained(stateSQL[byBlocks], bound) + ";\n"
		if err := r.rows(ctx, stateSQL[byBlocks], bound, a); err != nil {
			return err
		}
		offset = 0
	}
	return nil
}
