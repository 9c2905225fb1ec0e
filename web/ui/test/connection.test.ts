import { describe, expect, it } from "vitest";
import type { StateFrame, TailFrame } from "../src/contract";
import { backoff } from "../src/live/backoff";
import { Connection } from "../src/live/connection";

describe("backoff", () => {
  it("doubles up to a bound, half of it random", () => {
    expect([0, 1, 2, 3, 4, 5, 6, 60].map((n) => backoff(n, () => 0))).toEqual([
      250, 500, 1000, 2000, 4000, 8000, 10_000, 10_000,
    ]);
    expect([0, 1, 6].map((n) => backoff(n, () => 1))).toEqual([500, 1000, 20_000]);
  });
});

class FakeSocket {
  sent: string[] = [];
  onmessage: ((message: { data: string }) => void) | null = null;
  onclose: (() => void) | null = null;
  send(text: string) {
    this.sent.push(text);
  }
  tell(frame: unknown) {
    this.onmessage?.({ data: JSON.stringify(frame) });
  }
}

function rig() {
  let now = 0;
  const sockets: FakeSocket[] = [];
  const waits: { ms: number; act: () => void; off: boolean }[] = [];
  const got: { state: StateFrame[]; tail: TailFrame[]; error: string[] } = { state: [], tail: [], error: [] };
  const connection = new Connection(
    { state: (f) => got.state.push(f), tail: (f) => got.tail.push(f), error: (m) => got.error.push(m) },
    {
      dial: () => {
        const socket = new FakeSocket();
        sockets.push(socket);
        return socket as unknown as WebSocket;
      },
      now: () => now,
      random: () => 0,
      after: (ms, act) => {
        const wait = { ms, act, off: false };
        waits.push(wait);
        return () => {
          wait.off = true;
        };
      },
    },
  );
  return {
    connection,
    got,
    sockets,
    last: () => sockets.at(-1) as FakeSocket,
    pass: (ms: number) => {
      now += ms;
    },
    fire: () => {
      const wait = waits.at(-1);
      if (wait && !wait.off) {
        wait.act();
      }
      return wait?.ms;
    },
  };
}

const state = { v: 1, full: true, now: 0, set: {} };

describe("Connection", () => {
  it("is live from the first frame on, and tells frames apart", () => {
    const r = rig();
    r.connection.open();
    expect(r.connection.status.value.phase).toBe("connecting");
    r.last().tell(state);
    expect(r.connection.status.value.phase).toBe("live");
    r.last().tell({ tail: { lines: [], matched: 3, shown: 0 } });
    r.last().tell({ error: "no" });
    expect([r.got.state.length, r.got.tail.length, r.got.error]).toEqual([1, 1, ["no"]]);
  });

  it("waits longer after each failure, and briefly again once it had lasted", () => {
    const r = rig();
    r.connection.open();
    r.last().onclose?.();
    expect(r.connection.status.value).toMatchObject({ phase: "waiting", attempt: 1, until: 250 });
    expect(r.fire()).toBe(250);
    r.last().onclose?.();
    expect(r.fire()).toBe(500);
    r.last().tell(state);
    r.pass(100);
    r.last().onclose?.();
    expect(r.fire()).toBe(1000);
    r.last().tell(state);
    r.pass(6000);
    r.last().onclose?.();
    expect(r.fire()).toBe(250);
  });

  it("dials at once when asked, and only one socket", () => {
    const r = rig();
    r.connection.open();
    r.last().onclose?.();
    r.connection.open();
    expect(r.sockets.length).toBe(2);
    r.fire();
    r.connection.open();
    expect(r.sockets.length).toBe(2);
  });

  it("asks for the tail anew after a reconnect", () => {
    const r = rig();
    const filter = { source: "prefill-*", kinds: [], hash: "" };
    r.connection.open();
    r.connection.tail(filter);
    expect(r.last().sent).toEqual([]);
    r.last().tell(state);
    expect(r.last().sent).toEqual([JSON.stringify({ tail: filter })]);
    r.last().onclose?.();
    r.fire();
    r.last().tell(state);
    expect(r.last().sent.length).toBe(1);
    r.connection.tail(null);
    expect(r.last().sent.at(-1)).toBe('{"tail":null}');
  });
});
