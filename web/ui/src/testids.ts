// The names under which tests find what they read. They are stable: change one, and the browser tests change with it.
//
// Shell       connection (data-phase: connecting, live, waiting) · banner · nav-pulse … nav-tail · theme · pause · help
// Pulse       sources-total, sources-live, sources-recovering, sources-partial, sources-stale, sources-gone (all but live absent when none) ·
//             lag-worst · behind · holes · lost · dropped · digest-agreed, digest-differed · service-NAME (data-state) · rate-stored,
//             rate-evicted, rate-loaded · chart-flow · occupancy-TIER · hits (data-reported) · hits-blocks, hits-tokens ·
//             loads · insight (data-weight) · fleet-cell (data-id)
// Engines     engine-row (data-id, data-state) · engine-filter · engine-shown · engine-detail · ledger-sum (data-balanced) · contract, contract-odd
// Transfers   transfers-rate, transfers-loads, transfers-p50, transfers-p99 · chart-transfers · transfer-row (data-from, data-to) ·
//             transfer-filter · slow-row · transfers-empty
// Prefixes    prefix-row (data-prefix) · prefix-filter
// History     history-query · history-run · history-row · history-chart · history-exactness · history-error · history-empty ·
//             history-sql · history-csv, history-json · range-VALUE
// Explain     explain-input · explain-summary · explain-resident · explain-lane · explain-event · explain-error
// Tail        tail-source, tail-hash, kind-KIND · tail-row · tail-shown · tail-matched
// Numbers carry data-value where their text is rounded.

export const id = {
  connection: "connection",
  banner: "banner",
  theme: "theme",
  pause: "pause",
  help: "help",
  nav: (screen: string) => `nav-${screen}`,

  sourcesTotal: "sources-total",
  sourcesIn: (state: string) => `sources-${state}`,
  lagWorst: "lag-worst",
  behind: "behind",
  holes: "holes",
  lost: "lost",
  dropped: "dropped",
  digestAgreed: "digest-agreed",
  digestDiffered: "digest-differed",
  service: (name: string) => `service-${name}`,
  rate: (kind: string) => `rate-${kind}`,
  contract: "contract",
  contractOdd: "contract-odd",
  chartFlow: "chart-flow",
  occupancy: (tier: string) => `occupancy-${tier}`,
  hits: "hits",
  hitsBlocks: "hits-blocks",
  hitsTokens: "hits-tokens",
  loads: "loads",
  insight: "insight",
  fleetCell: "fleet-cell",

  engineRow: "engine-row",
  engineFilter: "engine-filter",
  engineShown: "engine-shown",
  engineDetail: "engine-detail",
  ledgerSum: "ledger-sum",

  transfersRate: "transfers-rate",
  transfersLoads: "transfers-loads",
  transfersP50: "transfers-p50",
  transfersP99: "transfers-p99",
  chartTransfers: "chart-transfers",
  transferRow: "transfer-row",
  transferFilter: "transfer-filter",
  transfersEmpty: "transfers-empty",
  slowRow: "slow-row",

  prefixRow: "prefix-row",
  prefixFilter: "prefix-filter",

  historyQuery: "history-query",
  historyRun: "history-run",
  historyRow: "history-row",
  historyChart: "history-chart",
  historyExactness: "history-exactness",
  historyError: "history-error",
  historyEmpty: "history-empty",
  historySql: "history-sql",
  historyCsv: "history-csv",
  historyJson: "history-json",
  range: (value: string) => `range-${value}`,

  explainInput: "explain-input",
  explainSummary: "explain-summary",
  explainResident: "explain-resident",
  explainLane: "explain-lane",
  explainEvent: "explain-event",
  explainError: "explain-error",

  tailSource: "tail-source",
  tailHash: "tail-hash",
  tailKind: (kind: string) => `kind-${kind}`,
  tailRow: "tail-row",
  tailShown: "tail-shown",
  tailMatched: "tail-matched",
} as const;
