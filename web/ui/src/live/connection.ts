import { type ReadonlySignal, signal } from "@preact/signals";
import type { StateFrame, TailFilter, TailFrame } from "../contract";
import { backoff } from "./backoff";

/** How long a connection must have lasted before the next loss counts as the first again. */
const settled = 5_000;

export type Status = { phase: "connecting" } | { phase: "live" } | { phase: "waiting"; attempt: number; until: number };

export interface Handlers {
  state: (frame: StateFrame) => void;
  tail: (frame: TailFrame) => void;
  error: (message: string) => void;
}

/** What a connection needs of the world; tests give their own. */
export interface World {
  dial: () => WebSocket;
  now: () => number;
  random: () => number;
  after: (ms: number, act: () => void) => () => void;
}

/**
 * Connection keeps one live socket open: it dials again, later and later, whenever the socket closes, and asks for the tail
 * anew. A close is the only sign of loss: a quiet fleet sends no frames.
 */
export class Connection {
  readonly status: ReadonlySignal<Status>;
  private readonly out = signal<Status>({ phase: "connecting" });
  private socket: WebSocket | undefined;
  private cancel: () => void = () => {};
  private attempt = 0;
  private filter: TailFilter | null = null;

  constructor(
    private readonly handlers: Handlers,
    private readonly world: World,
  ) {
    this.status = this.out;
  }

  /** Dials now, also while waiting; does nothing while a socket is open or opening. */
  open(): void {
    this.cancel();
    if (this.socket) {
      return;
    }
    this.out.value = { phase: "connecting" };
    const socket = this.world.dial();
    this.socket = socket;
    let since = Number.POSITIVE_INFINITY;
    socket.onmessage = (message) => {
      if (since === Number.POSITIVE_INFINITY) {
        since = this.world.now();
        this.out.value = { phase: "live" };
        if (this.filter) {
          this.send(this.filter);
        }
      }
      this.receive(message.data as string);
    };
    socket.onclose = () => {
      this.socket = undefined;
      if (this.world.now() - since >= settled) {
        this.attempt = 0;
      }
      const wait = backoff(this.attempt++, this.world.random);
      this.out.value = { phase: "waiting", attempt: this.attempt, until: this.world.now() + wait };
      this.cancel = this.world.after(wait, () => this.open());
    };
  }

  /** Asks for a tail with this filter, or ends it; it is asked for again after a reconnect. */
  tail(filter: TailFilter | null): void {
    this.filter = filter;
    if (this.out.peek().phase === "live") {
      this.send(filter);
    }
  }

  private send(filter: TailFilter | null): void {
    this.socket?.send(JSON.stringify({ tail: filter }));
  }

  private receive(text: string): void {
    const frame = JSON.parse(text) as Partial<StateFrame> & { tail?: TailFrame; error?: string };
    if (frame.error !== undefined) {
      this.handlers.error(frame.error);
    } else if (frame.tail) {
      this.handlers.tail(frame.tail);
    } else {
      this.handlers.state(frame as StateFrame);
    }
  }
}
