import { describe, expect, it } from "vitest";
import type { Source } from "../src/contract";
import { fill, matches, modelOfId, nameOfId, occupancy, rates, trust } from "../src/fleet";
import { insights } from "../src/insight";
import { TailLog } from "../src/tail";

function source(more: Partial<Source> = {}): Source {
  return {
    id: "default.m.a.0.engine",
    cluster: "default",
    model: "m",
    instance: "a",
    dp_rank: 0,
    origin: "engine",
    state: "live",
    epoch: 1,
    started: true,
    seq: 9,
    behind: 0,
    lag_ms: 4,
    stored: 10,
    evicted: 0,
    loaded: 0,
    rate: { stored: 1, evicted: 0, loaded: 0 },
    tiers: [{ tier: "GPU", blocks: 10, copies: 12 }],
    pool: 100,
    block_size: 16,
    copies: "counted",
    ledger: {
      first: 0,
      last: 9,
      live: 10,
      recovered: 0,
      held: 0,
      asked: 0,
      lost: 0,
      duplicates: 0,
      malformed: 0,
      dropped: 0,
    },
    balanced: true,
    holes: 0,
    digest: { agreed: 3, differed: 0, last: "agreed" },
    ...more,
  };
}

describe("fleet", () => {
  it("sums trust, and leaves the lag of what is gone out", () => {
    const sum = trust([source(), source({ id: "b", state: "gone", lag_ms: 9000 }), source({ id: "c", lag_ms: 7 })]);
    expect(sum.byState).toMatchObject({ live: 2, gone: 1 });
    expect(sum.lag?.ms).toBe(7);
    expect(sum.agreed).toBe(9);
  });

  it("compares copies with the pools of those who told them", () => {
    const [gpu, cpu] = occupancy([
      source(),
      source({
        pool: 0,
        tiers: [
          { tier: "CPU", blocks: 5, copies: 5 },
          { tier: "GPU", blocks: 7, copies: 7 },
        ],
      }),
      source({ state: "gone", tiers: [{ tier: "GPU", blocks: 99, copies: 99 }] }),
    ]);
    expect(gpu).toEqual({ tier: "GPU", blocks: 17, copies: 19, pooled: 12, pool: 100, sources: 2, pools: 1 });
    expect(cpu).toMatchObject({ tier: "CPU", pool: 0 });
    expect(fill(source({ pool: 0 }))).toBeUndefined();
  });

  it("means a rate over the last five seconds, the oldest in part", () => {
    const points = new Map([95, 96, 97, 98, 99, 100].map((s) => [s, { stored: 10, evicted: 0, loaded: 0 }]));
    expect(rates(points, 100).stored).toBeCloseTo(12);
    expect(rates(new Map([[95, { stored: 10, evicted: 0, loaded: 0 }]]), 100.5).stored).toBeCloseTo(1);
  });

  it("names a source from its tokens", () => {
    expect(nameOfId("default.demo%2Fllama-sim.prefill-0.1.connector")).toBe("prefill-0#1 (connector)");
    expect(nameOfId("default.m.%FF.0.engine")).toBe("%FF");
    expect(modelOfId("default.demo%2Fllama-sim.prefill-0.0.engine")).toBe("demo/llama-sim");
  });

  it("filters by every word", () => {
    expect(matches(source({ reason: "asked the replay" }), "LIVE replay")).toBe(true);
    expect(matches(source(), "live gone")).toBe(false);
  });
});

describe("insights", () => {
  it("says nothing of a healthy fleet", () => {
    expect(
      insights(
        [source()],
        [
          { name: "nats", state: "ok" },
          { name: "history", state: "off" },
        ],
      ),
    ).toEqual([]);
  });

  it("puts the gravest first, with what to do", () => {
    const found = insights(
      [
        source({ state: "recovering", reason: "asked" }),
        source({ id: "b", instance: "b", state: "gone", reason: "disconnected" }),
        source({ id: "c", lag_ms: 2000 }),
      ],
      [{ name: "nats", state: "down", reason: "refused" }],
    );
    expect(found.map((i) => [i.id, i.weight])).toEqual([
      ["service-nats", "act"],
      ["state-gone", "act"],
      ["lag", "watch"],
      ["state-recovering", "note"],
    ]);
    expect(found[1]?.text).toBe("b is gone (disconnected). Lookups leave it out.");
    expect(found.every((i) => i.advice !== "")).toBe(true);
  });

  it("alarms of what is lost only while it matters", () => {
    const ledger = { ...source().ledger, lost: 2, live: 8 };
    expect(insights([source({ ledger })], []).map((i) => [i.id, i.weight])).toEqual([["lost", "note"]]);
    expect(insights([source({ ledger, state: "partial" })], []).map((i) => i.weight)).toEqual(["watch", "watch"]);
  });
});

describe("TailLog", () => {
  it("keeps the newest 500 lines and counts the rest", () => {
    const log = new TailLog();
    const line = (seq: number) => ({ source: "s", epoch: 1, seq, way: "live" });
    for (let i = 0; i < 60; i++) {
      log.add({ lines: Array.from({ length: 10 }, (_, j) => line(i * 10 + j)), matched: 40, shown: 10 });
    }
    expect(log.entries.length).toBe(500);
    expect(log.entries[0]?.line.seq).toBe(599);
    expect([log.shown, log.matched]).toEqual([600, 2400]);
    log.skip({ lines: null, matched: 5, shown: 0 });
    expect([log.shown, log.matched]).toEqual([600, 2405]);
  });
});
