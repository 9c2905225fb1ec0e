import { describe, expect, it } from "vitest";
import type { ExplainEvent } from "../src/contract";
import { story, ticks } from "../src/story";

const at = (time: number, op: string, more: Partial<ExplainEvent> = {}): ExplainEvent => ({
  time,
  op,
  id: "c.m.a.0.engine",
  instance: "a",
  tier: "GPU",
  ...more,
});

describe("story", () => {
  it("spans from STORED to the EVICTED that leaves no copy", () => {
    const { lanes } = story(
      [
        at(10, "STORED", { effect: 1, copies: 1 }),
        at(20, "STORED", { effect: 1, copies: 2 }),
        at(30, "EVICTED", { effect: -1, copies: 1 }),
        at(40, "EVICTED", { effect: -1, copies: 0 }),
        at(50, "STORED", { effect: 1, copies: 1 }),
      ],
      100,
    );
    expect(lanes.length).toBe(1);
    expect(lanes[0]?.spans.map((s) => [s.from, s.to, s.openEnd])).toEqual([
      [10, 40, false],
      [50, 100, true],
    ]);
    expect(lanes[0]?.marks.map((m) => m.at)).toEqual([30]);
  });

  it("begins before the story where the first event is an eviction", () => {
    const { lanes } = story(
      [at(5, "STORED", { id: "c.m.b.0.engine" }), at(30, "EVICTED", { effect: -1, copies: 0 })],
      50,
    );
    expect(lanes.find((l) => l.name === "a")?.spans).toMatchObject([{ from: 5, to: 30, openStart: true }]);
  });

  it("ends every lane of a cleared source, and no other", () => {
    const { lanes } = story(
      [
        at(1, "STORED"),
        at(2, "STORED", { tier: "CPU" }),
        at(3, "STORED", { id: "c.m.b.0.engine" }),
        at(9, "CLEARED", { tier: "", reason: "resync" }),
      ],
      20,
    );
    expect(lanes.map((l) => l.spans.map((s) => s.to))).toEqual([[9], [9], [20]]);
  });

  it("goes on from a snapshot, which says what is there but not since when", () => {
    const { lanes } = story(
      [at(5, "SNAPSHOT", { copies: 1, group: -1 }), at(9, "EVICTED", { effect: -1, copies: null, group: 0 })],
      20,
    );
    expect(lanes.length).toBe(1);
    expect(lanes[0]?.spans).toMatchObject([{ from: 5, to: 9, openStart: true }]);
  });

  it("marks loads, which change nothing", () => {
    const { lanes } = story([at(1, "LOADED", { effect: 0 })], 2);
    expect(lanes[0]).toMatchObject({ spans: [], marks: [{ at: 1 }] });
  });

  it("puts round times on the axis", () => {
    expect(ticks(1000, 61_000, 6)).toEqual([10_000, 20_000, 30_000, 40_000, 50_000, 60_000]);
  });
});
