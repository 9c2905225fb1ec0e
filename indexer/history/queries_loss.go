package history

var losses = []Query{
	{
		Name: "loss", Title: "Loss",
		Help:   "What the ledger says was lost, dropped, found different or repaired, by engine and time.",
		Params: []Param{since, until, model, engine, limit},
		sql: `SELECT time, ` + modelOf + ` AS model, ` + instanceOf + ` AS instance, kind, ranges, if(kind IN ('lost', 'dropped'), lost, NULL),
  if(kind IN ('lost', 'dropped'), told, NULL), if(kind IN ('lost', 'dropped'), lost / told, nan), why
FROM (
  SELECT toStartOfInterval(committed, toIntervalSecond({step:UInt32})) AS time, source, kind, count() AS ranges,
    sum(last - seq + 1) AS lost, arrayStringConcat(arraySort(groupUniqArray(3)(if(reason = '', state, reason))), '; ') AS why
  FROM ledger WHERE kind != 'life' AND ` + inWindow + ` GROUP BY time, source, kind) AS entries
LEFT JOIN (
  SELECT time, source, sum(seqs) AS told FROM (
    SELECT toStartOfInterval(committed, toIntervalSecond({step:UInt32})) AS time, source, sum(last - seq + 1) AS seqs
    FROM batches WHERE way != 'dropped' AND ` + inWindow + ` GROUP BY time, source
    UNION ALL SELECT toStartOfInterval(committed, toIntervalSecond({step:UInt32})) AS time, source, sum(last - seq + 1) AS seqs
    FROM ledger WHERE kind = 'dropped' AND ` + inWindow + ` GROUP BY time, source)
  GROUP BY time, source) AS all_told USING (time, source)
ORDER BY time DESC, instance, source, kind
LIMIT {limit:UInt64}`,
		columns: []Column{
			{"time", "time", ""},
			{"model", "text", ""},
			{"engine", "text", ""},
			{"kind", "text", ""},
			{"ranges", "number", ""},
			{"sequences", "number", "sequences"},
			{"of", "number", "sequences"},
			{"share", "ratio", ""},
			{"reasons", "text", ""},
		},
		chart: Chart{"bar", "time", []string{"sequences"}},
		notes: []string{
			"how many blocks a lost sequence told of is unknown, and never invented; beginnings of lives are left out",
			"of counts the sequences in the same time that held events, were lost or were dropped; at most three reasons, or states, are shown",
		},
	},
}
