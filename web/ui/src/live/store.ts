import { batch, type ReadonlySignal, type Signal, signal } from "@preact/signals";
import type { Flow, Hits, Loads, Meta, Prefix, Service, Source, StateFrame } from "../contract";

const pointPrefix = "point/";

/** prefill-2 before prefill-10. */
const natural = new Intl.Collator("en", { numeric: true });

/**
 * Store holds what the live socket told: one signal a document, so that a frame wakes only what shows the documents it
 * changed. Frames are merged as they come and published by flush, so that the page's clock alone says when it is drawn.
 * While held, nothing is published: a paused page resumes with the present.
 */
export class Store {
  readonly meta: ReadonlySignal<Meta | undefined>;
  readonly hits: ReadonlySignal<Hits | undefined>;
  readonly prefixes: ReadonlySignal<readonly Prefix[] | undefined>;
  readonly loads: ReadonlySignal<Loads | undefined>;
  readonly sourceIds: ReadonlySignal<readonly string[]>;
  readonly serviceNames: ReadonlySignal<readonly string[]>;
  /** The server's clock minus ours, in milliseconds. */
  readonly skew: ReadonlySignal<number>;
  /** Whether a full frame has come since the page opened. */
  readonly filled: ReadonlySignal<boolean>;

  private readonly metaOut = signal<Meta | undefined>(undefined);
  private readonly hitsOut = signal<Hits | undefined>(undefined);
  private readonly prefixesOut = signal<readonly Prefix[] | undefined>(undefined);
  private readonly ids = signal<readonly string[]>([]);
  private readonly names = signal<readonly string[]>([]);
  private readonly skewOut = signal(0);
  private readonly filledOut = signal(false);

  private readonly state = new Map<string, unknown>();
  private readonly dirty = new Set<string>();
  private readonly docs = new Map<string, Signal<unknown>>();
  private readonly seconds = new Map<number, Flow>();
  private held = false;

  constructor() {
    this.meta = this.metaOut;
    this.hits = this.hitsOut;
    this.prefixes = this.prefixesOut;
    this.loads = this.doc("loads") as ReadonlySignal<Loads | undefined>;
    this.sourceIds = this.ids;
    this.serviceNames = this.names;
    this.skew = this.skewOut;
    this.filled = this.filledOut;
  }

  /** Merges a frame; clock is our time of its arrival. A full frame is published at once. */
  apply(frame: StateFrame, clock: number): void {
    if (frame.full) {
      for (const key of this.state.keys()) {
        this.dirty.add(key);
      }
      this.state.clear();
    }
    for (const key of frame.del ?? []) {
      this.state.delete(key);
      this.dirty.add(key);
    }
    for (const [key, doc] of Object.entries(frame.set ?? {})) {
      this.state.set(key, doc);
      this.dirty.add(key);
    }
    // A clock that jitters by milliseconds would wake every age on the page.
    if (Math.abs(frame.now - clock - this.skewOut.peek()) > 250) {
      this.skewOut.value = frame.now - clock;
    }
    if (frame.full) {
      batch(() => {
        this.flush();
        this.filledOut.value = true;
      });
    }
  }

  /** Publishes what was merged since the last time, unless held. A page that was opened paused still gets its first state. */
  flush(): void {
    if (this.dirty.size > 0 && (!this.held || !this.filledOut.peek())) {
      batch(() => this.publish());
    }
  }

  hold(): void {
    this.held = true;
  }

  release(): void {
    this.held = false;
    this.flush();
  }

  source(id: string): ReadonlySignal<Source | undefined> {
    return this.doc(`source/${id}`) as ReadonlySignal<Source | undefined>;
  }

  service(name: string): ReadonlySignal<Service | undefined> {
    return this.doc(`service/${name}`) as ReadonlySignal<Service | undefined>;
  }

  /** All sources as of now, without subscribing to their documents. */
  peekSources(): Source[] {
    return this.ids.peek().flatMap((id) => this.source(id).peek() ?? []);
  }

  services(): Service[] {
    return this.names.value.map((name) => this.service(name).value).filter((s) => s !== undefined);
  }

  /** Blocks of the fleet by Unix second; seconds without events are absent. No signal: read it at a tick of the clock. */
  points(): ReadonlyMap<number, Flow> {
    return this.seconds;
  }

  private doc(key: string): Signal<unknown> {
    let doc = this.docs.get(key);
    if (!doc) {
      doc = signal<unknown>(undefined);
      this.docs.set(key, doc);
    }
    return doc;
  }

  private publish(): void {
    let sources = false;
    let services = false;
    for (const key of this.dirty) {
      const value = this.state.get(key);
      if (key.startsWith(pointPrefix)) {
        const second = Number(key.slice(pointPrefix.length));
        if (value === undefined) {
          this.seconds.delete(second);
        } else {
          this.seconds.set(second, value as Flow);
        }
      } else if (key === "meta") {
        this.metaOut.value = value as Meta | undefined;
      } else if (key === "hits") {
        this.hitsOut.value = value as Hits | undefined;
      } else if (key === "prefixes") {
        this.prefixesOut.value = (value as { rows: Prefix[] | null } | undefined)?.rows ?? (value ? [] : undefined);
      } else {
        const doc = this.doc(key);
        const appeared = (doc.peek() === undefined) !== (value === undefined);
        sources ||= appeared && key.startsWith("source/");
        services ||= appeared && key.startsWith("service/");
        doc.value = value;
      }
    }
    this.dirty.clear();
    if (sources) {
      this.ids.value = this.keys("source/");
    }
    if (services) {
      this.names.value = this.keys("service/");
    }
  }

  private keys(prefix: string): string[] {
    return [...this.state.keys()]
      .filter((key) => key.startsWith(prefix))
      .map((key) => key.slice(prefix.length))
      .sort(natural.compare);
  }
}
