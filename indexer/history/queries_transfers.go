package history

// aPair is what transfers are told apart by.
const aPair = `source, peer, transport, from_tier, to_tier`

var transfers = []Query{
	{
		Name: "transfers", Title: "Transfers",
		Help:   "How long transfers took, what they carried and what failed, by pair, direction and transport.",
		Params: []Param{since, until, model, engine, limit},
		sql: `SELECT ` + modelOf + ` AS model, ` + instanceOf + ` AS instance, peer, transport, from_tier, to_tier,
  sum(n) AS done, sum(n_blocks) AS moved, sum(n_bytes) AS all_bytes,
  (quantilesIfMerge(0.5, 0.99)(durations) AS q)[1] / 1e6, q[2] / 1e6, if(done = 0, nan, max(longest) / 1e6),
  if(done = 0, nan, all_bytes / greatest(sum(took) / 1e6, 1e-9)), sum(n_pieces) AS all_pieces, all_bytes / all_pieces,
  sum(failures) AS failed, sum(n_not) AS not_moved, moved + not_moved AS asked, not_moved / asked, sum(leases), argMax(often.1, (often.2, often.1))
FROM (
  SELECT ` + aPair + `, countIf(` + isDone + `) AS n, sumIf(blocks, ` + isDone + `) AS n_blocks, sum(bytes) AS n_bytes, sum(pieces) AS n_pieces,
    quantilesIfState(0.5, 0.99)(duration_us, ` + isDone + `) AS durations, maxIf(duration_us, ` + isDone + `) AS longest,
    sumIf(duration_us, ` + isDone + `) AS took, countIf(kind = 'failed') AS failures, sumIf(blocks, kind = 'failed') AS n_not,
    sumIf(greatest(ranks, 1), kind = 'lease_expired') AS leases, arrayReverseSort(x -> (x.2, x.1), CAST(sumMapIf(map(reason, 1), reason != ''), 'Array(Tuple(String, UInt64))'))[1] AS often
  FROM transfers
  WHERE ` + inWindow + `
  GROUP BY ` + aPair + `)
GROUP BY model, instance, peer, transport, from_tier, to_tier
ORDER BY all_bytes DESC, model, instance, peer, transport, from_tier, to_tier
LIMIT {limit:UInt64}`,
		columns: []Column{
			{"model", "text", ""},
			{"engine", "text", ""},
			{"peer", "text", ""},
			{"transport", "text", ""},
			{"from", "text", ""},
			{"to", "text", ""},
			{"transfers", "number", ""},
			{"moved", "number", "blocks"},
			{"bytes", "bytes", "B"},
			{"duration p50", "seconds", "s"},
			{"duration p99", "seconds", "s"},
			{"longest", "seconds", "s"},
			{"rate", "bytes", "B/s"},
			{"descriptors", "number", "pieces"},
			{"bytes a descriptor", "bytes", "B"},
			{"failed", "number", "transfers"},
			{"not moved", "number", "blocks"},
			{"of", "number", "blocks"},
			{"share", "ratio", ""},
			{"expired leases", "number", ""},
			{"reason", "text", ""},
		},
		chart: Chart{"bar", "engine", []string{"bytes"}},
		notes: []string{
			"by records of connectors: what a full queue dropped of them is not here; tokens are not told",
			"durations are from post to completion, of the slowest rank, and only of transfers that moved something; percentiles of more than 8,192 are of a sample",
			"rate is the sum of bytes over the sum of durations: transfers that ran side by side add up to less than the link carried",
			"a transfer that moved a part of its blocks counts in transfers and in failed; share is of the blocks that were to be moved",
			"a lease that expired names no peer; each rank has one; reason is the most frequent one of what failed",
		},
	},
	{
		Name: "transfers-slowest", Title: "Slowest transfers",
		Help:   "The transfers that took longest, and what sets each apart from others of its pair.",
		Params: []Param{since, until, model, engine, {"limit", "number", "50", "Rows at most."}},
		sql: `SELECT committed, ` + modelOf + ` AS model, ` + instanceOf + ` AS instance, peer, transport, from_tier, to_tier, kind, request, blocks, bytes,
  pieces, duration_us / 1e6, post_us / 1e6, bytes / (duration_us / 1e6), if(usual.n = 0, nan, usual.took / 1e6), multiIf(
    kind = 'failed', if(reason = '', 'it failed', concat('it failed: ', reason)),
    2 * post_us > duration_us, 'posting it took most of the time',
    usual.n < 3, 'the pair has too few to compare with',
    duration_us <= 2 * usual.took, 'nothing: others of its pair take as long',
    bytes > 2 * usual.size, 'it carried more',
    pieces > 0 AND 2 * bytes / pieces < usual.piece, 'its descriptors were smaller',
    'the link was slower: others of its pair carried as much in less time') AS cause
FROM (
  SELECT * FROM transfers WHERE kind != 'lease_expired' AND ` + inWindow + `
  ORDER BY duration_us DESC, committed, stream_seq, rec LIMIT {limit:UInt64}) AS slow
LEFT JOIN (
  SELECT ` + aPair + `, count() AS n, quantile(0.5)(duration_us) AS took, quantile(0.5)(bytes) AS size, quantile(0.5)(bytes / greatest(pieces, 1)) AS piece
  FROM transfers WHERE ` + isDone + ` AND ` + inWindow + ` GROUP BY ` + aPair + `) AS usual USING (` + aPair + `)
ORDER BY duration_us DESC, committed, stream_seq, rec`,
		columns: []Column{
			{"time", "time", ""},
			{"model", "text", ""},
			{"engine", "text", ""},
			{"peer", "text", ""},
			{"transport", "text", ""},
			{"from", "text", ""},
			{"to", "text", ""},
			{"kind", "text", ""},
			{"request", "text", ""},
			{"blocks", "number", "blocks"},
			{"bytes", "bytes", "B"},
			{"descriptors", "number", "pieces"},
			{"duration", "seconds", "s"},
			{"post", "seconds", "s"},
			{"rate", "bytes", "B/s"},
			{"pair's median", "seconds", "s"},
			{"cause", "text", ""},
		},
		chart: Chart{"bar", "time", []string{"duration"}},
		notes: []string{
			"cause is inferred: the first thing that sets the transfer apart from the median of its pair, direction and transport in the window; all else is exact",
			"blocks of a failed transfer are those that were not moved; its bytes stand in the record of what was",
		},
		inferred: true,
	},
}

// isDone are records of transfers that moved something.
const isDone = `kind IN ('loaded', 'saved')`
