import type { LoadPair, Loads, LoadWay } from "./contract";
import { decimal, duration } from "./format";
import type { ChartData } from "./parts/chart";

/** The document comes once a second and tells whole ones: a second is drawn when the one that tells it must have come. */
const behind = 3;

/** Seconds before it that are drawn: the oldest is one that every document still tells. */
const span = 299 - behind;

/** Bytes a second of the fleet, in seconds of the server's clock. Of the time before the server began nothing is known. */
export function window(loads: Loads | undefined, now: number, started: number): ChartData {
  const last = Math.floor(now) - behind;
  const { first, bytes } = loads?.seconds ?? { first: 0, bytes: [] };
  const x: number[] = [];
  const ys: (number | null)[] = [];
  for (let second = last - span; second <= last; second++) {
    x.push(second);
    ys.push(bytes[second - first] ?? (second < Math.ceil(started / 1000) ? null : 0));
  }
  return { x, ys: [ys], min: now - behind - span, max: now - behind };
}

/** Bytes a second. */
export function throughput(bytes: number): string {
  return decimal(bytes, "B/s");
}

/** How long ago something was, in milliseconds. The document is up to a second old: less than two says nothing. */
export function ago(ms: number): string {
  return ms < 2000 ? "just now" : `${duration(ms / 1000)} ago`;
}

/** A store is named by its address, an engine by its instance. */
export function isStore(name: string): boolean {
  return name.includes("://");
}

/** A pair's name among others. */
export function wayKey(way: LoadWay): string {
  return [way.from, way.from_tier, way.id, way.to_tier].join("\n");
}

/** Whether every word of the filter is found in one of the names of a pair or a load. */
export function matches(way: LoadWay & { request?: string }, filter: string): boolean {
  const text = [way.from || "not told", way.from_tier, way.to, way.to_tier, way.id, way.request]
    .join("\n")
    .toLowerCase();
  return filter
    .toLowerCase()
    .split(/\s+/)
    .every((word) => text.includes(word));
}

/** What a pair is sorted by; undefined where it is not known. */
export const values: Record<string, (p: LoadPair) => string | number | undefined> = {
  pair: (p) => `${p.from}\n${p.to}`,
  rate: (p) => p.rate.bytes,
  loads: (p) => p.rate.loads,
  blocks: (p) => p.rate.blocks,
  p50: (p) => p.latency_ms?.p50,
  p99: (p) => p.latency_ms?.p99,
  speed: (p) => p.speed,
  total: (p) => p.bytes,
  last: (p) => p.last,
};

/** Bytes a second of one load while it ran; undefined where it did not tell how long it took. */
export function speedOf(load: { bytes: number; duration_ms: number }): number | undefined {
  return load.duration_ms > 0 ? (load.bytes / load.duration_ms) * 1000 : undefined;
}
