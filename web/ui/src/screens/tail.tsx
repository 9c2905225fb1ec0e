import { useSignal } from "@preact/signals";
import { Component } from "preact";
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { type EventKind, eventKinds, type TailLine } from "../contract";
import { nameOfId } from "../fleet";
import { bytes, clock, count, duration, fixed, short } from "../format";
import { connection, listenToTail } from "../live/live";
import { route as address, go } from "../navigation";
import { useDraft } from "../parts/draft";
import { Empty } from "../parts/empty";
import { Hash } from "../parts/hash";
import { Icon } from "../parts/icon";
import { Scroll } from "../parts/table";
import { complaint } from "../query";
import { enginePath, type Route } from "../route";
import { kept, type TailEntry, TailLog } from "../tail";
import { id } from "../testids";

type TailRoute = Extract<Route, { screen: "tail" }>;

/** Height of a row, as the style sheet has it, and rows drawn beyond each edge. */
const rowHeight = 25;
const spare = 8;

/** Events as they come. The server sends at most 200 lines a second and says how many it left out. */
export function TailScreen({ route }: { route: TailRoute }) {
  const filter = `${route.source}\n${route.kinds.join()}\n${route.hash}`;
  // Another filter is another tail.
  const log = useMemo(() => new TailLog(), [filter]);
  const version = useSignal(0);
  // Filter holds all that matters of the route.
  useEffect(() => {
    const stop = listenToTail((frame) => {
      if (address.peek().paused) {
        log.skip(frame);
      } else {
        log.add(frame);
      }
      version.value++;
    });
    connection.tail({ source: route.source, kinds: route.kinds, hash: route.hash });
    return () => {
      stop();
      connection.tail(null);
    };
  }, [filter]);
  version.value;
  return (
    <>
      <div class="screen-head">
        <h1>Tail</h1>
        <FilterForm route={route} />
        <p class="note tail-count">
          shown <b data-testid={id.tailShown}>{count(log.shown)}</b> of{" "}
          <b data-testid={id.tailMatched}>{count(log.matched)}</b> matched
        </p>
      </div>
      {log.shown < log.matched && !route.paused && (
        <p class="lead">More events match than a page can show: this is a sample. Narrow the filter to see each one.</p>
      )}
      {log.entries.length === 0 ? <Nothing route={route} /> : <Lines fresh={log.entries} />}
    </>
  );
}

/** The list draws the rows in view alone, and stands still while it is scrolled down: lines don't run from who reads them. */
function Lines({ fresh }: { fresh: readonly TailEntry[] }) {
  const box = useRef<HTMLElement>(null);
  const [top, setTop] = useState(0);
  const [held, setHeld] = useState<readonly TailEntry[] | undefined>(undefined);
  const entries = held ?? fresh;
  const scroll = () => {
    const at = box.current?.scrollTop ?? 0;
    setTop(at);
    setHeld((before) => (at > rowHeight ? (before ?? fresh) : undefined));
  };
  const newest = fresh[0]?.n ?? 0;
  const newer = held ? newest - (held[0]?.n ?? newest) : 0;
  const first = Math.max(0, Math.floor(top / rowHeight) - spare);
  const last = Math.min(entries.length, first + Math.ceil((box.current?.clientHeight ?? 900) / rowHeight) + 2 * spare);
  return (
    <div class="tail-wrap">
      <Scroll label={`The last ${kept} events, newest first`} class="tail" box={box} onScroll={scroll}>
        <table class="grid tail-table" aria-rowcount={entries.length + 1}>
          <thead>
            <tr>
              <th scope="col">Received</th>
              <th scope="col">Event</th>
              <th scope="col">Source</th>
              <th scope="col">Tier</th>
              <th scope="col" class="num">
                Blocks
              </th>
              <th scope="col">First block</th>
              <th scope="col">More</th>
              <th scope="col" class="num">
                Sequence
              </th>
            </tr>
          </thead>
          <tbody>
            <Spacer rows={first} />
            {entries.slice(first, last).map((entry) => (
              <TailRow key={entry.n} entry={entry} />
            ))}
            <Spacer rows={entries.length - last} />
          </tbody>
        </table>
      </Scroll>
      {held && (
        <p class="tail-newer">
          Held while you read; {count(newer)} newer.{" "}
          <button type="button" class="button" onClick={() => box.current?.scrollTo({ top: 0 })}>
            <Icon name="up" /> To the newest
          </button>
        </p>
      )}
    </div>
  );
}

function Spacer({ rows }: { rows: number }) {
  return rows > 0 ? (
    <tr>
      <td colSpan={8} style={{ height: `${rows * rowHeight}px` }} />
    </tr>
  ) : null;
}

function Nothing({ route }: { route: TailRoute }) {
  const filtered = route.source !== "" || route.hash !== "" || route.kinds.length > 0;
  if (route.paused) {
    return (
      <Empty title="Paused.">
        <p>Events that pass the filter are counted, not kept. Resume to see the next ones.</p>
      </Empty>
    );
  }
  return (
    <Empty title={filtered ? "No event has matched yet." : "No event has come yet."}>
      <p>
        {filtered
          ? "The tail begins now: what passed before is in History and Explain."
          : "Engines send an event when they store or evict blocks."}
      </p>
      {filtered && (
        <button type="button" class="button" onClick={() => go({ ...route, source: "", kinds: [], hash: "" })}>
          Clear the filter
        </button>
      )}
    </Empty>
  );
}

function FilterForm({ route }: { route: TailRoute }) {
  const source = useDraft(route.source);
  const hash = useDraft(route.hash);
  const problem = complaint("hash", hash.value);
  const submit = (event: Event) => {
    event.preventDefault();
    if (complaint("hash", hash.latest.current) === "") {
      go({ ...route, source: source.latest.current.trim(), hash: hash.latest.current.trim() });
    }
  };
  const toggle = (kind: EventKind) => {
    const kinds = eventKinds.filter((k) => (k === kind) !== route.kinds.includes(k));
    go({ ...route, kinds });
  };
  return (
    <form class="tailform" onSubmit={submit}>
      <input
        class="field mono"
        aria-label="Source: a pattern of instance or model"
        placeholder="prefill-*"
        value={source.value}
        data-filter
        data-testid={id.tailSource}
        spellcheck={false}
        autocomplete="off"
        onInput={(event) => source.set(event.currentTarget.value)}
        onChange={submit}
      />
      <input
        class="field mono"
        aria-label="Hash of a block"
        placeholder="hash"
        value={hash.value}
        data-testid={id.tailHash}
        spellcheck={false}
        autocomplete="off"
        aria-invalid={problem !== ""}
        {...(problem === "" ? {} : { "aria-describedby": "tail-wrong" })}
        onInput={(event) => hash.set(event.currentTarget.value)}
        onChange={submit}
      />
      {/* biome-ignore lint/a11y/useSemanticElements: a fieldset does not lie in a line */}
      <span class="choices" role="group" aria-label="Kinds of events; none chosen: all">
        {eventKinds.map((kind) => (
          <button
            key={kind}
            type="button"
            class="choice-button"
            aria-pressed={route.kinds.includes(kind)}
            data-testid={id.tailKind(kind)}
            onClick={() => toggle(kind)}
          >
            {kind}
          </button>
        ))}
      </span>
      <button type="submit" class="hidden" tabIndex={-1} aria-hidden="true" />
      {problem !== "" && (
        <span class="wrong" id="tail-wrong">
          {problem}
        </span>
      )}
    </form>
  );
}

/** A line never changes, so its row is drawn once. */
class TailRow extends Component<{ entry: TailEntry }> {
  override shouldComponentUpdate(): boolean {
    return false;
  }

  override render({ entry: { line } }: { entry: TailEntry }) {
    const block = line.blocks?.[0];
    const at = Date.parse(line.received ?? line.time ?? "");
    return (
      <tr data-testid={id.tailRow} data-kind={line.kind}>
        <td class="mono nowrap">{Number.isNaN(at) ? "" : clock(at, true)}</td>
        <td>
          {line.kind ? <span class={`op op-${line.kind}`}>{line.kind}</span> : <span class="op">{line.way}</span>}
        </td>
        <td class="clip">
          <a href={enginePath(line.source)}>{nameOfId(line.source)}</a>
        </td>
        <td>{line.tier}</td>
        <td class="num">{line.blocks ? short(line.blocks.length) : ""}</td>
        <td>{block && <Hash hash={block.prefix ?? block.hash} />}</td>
        <td class="clip" title={more(line)}>
          {more(line)}
        </td>
        <td class="num">
          {count(line.seq)}
          {line.last_seq !== undefined && `–${count(line.last_seq)}`}
        </td>
      </tr>
    );
  }
}

function more(line: TailLine): string {
  const block = line.blocks?.[0];
  const parts = [
    line.kind === "CLEARED" && line.cause ? `by ${line.cause}` : "",
    block?.age_s !== undefined ? `after ${duration(block.age_s)}` : "",
    block?.copies_left !== undefined && block.copies_left > 0 ? `${block.copies_left} left` : "",
    line.load
      ? `from ${line.load.from}${line.load.peer ? ` of ${line.load.peer}` : ""}, ${bytes(line.load.bytes)} in ${fixed(line.load.duration_s * 1000, 1)}\u00a0ms`
      : "",
    line.lora_name ? `lora ${line.lora_name}` : "",
    line.way !== "live" ? line.way : "",
    line.reason ?? "",
  ];
  return parts.filter((p) => p !== "").join(", ");
}
