package history

// ofEngines are the rows of the model and the engine that are asked about, in tables of records: an engine that only others tell of is no
// source of events.
const ofEngines = `({model:String} = '' OR model = {model:String}) AND ({engine:String} = '' OR instance = {engine:String})`

// inRecords are the rows of the window in tables of records.
const inRecords = `committed >= fromUnixTimestamp64Micro({since:Int64}) AND committed < fromUnixTimestamp64Micro({until:Int64}) AND ` + ofEngines

const saysNothing = "without lookup records (--lookup-records, a connector, or a router) there are no rows: engines' events report no hits"

var lookupQueries = []Query{
	{
		Name: "hits", Title: "Hit ratio over time",
		Help: "How many of the tokens asked for were cached, by time, by who asked, and by tier.",
		Params: []Param{
			since, until, model, engine,
			{"asker", "text", "", "Only lookups of this asker: index, router or connector."},
			limit,
		},
		sql: `SELECT toStartOfInterval(committed, toIntervalSecond({step:UInt32})) AS time, asker, sum(one_in) AS n,
  sum(tokens * one_in) AS asked, sum(matched * one_in) AS found, found / asked,
  sum(gpu_tokens * one_in), sum(cpu_tokens * one_in), sum(disk_tokens * one_in), sum(external_tokens * one_in),
  sumIf(intDiv(tokens, greatest(block_size, 1)) * one_in, block_size > 0), sumIf(intDiv(matched, greatest(block_size, 1)) * one_in, block_size > 0), max(one_in)
FROM lookups
WHERE ` + inRecords + ` AND ({asker:String} = '' OR asker = {asker:String})
GROUP BY time, asker ORDER BY time, asker
LIMIT {limit:UInt64}`,
		columns: []Column{
			{"time", "time", ""},
			{"asker", "text", ""},
			{"lookups", "number", ""},
			{"asked", "number", "tokens"},
			{"cached", "number", "tokens"},
			{"hit ratio", "ratio", ""},
			{"on GPU", "number", "tokens"},
			{"on CPU", "number", "tokens"},
			{"on disk", "number", "tokens"},
			{"external", "number", "tokens"},
			{"asked blocks", "number", "blocks"},
			{"cached blocks", "number", "blocks"},
			{"one in", "number", ""},
		},
		chart: Chart{"line", "time", []string{"asked", "cached"}},
		notes: []string{
			"an index tells what the engine with most of a prompt has, which may not be where it goes; a connector what its engine had, and was to load",
			saysNothing,
		},
		weight: "one in",
	},
	{
		Name: "predicted", Title: "Predicted and actual hits",
		Help:   "What an index or a router expected to be cached of each request, against what the engine that computed it had.",
		Params: []Param{since, until, model, engine, limit},
		sql: `SELECT model, instance, count() AS n, countIf(expected.source = actual.source) AS same, sum(actual.tokens) AS asked,
  sum(expected.longest) AS predicted, sum(actual.matched) AS found, predicted / asked, found / asked,
  sumIf(if(expected.longest > actual.matched, expected.longest - actual.matched, 0), expected.source = actual.source) AS too_much,
  sumIf(if(actual.matched > expected.longest, actual.matched - expected.longest, 0), expected.source = actual.source) AS too_little
FROM (
  SELECT request, model, instance, any(source) AS source, any(tokens) AS tokens, any(matched) AS matched
  FROM lookups WHERE asker = 'connector' AND request != '' AND ` + inRecords + `
  GROUP BY request, model, instance) AS actual
INNER JOIN (
  SELECT request, model, argMax(source, committed) AS source, argMax(longest, committed) AS longest
  FROM lookups WHERE asker != 'connector' AND request != ''
    AND committed >= fromUnixTimestamp64Micro({since:Int64}) AND committed < fromUnixTimestamp64Micro({until:Int64})
    AND ({model:String} = '' OR model = {model:String})
  GROUP BY request, model) AS expected USING (request, model)
GROUP BY model, instance ORDER BY n DESC, instance, model
LIMIT {limit:UInt64}`,
		columns: []Column{
			{"model", "text", ""},
			{"engine", "text", ""},
			{"requests", "number", ""},
			{"predicted here", "number", "requests"},
			{"asked", "number", "tokens"},
			{"predicted", "number", "tokens"},
			{"actual", "number", "tokens"},
			{"predicted ratio", "ratio", ""},
			{"actual ratio", "ratio", ""},
			{"too much", "number", "tokens"},
			{"too little", "number", "tokens"},
		},
		chart: Chart{"bar", "engine", []string{"predicted", "actual"}},
		notes: []string{
			"of requests whose id both told; predicted is the newest prediction, of whichever engine had most",
			"too much and too little are of the requests that were computed by the engine that the prediction was of",
			saysNothing,
		},
	},
	{
		Name: "sessions", Title: "Hot sessions",
		Help: "Which sessions brought most tokens, and how many of those were cached.",
		Params: []Param{
			since, until, model, engine,
			{"tenant", "text", "", "Only this tenant."},
			limit,
		},
		sql: `SELECT session, tenant, ` + requestTotals + `
FROM requests
WHERE session != '' AND ` + inRecords + ` AND ({tenant:String} = '' OR tenant = {tenant:String})
GROUP BY session, tenant ORDER BY asked DESC, session, tenant
LIMIT {limit:UInt64}`,
		columns: append([]Column{{"session", "text", ""}, {"tenant", "text", ""}}, requestColumns...),
		chart:   Chart{"bar", "session", []string{"cached", "loaded"}},
		notes:   []string{fromConnectors},
	},
	{
		Name: "tenants", Title: "Tenants",
		Help:   "What each tenant asked for, and how much of it was cached.",
		Params: []Param{since, until, model, engine, limit},
		sql: `SELECT tenant, ` + requestTotals + `
FROM requests
WHERE ` + inRecords + `
GROUP BY tenant ORDER BY asked DESC, tenant
LIMIT {limit:UInt64}`,
		columns: append([]Column{{"tenant", "text", ""}}, requestColumns...),
		chart:   Chart{"bar", "tenant", []string{"cached", "loaded"}},
		notes:   []string{fromConnectors, "an empty tenant is of requests whose client told none"},
	},
	{
		Name: "compare-tenants", Title: "Two windows, by tenant",
		Help:   "What changed from one window to another in what each tenant asked for and had cached, the largest change first.",
		Params: []Param{since, until, beforeSince, beforeUntil, model, engine, limit},
		sql: `WITH toDateTime(committed, 'UTC') BETWEEN toDateTime({first:Int64}, 'UTC') AND toDateTime({last:Int64}, 'UTC') AS is_now,
toDateTime(committed, 'UTC') BETWEEN toDateTime({before_first:Int64}, 'UTC') AND toDateTime({before_last:Int64}, 'UTC') AS is_before,
prompt - least(prompt, cached + external) AS computed
SELECT tenant, countIf(is_before), countIf(is_now), sumIf(prompt, is_before) AS asked_before, sumIf(prompt, is_now) AS asked,
  sumIf(computed, is_before) AS computed_before, sumIf(computed, is_now) AS computed_now,
  (asked_before - computed_before) / asked_before, (asked - computed_now) / asked, abs(toInt64(computed_now) - toInt64(computed_before)) AS change
FROM requests
WHERE (is_now OR is_before) AND ` + ofEngines + `
GROUP BY tenant ORDER BY change DESC, tenant
LIMIT {limit:UInt64}`,
		columns: []Column{
			{"tenant", "text", ""},
			{"requests before", "number", ""},
			{"requests", "number", ""},
			{"asked before", "number", "tokens"},
			{"asked", "number", "tokens"},
			{"computed before", "number", "tokens"},
			{"computed", "number", "tokens"},
			{"saved before", "ratio", ""},
			{"saved", "ratio", ""},
			{"change", "number", "tokens"},
		},
		chart: Chart{"bar", "tenant", []string{"computed before", "computed"}},
		notes: []string{fromConnectors, "computed are tokens of prompts that were neither cached nor loaded; change is of these; windows of different lengths are compared as they are"},
	},
	{
		Name: "devices", Title: "Devices",
		Help:   "What each engine's devices were at, by time.",
		Params: []Param{since, until, model, engine, limit},
		sql: `SELECT toStartOfInterval(committed, toIntervalSecond({step:UInt32})) AS time, model, instance, device, count() AS n,
  max(memory_used), max(memory_total), avg(busy) / 100, avg(memory_busy) / 100, avg(power_mw) / 1000, max(temperature), avg(pcie_received), avg(pcie_sent)
FROM gpu_samples
WHERE ` + inRecords + `
GROUP BY time, model, instance, device ORDER BY time, instance, device, model
LIMIT {limit:UInt64}`,
		columns: []Column{
			{"time", "time", ""},
			{"model", "text", ""},
			{"engine", "text", ""},
			{"device", "text", ""},
			{"samples", "number", ""},
			{"memory", "bytes", "bytes"},
			{"of", "bytes", "bytes"},
			{"busy", "ratio", ""},
			{"memory busy", "ratio", ""},
			{"power", "number", "W"},
			{"temperature", "number", "°C"},
			{"received", "bytes", "bytes a second"},
			{"sent", "bytes", "bytes a second"},
		},
		chart: Chart{"line", "time", []string{"memory"}},
		notes: []string{"memory and temperature are the most that was seen, the others means of the samples; without samples (kind gpu) there are no rows"},
	},
}

const fromConnectors = "connectors tell of requests when they end; without a connector there are no rows"

// requestTotals add up requests.
const requestTotals = `count() AS n, sum(prompt) AS asked, sum(cached) AS here, sum(external) AS loaded, (here + loaded) / asked, sum(output),
  countIf(ended = 'load_error'), min(committed), max(committed)`

var requestColumns = []Column{
	{"requests", "number", ""},
	{"asked", "number", "tokens"},
	{"cached", "number", "tokens"},
	{"loaded", "number", "tokens"},
	{"saved ratio", "ratio", ""},
	{"generated", "number", "tokens"},
	{"load errors", "number", "requests"},
	{"first", "time", ""},
	{"last", "time", ""},
}
