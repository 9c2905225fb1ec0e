import { describe, expect, it } from "vitest";
import type { LoadPair, Loads } from "../src/contract";
import { decimal } from "../src/format";
import { Store } from "../src/live/store";
import { sorted } from "../src/parts/table";
import { ago, isStore, matches, speedOf, throughput, values, wayKey, window } from "../src/transfers";

function pair(more: Partial<LoadPair> = {}): LoadPair {
  return {
    from: "prefill-0",
    from_tier: "GPU",
    to: "decode-0",
    to_tier: "GPU",
    id: "default.m.decode-0.0.connector",
    loads: 3,
    blocks: 9,
    bytes: 900,
    rate: { loads: 0.3, blocks: 0.9, bytes: 90 },
    ...more,
  };
}

function loads(first: number, bytes: number[]): Loads {
  return {
    window_seconds: 10,
    loads: 3,
    blocks: 9,
    bytes: 900,
    rate: { loads: 0.3, blocks: 0.9, bytes: 90 },
    pairs: [],
    more: 0,
    forgotten: 0,
    slowest: [],
    seconds: { first, bytes },
  };
}

describe("window", () => {
  it("draws the told seconds, and nothing moved around them", () => {
    const { x, ys, min, max } = window(loads(9990, [5, 0, 7]), 10_000.4, 0);
    expect([x.length, x[0], x.at(-1)]).toEqual([297, 9701, 9997]);
    const told = Object.fromEntries(x.map((s, i) => [s, ys[0]?.[i]]).filter(([, y]) => y !== 0));
    expect(told).toEqual({ 9990: 5, 9992: 7 });
    expect([min, max]).toEqual([9701.4, 9997.4]);
  });

  it("leaves out the seconds that may not have been told yet", () => {
    expect(window(loads(9998, [5, 5]), 10_000.9, 0).ys[0]?.at(-1)).toBe(0);
    expect(window(loads(9998, [5, 5]), 10_001, 0).ys[0]?.at(-1)).toBe(5);
  });

  it("begins with a second that is told", () => {
    const told = loads(9700, Array(300).fill(1)); // collected at 10,000
    expect(window(told, 10_000, 0).ys[0]?.every((y) => y === 1)).toBe(true);
    expect(window(told, 10_001.9, 0).ys[0]?.every((y) => y === 1)).toBe(true);
  });

  it("knows nothing of the time before the server began", () => {
    const { x, ys } = window(loads(0, []), 10_000, 9_990_500);
    expect(ys[0]?.[x.indexOf(9990)]).toBeNull();
    expect(ys[0]?.[x.indexOf(9991)]).toBe(0);
    expect(window(undefined, 10_000, 0).ys[0]?.every((y) => y === 0)).toBe(true);
  });
});

describe("numbers", () => {
  const gap = "\u00a0";
  it.each([
    [0, "0 B/s"],
    [0.31, "0.31 B/s"],
    [12.4, "12 B/s"],
    [999, "999 B/s"],
    [999.6, "1.00 kB/s"],
    [1234, "1.23 kB/s"],
    [83_400_000, "83.4 MB/s"],
    [999_600_000, "1.00 GB/s"],
    [1_236_000_000, "1.24 GB/s"],
    [18.4e18, "18.4 EB/s"],
  ])("%d bytes a second", (n, want) => {
    expect(throughput(n)).toBe(want.replace(" ", gap));
  });

  it("counts bytes whole", () => {
    expect(decimal(512, "B")).toBe(`512${gap}B`);
    expect(decimal(5.1e12, "B")).toBe(`5.10${gap}TB`);
  });

  it("tells how long ago", () => {
    expect(ago(-40)).toBe("just now");
    expect(ago(1999)).toBe("just now");
    expect(ago(4200)).toBe(`4.2${gap}s ago`);
  });

  it("divides by no duration", () => {
    expect(speedOf({ bytes: 1000, duration_ms: 2 })).toBe(500_000);
    expect(speedOf({ bytes: 1000, duration_ms: 0 })).toBeUndefined();
  });
});

describe("pairs", () => {
  it("match by every word", () => {
    expect(matches(pair(), "prefill gpu")).toBe(true);
    expect(matches(pair(), "prefill cpu")).toBe(false);
    expect(matches({ ...pair(), request: "cmpl-17" }, "cmpl-17 decode")).toBe(true);
    expect(matches(pair({ from: "" }), "not told")).toBe(true);
    expect(matches(pair({ from: "redis://kv:6379" }), "REDIS decode")).toBe(true);
  });

  it("differ by tiers, ranks and models", () => {
    const keys = [
      pair(),
      pair({ from_tier: "CPU" }),
      pair({ to_tier: "CPU" }),
      pair({ id: "default.m.decode-0.1.connector" }),
      pair({ id: "default.n.decode-0.0.connector" }),
    ].map(wayKey);
    expect(new Set(keys).size).toBe(keys.length);
  });

  it("keep what is unknown last, whichever way they are sorted", () => {
    const rows = [
      pair({ from: "quiet" }),
      pair({ from: "slow", latency_ms: { p50: 9, p99: 90, max: 99 } }),
      pair({ from: "fast", latency_ms: { p50: 1, p99: 10, max: 11 } }),
    ];
    const by = (key: string, falling: boolean) =>
      sorted(rows, falling, values[key] ?? (() => 0), wayKey).map((p) => p.from);
    expect(by("p99", true)).toEqual(["slow", "fast", "quiet"]);
    expect(by("p99", false)).toEqual(["fast", "slow", "quiet"]);
    expect(by("pair", false)).toEqual(["fast", "quiet", "slow"]);
  });

  it("know a store by its address", () => {
    expect(isStore("redis://kv:6379")).toBe(true);
    expect(isStore("prefill-0")).toBe(false);
  });
});

describe("the document", () => {
  it("is published like the others", () => {
    const store = new Store();
    const frame = (set: Record<string, unknown>, full: boolean) => ({ v: 1, now: 5000, set, full });
    expect(store.loads.value).toBeUndefined();
    store.apply(frame({ loads: loads(1, [2]) }, true), 5000);
    expect(store.loads.value?.seconds).toEqual({ first: 1, bytes: [2] });
    store.apply(frame({}, true), 5000);
    expect(store.loads.value).toBeUndefined();
  });
});
