import type { ExplainEvent } from "./contract";
import { nameOfId } from "./fleet";

export interface Span {
  from: number;
  to: number;
  /** The story begins with the block already there. */
  openStart: boolean;
  /** It is there still. */
  openEnd: boolean;
  end: ExplainEvent | undefined;
}

export interface Mark {
  at: number;
  event: ExplainEvent;
}

export interface Lane {
  key: string;
  name: string;
  tier: string;
  group: number;
  spans: Span[];
  marks: Mark[];
}

/** A lane while its story is read. */
interface Open extends Lane {
  since: number | undefined;
  /** It was found there, by a snapshot: it was stored before. */
  found: boolean;
  copies: number;
}

export interface Story {
  from: number;
  to: number;
  lanes: Lane[];
}

/**
 * A block's events as lanes, one for each source, tier and group: it is there from a STORED until an EVICTED that leaves no
 * copy, or until a CLEARED of its source. What is there at the end lasts until now. A SNAPSHOT is a checkpoint from which
 * history goes on: what it holds is there, since when is not known.
 */
export function story(events: readonly ExplainEvent[], now: number): Story {
  const rising = [...events].sort((a, b) => a.time - b.time || (a.seq ?? 0) - (b.seq ?? 0));
  const from = rising[0]?.time ?? now;
  const lanes = new Map<string, Open>();
  const lane = (e: ExplainEvent) => {
    const group = Math.max(e.group ?? 0, 0);
    const key = `${e.id}|${e.tier ?? ""}|${group}`;
    let found = lanes.get(key);
    if (!found) {
      found = {
        key,
        name: nameOfId(e.id),
        tier: e.tier ?? "",
        group,
        spans: [],
        marks: [],
        since: undefined,
        found: false,
        copies: 0,
      };
      lanes.set(key, found);
    }
    return found;
  };
  const close = (l: ReturnType<typeof lane>, at: number, end: ExplainEvent) => {
    l.spans.push({ from: l.since ?? from, to: at, openStart: l.found || l.since === undefined, openEnd: false, end });
    l.since = undefined;
    l.found = false;
    l.copies = 0;
  };
  for (const e of rising) {
    if (e.op === "CLEARED") {
      for (const l of lanes.values()) {
        if (l.key.startsWith(`${e.id}|`)) {
          if (l.since !== undefined) {
            close(l, e.time, e);
          }
          l.marks.push({ at: e.time, event: e });
        }
      }
      continue;
    }
    const l = lane(e);
    if (e.op === "STORED") {
      l.copies += e.effect ?? 1;
      if (l.since === undefined && (e.effect ?? 1) > 0) {
        l.since = e.time;
      }
    } else if (e.op === "SNAPSHOT") {
      const held = (e.copies ?? 0) > 0;
      if (held && l.since === undefined) {
        l.since = e.time;
        l.found = true;
      } else if (!held && l.since !== undefined) {
        close(l, e.time, e);
      }
      l.copies = e.copies ?? 0;
    } else if (e.op === "EVICTED") {
      const first = l.since === undefined && l.spans.length === 0 && l.marks.length === 0;
      l.copies += e.effect ?? -1;
      const left = e.copies ?? l.copies;
      if (left <= 0 && (l.since !== undefined || (first && (e.effect ?? -1) < 0))) {
        close(l, e.time, e);
      } else {
        l.marks.push({ at: e.time, event: e });
      }
    } else {
      l.marks.push({ at: e.time, event: e });
    }
  }
  for (const l of lanes.values()) {
    if (l.since !== undefined) {
      l.spans.push({ from: l.since, to: now, openStart: l.found, openEnd: true, end: undefined });
    }
  }
  return {
    from,
    to: Math.max(now, from + 1),
    lanes: [...lanes.values()].map(({ since: _, found: __, copies: ___, ...l }) => l),
  };
}

/** Round instants between from and to, at most `most` of them, for an axis. */
export function ticks(from: number, to: number, most: number): number[] {
  const steps = [
    1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800,
  ];
  const step = 1000 * (steps.find((s) => (to - from) / 1000 / s <= most) ?? 2_592_000);
  const offset = new Date(from).getTimezoneOffset() * 60_000;
  const marks: number[] = [];
  for (let t = Math.ceil((from - offset) / step) * step + offset; t <= to; t += step) {
    marks.push(t);
  }
  return marks;
}
