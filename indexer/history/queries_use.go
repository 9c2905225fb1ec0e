package history

var uses = []Query{
	{
		Name: "residency-use", Title: "Residency and use",
		Help:   "How old blocks were when they were loaded, and how long evicted ones had not been told of: neither stored nor loaded.",
		Params: []Param{since, until, model, engine, sample, limit},
		// A block's events on an engine, in order: what came before each, in any tier. Of a tier that is loaded into, the age is since the block
		// was last stored in any.
		sql: `SELECT ` + modelOf + ` AS model, ` + instanceOf + ` AS instance, tier, sum(n_evicted) * {share:UInt64} AS evicted,
  sum(n_idle) * {share:UInt64} AS idle_known, (quantilesIfMerge(0.01, 0.5, 0.99)(idles) AS i)[1], i[2], i[3],
  sum(n_loaded) * {share:UInt64} AS loaded, sum(n_aged) * {share:UInt64} AS age_known, (quantilesIfMerge(0.01, 0.5, 0.99)(ages) AS g)[1], g[2], g[3]
FROM (
  SELECT source, tier, countIf(gone) AS n_evicted, countIf(gone AND told_before > 0) AS n_idle, countIf(op = 'LOADED') AS n_loaded,
    countIf(op = 'LOADED' AND stored_before > 0) AS n_aged, quantilesIfState(0.01, 0.5, 0.99)(at - told_before, gone AND told_before > 0) AS idles,
    quantilesIfState(0.01, 0.5, 0.99)(at - stored_before, op = 'LOADED' AND stored_before > 0) AS ages
  FROM (
    SELECT source, tier, op, op = 'EVICTED' AND effect < 0 AND copies < 1 AS gone, toInt64(toUnixTimestamp(committed)) AS at,
      maxIf(at, op IN ('STORED', 'LOADED')) OVER before AS told_before, maxIf(at, op = 'STORED') OVER before AS stored_before
    FROM block_events
    WHERE op IN ('STORED', 'EVICTED', 'LOADED') AND ` + inSample + ` AND ` + inSeconds + `
    WINDOW before AS (PARTITION BY source, greatest(kv_group, 0), hash, named, epoch ORDER BY seq, ev, pos ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING))
  GROUP BY source, tier)
GROUP BY model, instance, tier HAVING evicted + loaded > 0 ORDER BY evicted DESC, instance, tier, model
LIMIT {limit:UInt64}`,
		columns: []Column{
			{"model", "text", ""},
			{"engine", "text", ""},
			{"tier", "text", ""},
			{"evicted", "number", "blocks"},
			{"told of before", "number", "blocks"},
			{"idle p1", "seconds", "s"},
			{"idle p50", "seconds", "s"},
			{"idle p99", "seconds", "s"},
			{"loaded", "number", "blocks"},
			{"stored before", "number", "blocks"},
			{"age at load p1", "seconds", "s"},
			{"age at load p50", "seconds", "s"},
			{"age at load p99", "seconds", "s"},
		},
		chart: Chart{"bar", "engine", []string{"idle p1", "idle p50"}},
		notes: []string{
			"idle is from the last STORED or LOADED of the block on that engine in the window until its last copy in the tier was evicted: " + noHits + ", so that hits within the device are not in it, and it is at most so long",
			"age at load is from the last STORED of the block on that engine, in whichever tier; of blocks that came from elsewhere it is not known",
			"times are the bus's, in whole seconds; percentiles of more than 8,192 are of a sample",
		},
		sampled: true,
	},
}
