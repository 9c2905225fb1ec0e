import { useComputed, useSignal } from "@preact/signals";
import { useMemo } from "preact/hooks";
import type { Source } from "../contract";
import { fill, matches, sourceName, states } from "../fleet";
import { count, lag, percent, plural, rate, short, terse } from "../format";
import { second, store } from "../live/live";
import { go } from "../navigation";
import { Empty } from "../parts/empty";
import { Filter } from "../parts/filter";
import { StateBadge } from "../parts/icon";
import { Meter } from "../parts/meter";
import { Sparkline } from "../parts/sparkline";
import { type Order, readOrder, Scroll, SortHead, sorted, writeOrder } from "../parts/table";
import type { Route } from "../route";
import { id } from "../testids";
import { EnginePanel } from "./enginepanel";

type EnginesRoute = Extract<Route, { screen: "engines" }>;

interface ColumnInfo {
  key: string;
  label: string;
  unit?: string;
  numeric: boolean;
  value: (s: Source) => string | number | undefined;
}

const columns: ColumnInfo[] = [
  { key: "state", label: "State", numeric: false, value: (s) => states.indexOf(s.state) },
  { key: "lag", label: "Lag", numeric: true, value: (s) => s.lag_ms },
  { key: "seq", label: "Sequence", numeric: true, value: (s) => (s.started ? s.seq : undefined) },
  { key: "stored", label: "Stored", unit: "/s", numeric: true, value: (s) => s.rate.stored },
  { key: "evicted", label: "Evicted", unit: "/s", numeric: true, value: (s) => s.rate.evicted },
  { key: "loaded", label: "Loaded", unit: "/s", numeric: true, value: (s) => s.rate.loaded },
];

const later: ColumnInfo[] = [
  { key: "resident", label: "Resident", unit: "copies", numeric: true, value: held },
  { key: "fill", label: "Pool", unit: "full", numeric: true, value: fill },
  {
    key: "lost",
    label: "Ledger",
    numeric: true,
    value: (s) => s.ledger.lost + s.ledger.dropped + s.holes + (s.balanced ? 0 : 1e9),
  },
  {
    key: "digest",
    label: "Digest",
    numeric: true,
    value: (s) => s.digest.differed + (s.digest.last === "differed" ? 1e9 : 0),
  },
  { key: "endpoint", label: "Endpoint, dialect", numeric: false, value: (s) => s.endpoint },
];

const name: ColumnInfo = { key: "name", label: "Engine", numeric: false, value: (s) => sourceName(s) };
const fallback: Order = { key: "name", falling: false };

/** One row a source. Rows are read once a second: faster than that nobody reads a table. */
export function EnginesScreen({ route }: { route: EnginesRoute }) {
  const order = readOrder(route.sort, fallback);
  const rows = useRows(route.filter, order);
  const total = store.sourceIds.value.length;
  const sort = (next: Order) => go({ ...route, sort: writeOrder(next) }, "replace");
  const heads = (some: ColumnInfo[]) =>
    some.map((c) => (
      <SortHead
        key={c.key}
        column={c.key}
        label={c.label}
        {...(c.unit ? { unit: c.unit } : {})}
        numeric={c.numeric}
        order={order}
        onSort={sort}
      />
    ));
  return (
    <>
      <div class="screen-head">
        <h1>Engines</h1>
        <Filter
          label="Filter engines"
          value={route.filter}
          placeholder="name, model, state, endpoint …"
          testid={id.engineFilter}
          onChange={(filter) => go({ ...route, filter }, "replace")}
        />
        <p class="note" data-testid={id.engineShown} data-value={rows.list.length}>
          {rows.list.length === total
            ? plural(total, "source")
            : `${count(rows.list.length)} of ${plural(total, "source")}`}
        </p>
      </div>
      {total === 0 ? (
        <Empty title="No engine has been heard yet.">
          <p>
            Tell kvstrata where one publishes: <code>kvstrata run --engine zmq+tcp://HOST:5557,model=MODEL</code>
          </p>
        </Empty>
      ) : rows.list.length === 0 ? (
        <Empty title="No source matches the filter.">
          <p>Each word must be found in its name, model, state, reason, dialect or endpoint.</p>
          <button type="button" class="button" onClick={() => go({ ...route, filter: "" }, "replace")}>
            Clear the filter
          </button>
        </Empty>
      ) : (
        <Scroll label="Engines">
          <table class="grid engines" onPointerEnter={rows.freeze} onPointerLeave={rows.thaw}>
            <thead>
              <tr>
                {heads([name])}
                {heads(columns)}
                <th scope="col">Last minute</th>
                {heads(later)}
              </tr>
            </thead>
            <tbody>
              {rows.list.map((source) => (
                <EngineRow
                  key={source}
                  source={source}
                  selected={source === route.source}
                  onOpen={() => go({ ...route, source })}
                />
              ))}
            </tbody>
          </table>
        </Scroll>
      )}
      {route.source !== "" && <EnginePanel source={route.source} onClose={() => go({ ...route, source: "" })} />}
    </>
  );
}

/** The rows in order. Under the pointer they keep their order, so that a click meets what it aimed at. */
function useRows(filter: string, order: Order) {
  const frozen = useSignal(false);
  const last = useMemo(() => ({ key: "", list: [] as string[] }), []);
  const list = useComputed(() => store.sourceIds.value).value;
  const tick = useComputed(() => (frozen.value ? 0 : second.value)).value;
  const key = `${filter}\n${writeOrder(order)}\n${list.length}`;
  if (tick !== 0 || key !== last.key) {
    const found = filter === "" ? store.peekSources() : store.peekSources().filter((s) => matches(s, filter));
    const column = [name, ...columns, ...later].find((c) => c.key === order.key) ?? name;
    last.key = key;
    last.list = sorted(found, order.falling, column.value, sourceName).map((s) => s.id);
  }
  return {
    list: last.list,
    freeze: () => {
      frozen.value = true;
    },
    thaw: () => {
      frozen.value = false;
    },
  };
}

function EngineRow({ source, selected, onOpen }: { source: string; selected: boolean; onOpen: () => void }) {
  const s = useComputed(() => {
    second.value;
    return store.source(source).peek();
  }).value;
  if (!s) {
    return null;
  }
  const level = fill(s);
  return (
    <tr
      class={selected ? "row selected" : "row"}
      data-testid={id.engineRow}
      data-id={s.id}
      data-state={s.state}
      onClick={onOpen}
    >
      <th scope="row" class="sticky">
        <button type="button" class="name" aria-expanded={selected} data-row={s.id}>
          {sourceName(s)}
        </button>
        <span class="sub clip" title={s.model}>
          {s.model}
        </span>
      </th>
      <td>
        <StateBadge state={s.state} />
        {s.reason && (
          <span class="sub clip" title={s.reason}>
            {s.reason}
          </span>
        )}
      </td>
      <td class="num">{s.lag_ms === undefined ? <Unknown /> : lag(s.lag_ms)}</td>
      <td class="num">
        {s.started ? count(s.seq) : <Unknown />}
        {s.behind > 0 && <span class="sub">{short(s.behind)} behind</span>}
      </td>
      <td class="num">{rate(s.rate.stored)}</td>
      <td class="num">{rate(s.rate.evicted)}</td>
      <td class="num">{rate(s.rate.loaded)}</td>
      <td>
        <Sparkline id={s.id} />
      </td>
      <td class="num">
        {short(held(s))}
        <span class="sub">
          {s.tiers.length === 0 ? "nothing" : s.tiers.map((t) => `${t.tier} ${terse(t.copies)}`).join(" · ")}
        </span>
      </td>
      <td class="num pool">
        {level === undefined ? (
          <span class="soft">not told</span>
        ) : (
          <>
            {percent(level)}
            <Meter share={level} />
          </>
        )}
      </td>
      <td class="num">{ledgerWord(s)}</td>
      <td class="num">
        {s.digest.last === "differed" ? (
          <b class="tone-gone">differs</b>
        ) : s.digest.agreed > 0 ? (
          "agrees"
        ) : (
          <span class="soft">not yet</span>
        )}
        {s.digest.differed > 0 && <span class="sub">{count(s.digest.differed)} differed</span>}
      </td>
      <td>
        <span class="mono clip endpoint" title={s.endpoint}>
          {s.endpoint || <Unknown />}
        </span>
        <span class="sub">{s.dialect}</span>
      </td>
    </tr>
  );
}

function Unknown() {
  return (
    <span class="soft">
      <span aria-hidden="true">–</span>
      <span class="hidden">unknown</span>
    </span>
  );
}

function ledgerWord(s: Source) {
  const { lost, dropped } = s.ledger;
  if (!s.balanced) {
    return <b class="tone-gone">does not add up</b>;
  }
  const parts = [
    s.holes > 0 ? plural(s.holes, "hole") : "",
    lost > 0 ? `${count(lost)} lost` : "",
    dropped > 0 ? `${count(dropped)} dropped` : "",
  ].filter((part) => part !== "");
  return parts.length === 0 ? "adds up" : <span class="tone-stale">{parts.join(", ")}</span>;
}

function held(s: Source): number {
  return s.tiers.reduce((n, t) => n + t.copies, 0);
}
