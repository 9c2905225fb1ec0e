// The documents of the HTTP API and the live socket, as docs/api.md fixes them. Times are Unix milliseconds, durations
// seconds, hashes hexadecimal text.

export type SourceState = "live" | "recovering" | "partial" | "stale" | "gone";
export type ServiceState = "ok" | "behind" | "down" | "off";
export type EventKind = "STORED" | "EVICTED" | "LOADED" | "CLEARED";

export const eventKinds: readonly EventKind[] = ["STORED", "EVICTED", "LOADED", "CLEARED"];

export interface Meta {
  version: string;
  /** Start of the process; another value is another process. */
  started: number;
  roles: string[];
}

export interface Service {
  name: string;
  state: ServiceState;
  reason?: string;
  detail?: Record<string, unknown>;
}

export interface Flow {
  stored: number;
  evicted: number;
  loaded: number;
}

export interface Tier {
  tier: string;
  blocks: number;
  copies: number;
}

export interface Ledger {
  first: number;
  last: number;
  live: number;
  recovered: number;
  held: number;
  asked: number;
  lost: number;
  duplicates: number;
  malformed: number;
  dropped: number;
}

export interface Source extends Flow {
  id: string;
  cluster: string;
  model: string;
  instance: string;
  dp_rank: number;
  origin: string;
  state: SourceState;
  reason?: string;
  epoch: number;
  /** Whether a batch of this life was applied: seq means something. */
  started: boolean;
  seq: number;
  behind: number;
  lag_ms?: number;
  last_event?: number;
  rate: Flow;
  tiers: Tier[];
  /** Blocks of the device pool; 0 when the engine did not tell. */
  pool: number;
  block_size: number;
  copies: string;
  ledger: Ledger;
  balanced: boolean;
  holes: number;
  digest: { agreed: number; differed: number; last: string };
  dialect?: string;
  endpoint?: string;
}

/** Of GET /v1/sources: what a source's stream was seen to be, and what breaks it. */
export interface SourceReport {
  contract?: {
    forms?: string[];
    fields?: string[];
    hashes?: string[];
    media?: string[];
    check?: {
      verdict: string;
      scheme?: string;
      seed?: string;
      verified: number;
      differ: number;
      skipped: number;
      reason?: string;
    };
  };
  groups?: { group: number; block_size: number; spec_kind?: string; sliding_window?: number; eagle?: boolean }[] | null;
  oddities?: { name: string; count: number; example?: string }[];
  ledger: { holes?: { first: number; last: number; reason: string }[] };
  past_lives?: { epoch: number; ledger: { first: number; last: number; lost: number }; tail_unknown?: boolean }[];
}

export interface Hits {
  reported: boolean;
  from?: string;
  window_seconds?: number;
  lookups?: number;
  asked_blocks?: number;
  matched_blocks?: number;
  asked_tokens?: number;
  matched_tokens?: number;
}

export interface Owner {
  id: string;
  instance: string;
  tier: string;
  copies: number;
}

export interface Prefix {
  prefix: string;
  model: string;
  blocks: number;
  tokens: number;
  block_size: number;
  continued: number;
  copies: number;
  owners: Owner[];
  resident_tokens: number;
  first: number;
  last: number;
}

export interface LoadStats {
  /** Since the server began to read the stream. */
  loads: number;
  blocks: number;
  bytes: number;
  last?: number;
  /** A second, over the window. */
  rate: { loads: number; blocks: number; bytes: number };
  /** Of the window; absent when no load told how long it took. */
  latency_ms?: { p50: number; p99: number; max: number };
  /** Bytes a second of one load while it ran. */
  speed?: number;
}

export interface LoadWay {
  /** An engine's instance or a store's name; empty where none was told. */
  from: string;
  from_tier: string;
  to: string;
  to_tier: string;
  /** The source that told it. */
  id: string;
}

export interface LoadPair extends LoadWay, LoadStats {}

export interface SlowLoad extends LoadWay {
  time: number;
  request: string;
  blocks: number;
  bytes: number;
  duration_ms: number;
}

export interface Loads extends LoadStats {
  window_seconds: number;
  /** Busiest first. */
  pairs: LoadPair[];
  /** Pairs that are not among them. */
  more: number;
  forgotten: number;
  slowest: SlowLoad[];
  /** Bytes by Unix second; nothing moved before and after. */
  seconds: { first: number; bytes: number[] };
}

export interface StateFrame {
  v: number;
  full?: boolean;
  now: number;
  set?: Record<string, unknown>;
  del?: string[];
}

export interface TailFilter {
  source: string;
  kinds: EventKind[];
  hash: string;
}

export interface TailBlock {
  hash: string;
  prefix?: string;
  effect: number;
  copies_left?: number;
  age_s?: number;
}

export interface TailLine {
  time?: string;
  received?: string;
  source: string;
  epoch: number;
  seq: number;
  last_seq?: number;
  way: string;
  reason?: string;
  kind?: EventKind;
  cause?: string;
  tier?: string;
  group?: number;
  parent?: string;
  block_size?: number;
  lora_name?: string;
  load?: { from: string; peer?: string; request?: string; bytes: number; duration_s: number };
  blocks?: TailBlock[];
}

export interface TailFrame {
  lines: TailLine[] | null;
  matched: number;
  shown: number;
}

export interface QueryParam {
  name: string;
  kind: string;
  default?: string;
  help?: string;
}

export interface QueryInfo {
  name: string;
  title: string;
  help?: string;
  params?: QueryParam[];
}

export interface Column {
  name: string;
  kind: string;
  unit?: string;
}

export type Cell = string | number | boolean | null;

export interface QueryResult {
  query: string;
  title: string;
  since: number;
  until: number;
  exactness: string;
  notes?: string[];
  columns: Column[];
  rows: Cell[][];
  chart?: { kind: string; x?: string; y?: string[] };
  truncated?: boolean;
  elapsed_ms?: number;
  sql?: string;
}

export interface ExplainEvent {
  time: number;
  id: string;
  instance: string;
  op: string;
  tier?: string;
  /** -1 where the engine has none. */
  group?: number;
  effect?: number;
  copies?: number | null;
  age?: number | null;
  epoch?: number;
  seq?: number;
  reason?: string;
}

export interface Explanation {
  hash: string;
  found: boolean;
  summary?: string[];
  names?: { prefix?: string; engine_hash?: string; model?: string }[];
  resident?: { id: string; instance: string; tier: string; copies: number; since?: number }[];
  parent?: { engine_hash?: string; prefix?: string } | null;
  events?: ExplainEvent[];
  truncated?: boolean;
  elapsed_ms?: number;
}
