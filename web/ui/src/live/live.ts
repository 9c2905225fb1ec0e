import { batch, computed, effect, type ReadonlySignal, signal } from "@preact/signals";
import type { Source, TailFrame } from "../contract";
import { trust } from "../fleet";
import { insights } from "../insight";
import { route } from "../navigation";
import { Connection } from "./connection";
import { Store } from "./store";
import { Traces } from "./traces";

/** The page's one store, fed by its one connection. */
export const store = new Store();

/** Rates of each source over the last minute, for its sparkline. */
export const traces = new Traces();

/** The server process that replaced another while this page was open. */
export const restarted = signal<number | undefined>(undefined);

/** Whether the server wants a login before it serves this page anything more. */
export const lockedOut = signal(false);

/** What the server last said was wrong with what this page sent. */
export const complaint = signal("");

/**
 * Our clock, ten times a second and once a second. It stands while the page is hidden, paused or without a connection: a
 * second of which nothing was heard is not a second in which nothing happened.
 */
export const tenth = signal(Date.now());
export const second = signal(Date.now());

const half = signal(0);

/** All sources, twice a second: faster than that nobody reads a sum. */
export const sources: ReadonlySignal<readonly Source[]> = computed(() => {
  half.value;
  store.sourceIds.value;
  return store.peekSources();
});

/** What the sources say together, and what is wrong with them. */
export const fleetTrust = computed(() => trust(sources.value));
export const fleetInsights = computed(() => insights(sources.value, store.services()));

const stopped = signal<number | undefined>(undefined);

/** When the page was paused; undefined while it follows. */
export const pausedAt: ReadonlySignal<number | undefined> = stopped;

/** The server's clock at our last tick. */
export const serverNow: ReadonlySignal<number> = computed(() => second.value + store.skew.value);

/** Start of the server process that last sent everything. */
let running: number | undefined;

let toTail: (frame: TailFrame) => void = () => {};

export const connection = new Connection(
  {
    state: (frame) => {
      if (frame.full) {
        const meta = frame.set?.meta as { started: number } | undefined;
        const before = running;
        running = meta?.started ?? 0;
        if (before !== undefined && before !== running) {
          restarted.value = running;
        }
      }
      store.apply(frame, Date.now());
      if (document.hidden) {
        // Timers of a hidden page are slowed down to minutes; its title must still tell of trouble.
        beat();
      }
    },
    tail: (frame) => toTail(frame),
    error: (message) => {
      complaint.value = message;
    },
  },
  {
    dial: () => new WebSocket(`${location.protocol === "https:" ? "wss" : "ws"}://${location.host}/v1/live`),
    now: () => Date.now(),
    random: Math.random,
    after: (ms, act) => {
      const timer = setTimeout(act, ms);
      return () => clearTimeout(timer);
    },
  },
);

/** Sends the tail's frames to one listener; returns what ends that. */
export function listenToTail(listener: (frame: TailFrame) => void): () => void {
  toTail = listener;
  return () => {
    toTail = () => {};
  };
}

/** Opens the connection and starts the clocks. */
export function start(): void {
  const paused = computed(() => route.value.paused);
  effect(() => {
    if (paused.value) {
      store.hold();
    } else {
      store.release();
    }
    stopped.value = paused.value ? Date.now() : undefined;
  });
  effect(() => {
    const { phase } = connection.status.value;
    if (phase === "live") {
      lockedOut.value = false;
    } else if (phase === "waiting") {
      void wantsLogin().then((wanted) => {
        lockedOut.value = wanted;
      });
    }
  });
  setInterval(beat, 100);
  setInterval(() => {
    if (follows()) {
      traces.sample(store.peekSources());
    }
  }, 1000);
  const wake = () => {
    if (connection.status.peek().phase === "waiting" && !document.hidden) {
      connection.open();
    }
  };
  addEventListener("online", wake);
  document.addEventListener("visibilitychange", wake);
  connection.open();
}

/** Asks why the socket closed, since a page is not told: a session that has ended is refused by status alone. */
async function wantsLogin(): Promise<boolean> {
  try {
    return (await fetch("/", { method: "HEAD", cache: "no-store", headers: { Accept: "*/*" } })).status === 401;
  } catch {
    return false;
  }
}

/** Publishes what came and moves the clocks: the page is drawn at most ten times a second, however frames come. */
function beat(): void {
  const now = Date.now();
  batch(() => {
    store.flush();
    if (!follows()) {
      return;
    }
    half.value = Math.floor(now / 500);
    if (!document.hidden) {
      tenth.value = now;
      if (Math.floor(now / 1000) !== Math.floor(second.peek() / 1000)) {
        second.value = now;
      }
    }
  });
}

/** Whether the page shows the present. */
function follows(): boolean {
  return !route.peek().paused && connection.status.peek().phase === "live";
}
