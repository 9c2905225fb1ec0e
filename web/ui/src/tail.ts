import type { TailFrame, TailLine } from "./contract";

/** Lines kept; older ones leave. */
export const kept = 500;

export interface TailEntry {
  /** Rises with each line, and names its row. */
  n: number;
  line: TailLine;
}

/** TailLog keeps the newest lines of a tail, and counts all that it was told of. */
export class TailLog {
  /** The newest first. */
  entries: readonly TailEntry[] = [];
  /** Events that passed the filter, and those of them that the server sent, since the tail began. */
  matched = 0;
  shown = 0;
  private next = 0;

  add(frame: TailFrame): void {
    const fresh = (frame.lines ?? []).map((line) => ({ n: this.next++, line })).reverse();
    this.entries = [...fresh, ...this.entries].slice(0, kept);
    this.matched += frame.matched;
    this.shown += frame.shown;
  }

  /** Counts a frame whose lines are not wanted. */
  skip(frame: TailFrame): void {
    this.matched += frame.matched;
  }
}
