import { effect } from "@preact/signals";
import { describe, expect, it } from "vitest";
import type { StateFrame } from "../src/contract";
import { Store } from "../src/live/store";

const source = (id: string, seq: number) => ({ id, seq });
const frame = (set: Record<string, unknown>, more: Partial<StateFrame> = {}): StateFrame => ({
  v: 1,
  now: 5000,
  set,
  ...more,
});

describe("Store", () => {
  it("sets, replaces and deletes documents", () => {
    const store = new Store();
    store.apply(
      frame({ "source/a": source("a", 1), "source/b": source("b", 1), meta: { started: 7 } }, { full: true }),
      5000,
    );
    expect(store.sourceIds.value).toEqual(["a", "b"]);
    expect(store.meta.value?.started).toBe(7);
    store.apply(frame({ "source/a": source("a", 2) }, { del: ["source/b"] }), 5100);
    expect(store.source("a").value?.seq).toBe(1);
    store.flush();
    expect(store.sourceIds.value).toEqual(["a"]);
    expect(store.source("a").value?.seq).toBe(2);
    expect(store.source("b").value).toBeUndefined();
  });

  it("forgets everything at a full frame", () => {
    const store = new Store();
    store.apply(
      frame(
        { "source/a": source("a", 1), "point/4": { stored: 1, evicted: 0, loaded: 0 }, hits: { reported: true } },
        { full: true },
      ),
      5000,
    );
    store.apply(frame({ "source/c": source("c", 1) }, { full: true }), 6000);
    expect(store.sourceIds.value).toEqual(["c"]);
    expect(store.points().size).toBe(0);
    expect(store.hits.value).toBeUndefined();
  });

  it("wakes only what shows a changed document", () => {
    const store = new Store();
    store.apply(frame({ "source/a": source("a", 1), "source/b": source("b", 1) }, { full: true }), 5000);
    let a = 0;
    let b = 0;
    let ids = 0;
    effect(() => {
      store.source("a").value;
      a++;
    });
    effect(() => {
      store.source("b").value;
      b++;
    });
    effect(() => {
      store.sourceIds.value;
      ids++;
    });
    store.apply(frame({ "source/a": source("a", 2) }), 5100);
    store.apply(frame({ "source/a": source("a", 3) }), 5150);
    store.flush();
    store.flush();
    expect([a, b, ids]).toEqual([2, 1, 1]);
  });

  it("wakes once for a frame", () => {
    const store = new Store();
    let woken = 0;
    effect(() => {
      store.source("a").value;
      store.source("b").value;
      store.sourceIds.value;
      woken++;
    });
    store.apply(frame({ "source/a": source("a", 1), "source/b": source("b", 1) }, { full: true }), 5000);
    expect(woken).toBe(2);
  });

  it("publishes nothing while held, and all of it at the release", () => {
    const store = new Store();
    store.apply(frame({ "source/a": source("a", 1) }, { full: true }), 5000);
    store.hold();
    store.apply(frame({ "source/a": source("a", 2), "source/b": source("b", 1) }), 5100);
    store.apply(frame({ "source/c": source("c", 1) }, { full: true }), 5200);
    expect(store.sourceIds.value).toEqual(["a"]);
    expect(store.source("a").value?.seq).toBe(1);
    store.release();
    expect(store.sourceIds.value).toEqual(["c"]);
    expect(store.source("a").value).toBeUndefined();
  });

  it("shows the first state even when it was opened held", () => {
    const store = new Store();
    store.hold();
    store.apply(frame({ "source/a": source("a", 1) }, { full: true }), 5000);
    store.apply(frame({ "source/a": source("a", 2) }), 5100);
    store.flush();
    expect(store.source("a").value?.seq).toBe(1);
  });

  it("orders names as people do", () => {
    const store = new Store();
    store.apply(frame({ "source/p-10": {}, "source/p-9": {}, "source/p-1": {} }, { full: true }), 5000);
    expect(store.sourceIds.value).toEqual(["p-1", "p-9", "p-10"]);
  });

  it("follows the server's clock without jitter", () => {
    const store = new Store();
    store.apply(frame({}, { now: 100_000, full: true }), 90_000);
    expect(store.skew.value).toBe(10_000);
    store.apply(frame({}, { now: 100_100 }), 90_150);
    expect(store.skew.value).toBe(10_000);
  });
});
