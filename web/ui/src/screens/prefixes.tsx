import { useComputed } from "@preact/signals";
import type { Owner, Prefix } from "../contract";
import { nameOfId } from "../fleet";
import { count, duration, fixed, plural, short, stamp } from "../format";
import { serverNow, store } from "../live/live";
import { go } from "../navigation";
import { Empty } from "../parts/empty";
import { Filter } from "../parts/filter";
import { Hash } from "../parts/hash";
import { Meter } from "../parts/meter";
import { type Order, readOrder, Scroll, SortHead, sorted, writeOrder } from "../parts/table";
import { enginePath, type Route } from "../route";
import { id } from "../testids";

type PrefixesRoute = Extract<Route, { screen: "prefixes" }>;

const values: Record<string, (p: Prefix) => string | number> = {
  continued: (p) => p.continued,
  model: (p) => p.model,
  tokens: (p) => p.tokens,
  resident: (p) => p.resident_tokens,
  copies: (p) => p.copies,
  owners: (p) => p.owners.length,
  age: (p) => -p.first,
  last: (p) => p.last,
};

const heads: { key: string; label: string; unit?: string; numeric: boolean }[] = [
  { key: "continued", label: "Continued", unit: "runs", numeric: true },
  { key: "tokens", label: "Length", unit: "tokens", numeric: true },
  { key: "resident", label: "Resident", unit: "tokens", numeric: true },
  { key: "copies", label: "Copies", numeric: true },
  { key: "owners", label: "Owners", numeric: true },
  { key: "age", label: "Age", numeric: true },
  { key: "last", label: "Continued last", numeric: true },
  { key: "model", label: "Model", numeric: false },
];

const fallback: Order = { key: "continued", falling: true };
const namedOwners = 2;

/** The prefixes that most stored runs continued: what the fleet shares. */
export function PrefixesScreen({ route }: { route: PrefixesRoute }) {
  const all = store.prefixes.value;
  const order = readOrder(route.sort, fallback);
  const words = route.filter.toLowerCase().split(/\s+/);
  const found = (all ?? []).filter((p) => {
    const text = [p.prefix, p.model, ...(p.owners ?? []).map((o) => nameOfId(o.id))].join("\n").toLowerCase();
    return words.every((w) => text.includes(w));
  });
  const rows = sorted(found, order.falling, values[order.key] ?? (() => 0), (p) => p.prefix);
  const most = Math.max(1, ...(all ?? []).map((p) => p.continued));
  return (
    <>
      <div class="screen-head">
        <h1>Prefixes</h1>
        <Filter
          label="Filter prefixes"
          value={route.filter}
          placeholder="hash, model, engine …"
          testid={id.prefixFilter}
          onChange={(filter) => go({ ...route, filter }, "replace")}
        />
        <p class="note">
          {rows.length === (all?.length ?? 0)
            ? plural(rows.length, "prefix", "prefixes")
            : `${count(rows.length)} of ${count(all?.length ?? 0)} prefixes`}
        </p>
      </div>
      <p class="lead">
        The prefixes that most newly stored runs continued. Engines report no hits: a request whose blocks were all
        cached leaves no trace here, so <em>continued</em> is a floor for how often a prefix is used. It fades with a
        half-life of five minutes. Owners: a cell a source, full where it lies in GPU memory, a ring where it lies in a
        colder tier.
      </p>
      {all === undefined ? (
        <Empty title="The index has not told its prefixes yet.">
          <p>They come once a second with the prefix role; look at Pulse whether that service is ok.</p>
        </Empty>
      ) : all.length === 0 ? (
        <Empty title="No prefix was continued yet.">
          <p>The list fills when two requests share their first blocks and the second one stores more.</p>
        </Empty>
      ) : rows.length === 0 ? (
        <Empty title="No prefix matches the filter.">
          <button type="button" class="button" onClick={() => go({ ...route, filter: "" }, "replace")}>
            Clear the filter
          </button>
        </Empty>
      ) : (
        <Scroll label="Hottest prefixes">
          <table class="grid prefixes">
            <thead>
              <tr>
                <th scope="col" class="sticky">
                  Prefix
                </th>
                {heads.map((h) => (
                  <SortHead
                    key={h.key}
                    column={h.key}
                    label={h.label}
                    {...(h.unit ? { unit: h.unit } : {})}
                    numeric={h.numeric}
                    order={order}
                    onSort={(next) => go({ ...route, sort: writeOrder(next) }, "replace")}
                  />
                ))}
              </tr>
            </thead>
            <tbody>
              {rows.map((p) => (
                <PrefixRow key={`${p.model}/${p.block_size}/${p.prefix}`} p={p} most={most} />
              ))}
            </tbody>
          </table>
        </Scroll>
      )}
    </>
  );
}

function PrefixRow({ p, most }: { p: Prefix; most: number }) {
  const owners = p.owners ?? [];
  return (
    <tr data-testid={id.prefixRow} data-prefix={p.prefix}>
      <th scope="row" class="sticky">
        <Hash hash={p.prefix} />
      </th>
      <td class="num continued">
        {p.continued < 100 && !Number.isInteger(p.continued) ? fixed(p.continued, 1) : short(p.continued)}
        <Meter share={p.continued / most} tone="accent" />
      </td>
      <td class="num">
        {count(p.tokens)}
        <span class="sub">
          {plural(p.blocks, "block")} of {p.block_size}
        </span>
      </td>
      <td class="num">{short(p.resident_tokens)}</td>
      <td class="num">{count(p.copies)}</td>
      <td class="num owners">
        <OwnerStrip owners={owners} />
        <span class="sub">
          {owners.length === 0 && "nobody now"}
          {owners.slice(0, namedOwners).map((o, i) => (
            <>
              {i > 0 && ", "}
              <a href={enginePath(o.id)} title={`${plural(o.copies, "copy", "copies")} in ${o.tier}`}>
                {nameOfId(o.id)}
              </a>
            </>
          ))}
          {owners.length > namedOwners && ` +${owners.length - namedOwners}`}
        </span>
      </td>
      <td class="num">
        <Age since={p.first} />
      </td>
      <td class="num">
        <Age since={p.last} ago />
      </td>
      <td>
        <span class="clip model" title={p.model}>
          {p.model}
        </span>
      </td>
    </tr>
  );
}

function Age({ since, ago = false }: { since: number; ago?: boolean }) {
  const now = serverNow.value;
  if (!since) {
    return <span class="soft">unknown</span>;
  }
  return (
    <span title={stamp(since)}>
      {duration((now - since) / 1000)}
      {ago && " ago"}
    </span>
  );
}

/** A cell's width, and what a strip takes at most. */
const cellWidth = 5;
const stripWidth = 240;

/** Who of the fleet holds a prefix: a cell a source, in the fleet's order. Warm tiers are drawn full, colder ones as rings. */
function OwnerStrip({ owners }: { owners: readonly Owner[] }) {
  const ids = useComputed(() => store.sourceIds.value).value;
  const cell = Math.min(cellWidth, stripWidth / ids.length);
  const held = new Map(owners.map((o) => [o.id, o]));
  const words = owners.map((o) => `${nameOfId(o.id)} ${o.tier} ×${o.copies}`).join(", ");
  return (
    <span class="strip" title={words}>
      <b>{count(owners.length)}</b>
      <svg width={ids.length * cell} height={12} role="img" aria-label={words || "no owner"}>
        {ids.map((source, i) => {
          const o = held.get(source);
          const kind = o === undefined ? "none" : o.tier === "GPU" ? "warm" : "cold";
          return (
            <rect
              key={source}
              class={`strip-${kind}`}
              x={i * cell + 0.5}
              y={1.5}
              width={Math.max(1, cell - 1.5)}
              height={9}
              rx={1}
            />
          );
        })}
      </svg>
    </span>
  );
}
