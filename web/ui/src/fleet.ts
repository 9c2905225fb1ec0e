import type { Flow, Source, SourceState } from "./contract";

/** States from healthy to lost. */
export const states: readonly SourceState[] = ["live", "recovering", "partial", "stale", "gone"];

export interface Trust {
  sources: number;
  byState: Record<SourceState, number>;
  /** The worst lag of a source that is not gone, and whose it is. */
  lag: { ms: number; source: Source } | undefined;
  behind: number;
  holes: number;
  lost: number;
  /** Batches lost or dropped of sources that are not complete again. */
  unhealed: { lost: number; dropped: number };
  recovered: number;
  malformed: number;
  dropped: number;
  duplicates: number;
  agreed: number;
  differed: number;
  /** Sources whose last digest differed. */
  differing: Source[];
  unbalanced: Source[];
}

export function trust(sources: readonly Source[]): Trust {
  const sum: Trust = {
    sources: sources.length,
    byState: { live: 0, recovering: 0, partial: 0, stale: 0, gone: 0 },
    lag: undefined,
    behind: 0,
    holes: 0,
    lost: 0,
    unhealed: { lost: 0, dropped: 0 },
    recovered: 0,
    malformed: 0,
    dropped: 0,
    duplicates: 0,
    agreed: 0,
    differed: 0,
    differing: [],
    unbalanced: [],
  };
  for (const s of sources) {
    sum.byState[s.state]++;
    if (s.lag_ms !== undefined && s.state !== "gone" && (sum.lag === undefined || s.lag_ms > sum.lag.ms)) {
      sum.lag = { ms: s.lag_ms, source: s };
    }
    sum.behind += s.behind;
    sum.holes += s.holes;
    sum.lost += s.ledger.lost;
    sum.recovered += s.ledger.recovered;
    sum.malformed += s.ledger.malformed;
    sum.dropped += s.ledger.dropped;
    sum.duplicates += s.ledger.duplicates;
    if (s.state !== "live") {
      sum.unhealed.lost += s.ledger.lost;
      sum.unhealed.dropped += s.ledger.dropped;
    }
    sum.agreed += s.digest.agreed;
    sum.differed += s.digest.differed;
    if (s.digest.last === "differed") {
      sum.differing.push(s);
    }
    if (!s.balanced) {
      sum.unbalanced.push(s);
    }
  }
  return sum;
}

export interface Occupancy {
  tier: string;
  blocks: number;
  copies: number;
  /** Copies in sources that told their pool, and the sum of those pools; 0 when none did. */
  pooled: number;
  pool: number;
  /** Sources that hold something in this tier, and those of them that told their pool. */
  sources: number;
  pools: number;
}

/** The tier that an engine's pool is of. */
export const device = "GPU";

const warmth = ["GPU", "CPU", "DISK", "STORAGE", "EXTERNAL"];

/** How full each tier of the fleet is, warm tiers first. Sources that are gone hold nothing that could be asked for. */
export function occupancy(sources: readonly Source[]): Occupancy[] {
  const tiers = new Map<string, Occupancy>();
  for (const s of sources) {
    if (s.state === "gone") {
      continue;
    }
    for (const t of s.tiers) {
      let sum = tiers.get(t.tier);
      if (!sum) {
        sum = { tier: t.tier, blocks: 0, copies: 0, pooled: 0, pool: 0, sources: 0, pools: 0 };
        tiers.set(t.tier, sum);
      }
      sum.blocks += t.blocks;
      sum.copies += t.copies;
      sum.sources++;
      if (t.tier === device && s.pool > 0) {
        sum.pooled += t.copies;
        sum.pool += s.pool;
        sum.pools++;
      }
    }
  }
  const rank = (tier: string) => {
    const at = warmth.indexOf(tier);
    return at < 0 ? warmth.length : at;
  };
  return [...tiers.values()].sort((a, b) => rank(a.tier) - rank(b.tier) || a.tier.localeCompare(b.tier));
}

/** How full a source's device pool is; undefined when its size is not known. */
export function fill(s: Source): number | undefined {
  if (s.pool === 0) {
    return undefined;
  }
  return (s.tiers.find((t) => t.tier === device)?.copies ?? 0) / s.pool;
}

/** Blocks a second over the five seconds before `now`, in seconds of the server's clock. The oldest second counts in part. */
export function rates(points: ReadonlyMap<number, Flow>, now: number): Flow {
  const present = Math.floor(now);
  const sum: Flow = { stored: 0, evicted: 0, loaded: 0 };
  for (let second = present - 5; second <= present; second++) {
    const p = points.get(second);
    const weight = second === present - 5 ? 1 - (now - present) : 1;
    sum.stored += ((p?.stored ?? 0) * weight) / 5;
    sum.evicted += ((p?.evicted ?? 0) * weight) / 5;
    sum.loaded += ((p?.loaded ?? 0) * weight) / 5;
  }
  return sum;
}

/** A source's name for people: its instance, with rank and origin where they are not the usual. */
export function sourceName(s: Pick<Source, "instance" | "dp_rank" | "origin">): string {
  const rank = s.dp_rank === 0 ? "" : `#${s.dp_rank}`;
  return `${s.instance}${rank}${s.origin === "engine" ? "" : ` (${s.origin})`}`;
}

/** The name in a source's subject tokens, cluster.model.instance.rank.origin, where its document is not at hand. */
export function nameOfId(id: string): string {
  const [, , instance = "", rank = "0", origin = "engine"] = id.split(".");
  return sourceName({ instance: untoken(instance), dp_rank: Number(rank), origin });
}

/** The model in a source's subject tokens. */
export function modelOfId(id: string): string {
  return untoken(id.split(".")[1] ?? "");
}

function untoken(token: string): string {
  if (token === "%") {
    return "";
  }
  try {
    return decodeURIComponent(token);
  } catch {
    // A name that is no UTF-8: its encoded form is still a name.
    return token;
  }
}

/** Whether every word of the filter is found in one of a source's texts. */
export function matches(s: Source, filter: string): boolean {
  const text = [s.id, s.instance, s.model, s.cluster, s.state, s.reason, s.dialect, s.endpoint, s.origin]
    .join("\n")
    .toLowerCase();
  return filter
    .toLowerCase()
    .split(/\s+/)
    .every((word) => text.includes(word));
}
