import { useEffect, useMemo, useState } from "preact/hooks";
import { ApiError, explain } from "../api";
import type { ExplainEvent, Explanation } from "../contract";
import { nameOfId } from "../fleet";
import { count, duration, lag, plural, stamp } from "../format";
import { store } from "../live/live";
import { go } from "../navigation";
import { useDraft } from "../parts/draft";
import { Empty } from "../parts/empty";
import { Hash } from "../parts/hash";
import { Scroll } from "../parts/table";
import { Timeline } from "../parts/timeline";
import { complaint } from "../query";
import { enginePath, type Route } from "../route";
import { story } from "../story";
import { id } from "../testids";

type ExplainRoute = Extract<Route, { screen: "explain" }>;

const drawn = 300;

/** The story of one block: where it came from, where it is, where it went and after how long. */
export function ExplainScreen({ route }: { route: ExplainRoute }) {
  const [answer, setAnswer] = useState<Explanation | ApiError | undefined>(undefined);
  const [run, setRun] = useState(0);
  // Run asks the same question again.
  useEffect(() => {
    setAnswer(undefined);
    if (route.hash === "") {
      return;
    }
    const abort = new AbortController();
    explain(route.hash, route.since, abort.signal).then(
      setAnswer,
      (error) => error instanceof ApiError && setAnswer(error),
    );
    return () => abort.abort();
  }, [route.hash, route.since, run]);
  return (
    <>
      <div class="screen-head">
        <h1>Explain</h1>
        <AskForm
          route={route}
          onAsk={(hash) => {
            go({ ...route, hash });
            setRun(run + 1);
          }}
        />
      </div>
      {route.hash === "" && <Examples />}
      {route.hash !== "" && answer === undefined && <p class="note">Looking for {route.hash} …</p>}
      {answer instanceof ApiError && (
        <div class="problem" role="alert" data-testid={id.explainError} data-status={answer.status}>
          <p>
            <b>{answer.message}</b>
          </p>
          <p>{answer.advice}</p>
        </div>
      )}
      {answer !== undefined && !(answer instanceof ApiError) && <Told answer={answer} />}
    </>
  );
}

function AskForm({ route, onAsk }: { route: ExplainRoute; onAsk: (hash: string) => void }) {
  const draft = useDraft(route.hash);
  const problem = complaint("hash", draft.value);
  const submit = (event: Event) => {
    event.preventDefault();
    const text = draft.latest.current;
    const hash = text.trim().replace(/^0x/, "").toLowerCase();
    if (hash !== "" && complaint("hash", text) === "") {
      onAsk(hash);
    }
  };
  return (
    <form class="ask" onSubmit={submit}>
      <input
        class="field mono hashfield"
        aria-label="Hash of a block"
        placeholder="prefix hash or an engine's hash"
        value={draft.value}
        data-filter
        data-testid={id.explainInput}
        spellcheck={false}
        autocomplete="off"
        aria-invalid={problem !== ""}
        {...(problem === "" ? {} : { "aria-describedby": "hash-wrong" })}
        onInput={(event) => draft.set(event.currentTarget.value)}
      />
      <button type="submit" class="button primary">
        Explain
      </button>
      {problem !== "" && (
        <span class="wrong" id="hash-wrong">
          {problem}
        </span>
      )}
    </form>
  );
}

function Examples() {
  const prefixes = store.prefixes.value?.slice(0, 5) ?? [];
  return (
    <Empty title="Which block?">
      <p>
        Give a prefix hash or an engine's own hash: 16 or more hexadecimal digits, as Tail and{" "}
        <code>kvstrata tail</code> show them.
      </p>
      {prefixes.length > 0 && (
        <>
          <p>Or one of the hottest prefixes now:</p>
          <ul class="examples">
            {prefixes.map((p) => (
              <li key={p.prefix}>
                <Hash hash={p.prefix} />{" "}
                <span class="soft">
                  {plural(p.tokens, "token")}, {p.model}
                </span>
              </li>
            ))}
          </ul>
        </>
      )}
    </Empty>
  );
}

function Told({ answer }: { answer: Explanation }) {
  const events = answer.events ?? [];
  const resident = answer.resident ?? [];
  const told = useMemo(() => story(events, Date.now() + store.skew.peek()), [events]);
  if (!answer.found) {
    return (
      <Empty title={`No event names ${answer.hash}.`} testid={id.explainSummary}>
        {answer.summary?.map((line) => (
          <p key={line}>{line}</p>
        ))}
        <p>
          It was never stored while history was kept, or the hash is of another kind: try the one that the engine
          prints, or the prefix hash.
        </p>
      </Empty>
    );
  }
  return (
    <div class="told">
      <section class="panel" aria-label="Summary" data-testid={id.explainSummary}>
        <ul class="summary">
          {answer.summary?.map((line) => (
            <li key={line}>{line}</li>
          ))}
        </ul>
        <Names answer={answer} />
      </section>
      <section class="panel" aria-labelledby="resident-title">
        <div class="panel-head">
          <h2 id="resident-title">Resident now</h2>
          <p class="note">{resident.length === 0 ? "nowhere" : plural(resident.length, "place")}</p>
        </div>
        {resident.length === 0 ? (
          <p class="note">
            No source holds it. The next request that needs it computes it anew, or loads it from a store that tells no
            events.
          </p>
        ) : (
          <ul class="residents">
            {resident.map((r) => (
              <li key={`${r.id}${r.tier}`} data-testid={id.explainResident}>
                <a href={enginePath(r.id)}>{nameOfId(r.id)}</a> <b>{r.tier}</b>
                <span class="soft">
                  {plural(r.copies, "copy", "copies")}
                  {r.since ? `, since ${stamp(r.since)}` : ""}
                </span>
              </li>
            ))}
          </ul>
        )}
      </section>
      <section class="panel wide" aria-labelledby="timeline-title">
        <div class="panel-head">
          <h2 id="timeline-title">Timeline</h2>
          <p class="note">from STORED to EVICTED, on each source and tier</p>
        </div>
        {told.lanes.length === 0 ? <p class="note">No event to draw.</p> : <Timeline story={told} />}
      </section>
      <section class="panel wide" aria-labelledby="events-title">
        <div class="panel-head">
          <h2 id="events-title">Events</h2>
          <p class="note">
            {plural(events.length, "event")}
            {answer.truncated && ", cut off at the limit"}
            {answer.elapsed_ms !== undefined && ` · ${lag(answer.elapsed_ms)}`}
          </p>
        </div>
        <EventTable events={events} />
      </section>
    </div>
  );
}

/** What the block is called: a prefix has one name of ours, and one from each engine. */
function Names({ answer }: { answer: Explanation }) {
  const parent = answer.parent?.engine_hash || answer.parent?.prefix;
  const prefixes = Map.groupBy(answer.names ?? [], (n) => `${n.model ?? ""}\n${n.prefix ?? ""}`);
  return (
    <dl class="names">
      {[...prefixes].map(([key, names]) => {
        const prefix = names[0]?.prefix;
        return (
          <div key={key}>
            <dt>{names[0]?.model || "model unknown"}</dt>
            <dd>
              <span>
                <span class="soft">prefix</span>{" "}
                {prefix ? <Hash hash={prefix} link={prefix !== answer.hash} /> : <span class="soft">not known</span>}
              </span>
              {names.map(
                (n) =>
                  n.engine_hash && (
                    <span key={n.engine_hash}>
                      <span class="soft">engine</span>{" "}
                      <Hash hash={n.engine_hash} link={n.engine_hash !== answer.hash} />
                    </span>
                  ),
              )}
            </dd>
          </div>
        );
      })}
      <div>
        <dt>Parent</dt>
        <dd>
          {parent ? (
            <Hash hash={parent} />
          ) : (
            <span class="soft">none: it begins a prompt, or its parent is not known</span>
          )}
        </dd>
      </div>
    </dl>
  );
}

function EventTable({ events }: { events: ExplainEvent[] }) {
  const falling = useMemo(() => [...events].sort((a, b) => b.time - a.time).slice(0, drawn), [events]);
  return (
    <>
      <Scroll label="Events of the block" class="tall">
        <table class="grid">
          <thead>
            <tr>
              <th scope="col">Time</th>
              <th scope="col">Event</th>
              <th scope="col">Engine</th>
              <th scope="col">Tier</th>
              <th scope="col" class="num">
                Effect <span class="unit">copies</span>
              </th>
              <th scope="col" class="num">
                Left <span class="unit">copies</span>
              </th>
              <th scope="col" class="num">
                Age
              </th>
              <th scope="col" class="num">
                Sequence
              </th>
              <th scope="col">Reason</th>
            </tr>
          </thead>
          <tbody>
            {falling.map((e, i) => (
              <tr key={i} data-testid={id.explainEvent}>
                <td class="nowrap">{stamp(e.time, true)}</td>
                <td>
                  <span class={`op op-${e.op}`}>{e.op}</span>
                </td>
                <td>
                  <a href={enginePath(e.id)}>{nameOfId(e.id)}</a>
                </td>
                <td>
                  {e.tier}
                  {e.group !== undefined && e.group > 0 && <span class="soft"> group {e.group}</span>}
                </td>
                <td class="num">
                  {e.effect === undefined ? "" : e.effect > 0 ? `+${e.effect}` : e.effect < 0 ? `−${-e.effect}` : "0"}
                </td>
                <td class="num">{typeof e.copies === "number" && e.copies >= 0 ? count(e.copies) : ""}</td>
                <td class="num">{e.age === undefined || e.age === null || e.age < 0 ? "" : duration(e.age)}</td>
                <td class="num" title={e.epoch ? `epoch ${e.epoch}` : ""}>
                  {e.seq === undefined ? "" : count(e.seq)}
                </td>
                <td>{e.reason && <span class="prose">{e.reason}</span>}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </Scroll>
      {events.length > drawn && (
        <p class="note">
          The last {count(drawn)} of {plural(events.length, "event")}.
        </p>
      )}
    </>
  );
}
