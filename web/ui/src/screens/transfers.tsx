import { useComputed, useSignal } from "@preact/signals";
import { useMemo } from "preact/hooks";
import type { LoadPair, Loads, LoadWay, SlowLoad } from "../contract";
import { nameOfId } from "../fleet";
import { clock, count, decimal, lag, plural, rate, stamp } from "../format";
import { second, serverNow, store } from "../live/live";
import { go } from "../navigation";
import { Chart, type ChartSeries } from "../parts/chart";
import { Empty } from "../parts/empty";
import { Filter } from "../parts/filter";
import { Meter } from "../parts/meter";
import { type Order, readOrder, Scroll, SortHead, sorted, writeOrder } from "../parts/table";
import { enginePath, enginesPath, type Route } from "../route";
import { id } from "../testids";
import { ago, isStore, matches, speedOf, throughput, values, wayKey, window } from "../transfers";

type TransfersRoute = Extract<Route, { screen: "transfers" }>;

const series: ChartSeries[] = [{ name: "loaded", unit: "bytes/s", paint: "loaded", filled: true, solid: true }];

const heads: { key: string; label: string; unit?: string; numeric: boolean }[] = [
  { key: "rate", label: "Throughput", numeric: true },
  { key: "loads", label: "Loads", unit: "/s", numeric: true },
  { key: "blocks", label: "Blocks", unit: "/s", numeric: true },
  { key: "p50", label: "Latency", unit: "p50", numeric: true },
  { key: "p99", label: "Latency", unit: "p99", numeric: true },
  { key: "speed", label: "Speed", unit: "of one load", numeric: true },
  { key: "total", label: "Total", numeric: true },
  { key: "last", label: "Last load", numeric: true },
];

const fallback: Order = { key: "rate", falling: true };

/** Where blocks come from, where they go, and how fast: what the connectors tell of their loads. */
export function TransfersScreen({ route }: { route: TransfersRoute }) {
  const loads = store.loads.value;
  const none = loads === undefined || loads.loads === 0;
  return (
    <>
      <div class="screen-head">
        <h1>Transfers</h1>
        {!none && (
          <>
            <Filter
              label="Filter transfers"
              value={route.filter}
              placeholder="engine, store, tier …"
              testid={id.transferFilter}
              onChange={(filter) => go({ ...route, filter }, "replace")}
            />
            <Since loads={loads} />
          </>
        )}
      </div>
      {none ? (
        <NoLoads told={loads !== undefined} />
      ) : (
        <>
          <Throughput loads={loads} />
          <Pairs loads={loads} route={route} />
          <Slowest loads={loads} filter={route.filter} />
        </>
      )}
    </>
  );
}

function Since({ loads }: { loads: Loads }) {
  const last = loads.last === undefined ? "" : `, the last one ${ago(serverNow.value - loads.last)}`;
  return (
    <p class="note">
      {plural(loads.loads, "load")} of {decimal(loads.bytes, "B")} since the start{last}
    </p>
  );
}

function NoLoads({ told }: { told: boolean }) {
  const connectors = useComputed(() => store.sourceIds.value.filter((s) => s.endsWith(".connector")).length).value;
  if (!told) {
    return (
      <Empty title="The server has not told its loads yet." testid={id.transfersEmpty}>
        <p>They come once a second. If they stay away, the server is older than this page: reload it.</p>
      </Empty>
    );
  }
  return (
    <Empty
      title={connectors > 0 ? "No block has been loaded yet." : "No connector tells of loads."}
      testid={id.transfersEmpty}
    >
      {connectors > 0 ? (
        <p>
          {plural(connectors, "connector is", "connectors are")} heard, but none has brought blocks. One does when a
          request comes whose blocks lie on another engine or in a store: look whether the router hands requests from
          prefill to decode engines, and whether the store is reachable from both.
        </p>
      ) : (
        <p>
          Engines do not report transfers: only a kvstrata connector does. Give prefill and decode engines one, with the
          same transport (<code>tcp</code> between engines, <code>redis</code> or <code>lmcache</code> through a store),
          and let the subscriber hear it.
        </p>
      )}
      <p>
        <code>kvstrata demo --connector tcp</code> shows loads between simulated engines.{" "}
        <a href="/tail?kinds=LOADED">The tail of LOADED events</a> shows the first one when it comes.
      </p>
    </Empty>
  );
}

function Throughput({ loads }: { loads: Loads }) {
  const data = useComputed(() =>
    window(store.loads.value, (second.value + store.skew.value) / 1000, store.meta.value?.started ?? 0),
  );
  const took = loads.latency_ms;
  return (
    <section class="panel" aria-labelledby="throughput-title">
      <div class="panel-head">
        <h2 id="throughput-title">Loaded bytes per second</h2>
        <p class="note">
          fleet, last 5 min; figures: last {loads.window_seconds} s, latency from post to completion of a load
        </p>
      </div>
      <div class="readouts steady">
        <Readout
          word="throughput"
          text={throughput(loads.rate.bytes)}
          exact={loads.rate.bytes}
          testid={id.transfersRate}
        />
        <Readout
          word="loads"
          text={`${rate(loads.rate.loads)}\u00a0/s`}
          exact={loads.rate.loads}
          testid={id.transfersLoads}
        />
        <Readout word="latency, p50" text={took && lag(took.p50)} exact={took?.p50} testid={id.transfersP50} />
        <Readout word="latency, p99" text={took && lag(took.p99)} exact={took?.p99} testid={id.transfersP99} />
        <Readout word="longest" text={took && lag(took.max)} exact={took?.max} />
        <Readout word="speed of one load" text={loads.speed && throughput(loads.speed)} exact={loads.speed} />
      </div>
      <Chart
        label="Bytes loaded per second, last 5 minutes"
        series={series}
        data={data}
        time
        height={200}
        write={throughput}
        testid={id.chartTransfers}
      />
    </section>
  );
}

interface ReadoutProps {
  word: string;
  /** A number and its unit, with a gap between them; absent when it is not known. */
  text: string | number | undefined;
  exact: number | undefined;
  testid?: string;
}

function Readout({ word, text, exact, testid }: ReadoutProps) {
  const [figure, unit] = String(text ?? "").split("\u00a0");
  return (
    <p class="readout">
      <span class={figure ? "figure" : "figure quiet"} data-testid={testid} data-value={exact}>
        {figure ? figure : <Unknown />}
        {unit && <span class="unit">&nbsp;{unit}</span>}
      </span>
      <span class="readout-word">{word}</span>
    </p>
  );
}

function Pairs({ loads, route }: { loads: Loads; route: TransfersRoute }) {
  const order = readOrder(route.sort, fallback);
  const rows = useRows(loads, route.filter, order);
  const most = Math.max(1, ...loads.pairs.map((p) => p.rate.bytes));
  const sort = (next: Order) => go({ ...route, sort: writeOrder(next) }, "replace");
  const known = loads.pairs.length + loads.more;
  return (
    <section class="transfers-part" aria-labelledby="pairs-title">
      <div class="panel-head">
        <h2 id="pairs-title">From where to where</h2>
        <p class="note">
          {rows.list.length === known
            ? plural(known, "pair")
            : `${count(rows.list.length)} of ${plural(known, "pair")}`}
          ; last {loads.window_seconds} s{loads.more > 0 && `; the ${count(loads.pairs.length)} busiest are told`}
          {loads.forgotten > 0 && `; ${count(loads.forgotten)} forgotten for newer ones`}
        </p>
      </div>
      {rows.list.length === 0 ? (
        <Empty title="No pair matches the filter.">
          <button type="button" class="button" onClick={() => go({ ...route, filter: "" }, "replace")}>
            Clear the filter
          </button>
        </Empty>
      ) : (
        <Scroll label="Pairs of where blocks come from and where they go" class="tall">
          <table class="grid transfers" onPointerEnter={rows.freeze} onPointerLeave={rows.thaw}>
            <thead>
              <tr>
                <SortHead column="pair" label="From, to" order={order} onSort={sort} />
                {heads.map((h) => (
                  <SortHead
                    key={h.key}
                    column={h.key}
                    label={h.label}
                    {...(h.unit ? { unit: h.unit } : {})}
                    numeric={h.numeric}
                    order={order}
                    onSort={sort}
                  />
                ))}
              </tr>
            </thead>
            <tbody>
              {rows.list.map((p) => (
                <PairRow key={wayKey(p)} p={p} most={most} />
              ))}
            </tbody>
          </table>
        </Scroll>
      )}
    </section>
  );
}

/** The rows in order. Under the pointer they keep their order, so that a click meets what it aimed at. */
function useRows(loads: Loads, filter: string, order: Order) {
  const frozen = useSignal(false);
  const last = useMemo(() => ({ key: "", order: new Map<string, number>() }), []);
  const key = `${filter}\n${writeOrder(order)}`;
  const found = filter === "" ? loads.pairs : loads.pairs.filter((p) => matches(p, filter));
  const place = (p: LoadPair) => last.order.get(wayKey(p));
  const list =
    frozen.value && key === last.key
      ? sorted(found, false, place, wayKey)
      : sorted(found, order.falling, values[order.key] ?? (() => 0), wayKey);
  last.key = key;
  last.order = new Map(list.map((p, i) => [wayKey(p), i]));
  return {
    list,
    freeze: () => {
      frozen.value = true;
    },
    thaw: () => {
      frozen.value = false;
    },
  };
}

function PairRow({ p, most }: { p: LoadPair; most: number }) {
  const took = p.latency_ms;
  return (
    <tr data-testid={id.transferRow} data-from={p.from} data-to={p.to}>
      <th scope="row" class="sticky">
        <From way={p} />
        <To way={p} />
      </th>
      <td class="num throughput">
        {p.rate.bytes > 0 ? throughput(p.rate.bytes) : <span class="soft">0</span>}
        <Meter share={p.rate.bytes / most} tone="loaded" />
      </td>
      <td class="num">{rate(p.rate.loads)}</td>
      <td class="num">{rate(p.rate.blocks)}</td>
      <td class="num">{took ? lag(took.p50) : <Unknown />}</td>
      <td class="num">
        {took ? lag(took.p99) : <Unknown />}
        {took && <span class="sub">max {lag(took.max)}</span>}
      </td>
      <td class="num">{p.speed ? throughput(p.speed) : <Unknown />}</td>
      <td class="num">
        {decimal(p.bytes, "B")}
        <span class="sub">
          {plural(p.blocks, "block")} in {plural(p.loads, "load")}
        </span>
      </td>
      <td class="num">{p.last === undefined ? <Unknown /> : <Ago at={p.last} />}</td>
    </tr>
  );
}

function From({ way }: { way: LoadWay }) {
  return (
    <span class="way">
      {way.from === "" ? (
        <span class="soft">source not told</span>
      ) : isStore(way.from) ? (
        <span class="clip" title={way.from}>
          {way.from}
        </span>
      ) : (
        <a class="clip" href={enginesPath(way.from)} title={way.from}>
          {way.from}
        </a>
      )}
      <span class="tier-word">{way.from_tier}</span>
    </span>
  );
}

function To({ way }: { way: LoadWay }) {
  const name = nameOfId(way.id).replace(/ \(connector\)$/, "");
  return (
    <span class="way">
      <span class="soft" aria-hidden="true">
        →
      </span>
      <span class="hidden">to</span>
      <a class="clip" href={enginePath(way.id)} title={name}>
        {name}
      </a>
      <span class="tier-word">{way.to_tier}</span>
    </span>
  );
}

function Ago({ at }: { at: number }) {
  return <span title={stamp(at)}>{ago(serverNow.value - at)}</span>;
}

function Slowest({ loads, filter }: { loads: Loads; filter: string }) {
  const shown = loads.slowest.filter((s) => matches(s, filter));
  return (
    <section class="transfers-part" aria-labelledby="slowest-title">
      <div class="panel-head">
        <h2 id="slowest-title">Slowest loads</h2>
        <p class="note">
          {shown.length < loads.slowest.length && `${count(shown.length)} of `}the ten slowest of the last minute
        </p>
      </div>
      {loads.slowest.length === 0 ? (
        <p class="note">No load of the last minute told how long it took.</p>
      ) : shown.length === 0 ? (
        <p class="note">None of them matches the filter.</p>
      ) : (
        <Scroll label="Slowest loads of the last minute">
          <table class="grid slowest">
            <thead>
              <tr>
                <th scope="col" class="num">
                  Took
                </th>
                <th scope="col">From, to</th>
                <th scope="col">Request</th>
                <th scope="col" class="num">
                  Blocks
                </th>
                <th scope="col" class="num">
                  Bytes
                </th>
                <th scope="col" class="num">
                  Speed
                </th>
                <th scope="col" class="num">
                  Ended
                </th>
              </tr>
            </thead>
            <tbody>
              {shown.map((s) => (
                <SlowRow key={`${s.time} ${s.request} ${wayKey(s)} ${s.duration_ms}`} s={s} />
              ))}
            </tbody>
          </table>
        </Scroll>
      )}
    </section>
  );
}

function SlowRow({ s }: { s: SlowLoad }) {
  const speed = speedOf(s);
  return (
    <tr data-testid={id.slowRow}>
      <td class="num">
        <b>{lag(s.duration_ms)}</b>
      </td>
      <td>
        <span class="ways">
          <From way={s} />
          <To way={s} />
        </span>
      </td>
      <td>
        {s.request === "" ? (
          <span class="soft">not told</span>
        ) : (
          <span class="mono clip request" title={s.request}>
            {s.request}
          </span>
        )}
      </td>
      <td class="num">{count(s.blocks)}</td>
      <td class="num">{decimal(s.bytes, "B")}</td>
      <td class="num">{speed === undefined ? <Unknown /> : throughput(speed)}</td>
      <td class="num">{clock(s.time, true)}</td>
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
