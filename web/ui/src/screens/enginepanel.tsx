import { useComputed } from "@preact/signals";
import type { ComponentChildren } from "preact";
import { useEffect, useRef } from "preact/hooks";
import type { Source } from "../contract";
import { fill, nameOfId, sourceName } from "../fleet";
import { count, duration, lag, percent, rate, stamp } from "../format";
import { second, serverNow, store } from "../live/live";
import { CopyButton } from "../parts/hash";
import { Icon, StateBadge } from "../parts/icon";
import { Meter } from "../parts/meter";
import { id } from "../testids";
import { SourceContract } from "./sourcecontract";

/** Every field of one source. */
export function EnginePanel({ source, onClose }: { source: string; onClose: () => void }) {
  const title = useRef<HTMLHeadingElement>(null);
  const s = useComputed(() => {
    second.value;
    store.sourceIds.value;
    return store.source(source).peek();
  }).value;
  // Another source takes the focus anew.
  useEffect(() => {
    title.current?.focus({ preventScroll: true });
  }, [source]);
  useEffect(() => {
    const press = (event: KeyboardEvent) => {
      if (
        event.key === "Escape" &&
        !event.defaultPrevented &&
        !(event.target as HTMLElement).matches("input, dialog *")
      ) {
        close();
      }
    };
    addEventListener("keydown", press);
    return () => removeEventListener("keydown", press);
  });
  const close = () => {
    onClose();
    document.querySelector<HTMLElement>(`[data-row="${CSS.escape(source)}"]`)?.focus();
  };
  return (
    <aside class="drawer" aria-labelledby="engine-title" data-testid={id.engineDetail} data-id={source}>
      <div class="drawer-head">
        <h2 id="engine-title" ref={title} tabIndex={-1}>
          {s ? sourceName(s) : nameOfId(source)}
        </h2>
        <button type="button" class="tool" aria-label="Close the panel" title="Close (Esc)" onClick={close}>
          <Icon name="close" />
        </button>
      </div>
      {s ? (
        <Detail s={s} />
      ) : (
        <p class="note">
          No source has this identity now. It may have been withdrawn, or the address is of another fleet.
        </p>
      )}
    </aside>
  );
}

function Detail({ s }: { s: Source }) {
  const level = fill(s);
  return (
    <div class="drawer-body">
      <p class="drawer-state">
        <StateBadge state={s.state} /> {s.reason && <span>{s.reason}</span>}
      </p>
      <Group title="Flow">
        <Field name="stored" value={`${rate(s.rate.stored)} blocks/s`} more={`${count(s.stored)} blocks`} />
        <Field name="evicted" value={`${rate(s.rate.evicted)} blocks/s`} more={`${count(s.evicted)} blocks`} />
        <Field name="loaded" value={`${rate(s.rate.loaded)} blocks/s`} more={`${count(s.loaded)} blocks`} />
        <p class="note">Rates: the last 5 s. Blocks: since this process began to read.</p>
      </Group>
      <Group title="Resident">
        {s.tiers.map((t) => (
          <Field key={t.tier} name={t.tier} value={`${count(t.copies)} copies`} more={`${count(t.blocks)} blocks`} />
        ))}
        {s.tiers.length === 0 && <p class="note">Nothing is resident.</p>}
        <Field
          name="device pool"
          value={s.pool > 0 ? `${count(s.pool)} blocks` : "not told"}
          more={level === undefined ? "" : `${percent(level)} full`}
        />
        {level !== undefined && <Meter share={level} />}
        <Field name="block size" value={`${count(s.block_size)} tokens`} more={`copies ${s.copies || "unknown"}`} />
      </Group>
      <Group title="Stream">
        <Field
          name="sequence"
          value={s.started ? count(s.seq) : "no batch yet"}
          more={s.behind > 0 ? `${count(s.behind)} behind` : "up to date"}
        />
        <Field name="lag" value={s.lag_ms === undefined ? "no event yet" : lag(s.lag_ms)} more="reception to index" />
        <LastEvent at={s.last_event} />
        <Field name="epoch" value={<span class="mono">{s.epoch}</span>} more={epochStart(s.epoch)} />
        <Field
          name="digests"
          value={`${count(s.digest.agreed)} agreed`}
          more={`${count(s.digest.differed)} differed; last ${s.digest.last}`}
        />
      </Group>
      <LedgerSum s={s} />
      <SourceContract s={s} />
      <Group title="Identity">
        <Field name="model" value={s.model} />
        <Field name="instance" value={s.instance} />
        <Field name="cluster" value={s.cluster} />
        <Field name="rank, origin" value={`${s.dp_rank}, ${s.origin}`} />
        <Field name="endpoint" value={<span class="mono">{s.endpoint || "not told"}</span>} />
        <Field
          name="id"
          value={
            <span class="mono wrap">
              {s.id} <CopyButton text={s.id} what="id" />
            </span>
          }
        />
      </Group>
    </div>
  );
}

function LastEvent({ at }: { at: number | undefined }) {
  const now = serverNow.value;
  return (
    <Field
      name="last event"
      value={at ? `${duration((now - at) / 1000)} ago` : "none yet"}
      more={at ? stamp(at) : ""}
    />
  );
}

/** The rule that every sequence number is accounted for, as the sum that it is. */
function LedgerSum({ s }: { s: Source }) {
  const l = s.ledger;
  const terms: [string, number][] = [
    ["live", l.live],
    ["recovered", l.recovered],
    ["held", l.held],
    ["asked", l.asked],
    ["lost", l.lost],
  ];
  const sum = terms.reduce((n, [, v]) => n + v, 0);
  const span = s.started || sum > 0 ? l.last - l.first + 1 : 0;
  return (
    <Group title="Ledger">
      <table class="sum" data-testid={id.ledgerSum} data-balanced={s.balanced}>
        <caption class="hidden">Sequences of this life</caption>
        <tbody>
          {terms.map(([name, v], i) => (
            <tr key={name} class={name === "lost" && v > 0 ? "tone-stale" : ""}>
              <td aria-hidden="true">{i === 0 ? "" : "+"}</td>
              <th scope="row">{name}</th>
              <td class="num">{count(v)}</td>
            </tr>
          ))}
          <tr class="sum-total">
            <td aria-hidden="true">=</td>
            <th scope="row">
              last − first + 1{" "}
              <span class="unit">
                ({count(l.last)} − {count(l.first)} + 1)
              </span>
            </th>
            <td class="num">{count(span)}</td>
          </tr>
        </tbody>
      </table>
      <p class={s.balanced ? "verdict" : "verdict tone-gone"}>
        {s.balanced ? "It adds up" : "It does not add up"}
        {s.holes > 0 ? `; ${count(s.holes)} holes open.` : "; no hole open."}
      </p>
      <p class="note">
        Received: {count(l.live + l.recovered + l.held + l.asked + l.duplicates + l.malformed)} batches, with{" "}
        {count(l.duplicates)} duplicates and {count(l.malformed)} malformed. Dropped by the publisher:{" "}
        {count(l.dropped)}.
      </p>
    </Group>
  );
}

export function Group({ title, children }: { title: string; children: ComponentChildren }) {
  return (
    <section class="group">
      <h3>{title}</h3>
      {children}
    </section>
  );
}

export function Field({ name, value, more }: { name: string; value: ComponentChildren; more?: string }) {
  return (
    <dl class="pair">
      <dt>{name}</dt>
      <dd>
        <span>{value}</span>
        {more && <span class="soft">{more}</span>}
      </dd>
    </dl>
  );
}

/** Epochs grow at least with Unix milliseconds, so most tell when the life began. */
function epochStart(epoch: number): string {
  return epoch > 1e12 && epoch < 1e13 ? `since ${stamp(epoch)}` : "";
}
