import { type ReadonlySignal, signal } from "@preact/signals";
import type { Source } from "../contract";

/** Samples kept of each source, one a second. */
export const traceLength = 60;

export interface Trace {
  stored: number[];
  evicted: number[];
}

/** Traces remembers what each source stored and evicted a second, from when the page was opened. */
export class Traces {
  readonly version: ReadonlySignal<number>;
  private readonly out = signal(0);
  private readonly bySource = new Map<string, Trace>();

  constructor() {
    this.version = this.out;
  }

  sample(sources: readonly Source[]): void {
    const present = new Set<string>();
    for (const s of sources) {
      present.add(s.id);
      let trace = this.bySource.get(s.id);
      if (!trace) {
        trace = { stored: [], evicted: [] };
        this.bySource.set(s.id, trace);
      }
      push(trace.stored, s.rate.stored);
      push(trace.evicted, s.rate.evicted);
    }
    for (const id of this.bySource.keys()) {
      if (!present.has(id)) {
        this.bySource.delete(id);
      }
    }
    this.out.value++;
  }

  of(id: string): Trace | undefined {
    return this.bySource.get(id);
  }
}

function push(values: number[], value: number): void {
  values.push(value);
  if (values.length > traceLength) {
    values.shift();
  }
}
