import { useComputed } from "@preact/signals";
import type { ComponentChildren } from "preact";
import type { Service, SourceState } from "../contract";
import { sourceName, states } from "../fleet";
import { count, lag, short } from "../format";
import { fleetTrust, store } from "../live/live";
import { ServiceGlyph, StateGlyph } from "../parts/icon";
import { enginePath, enginesPath } from "../route";
import { id } from "../testids";

/** Whether what the page shows can be trusted, in one line of cells. */
export function TrustBar() {
  const sum = fleetTrust.value;
  const services = useComputed(() => store.services()).value;
  const compared = sum.agreed + sum.differed;
  return (
    <section class="trust" aria-label="Trust">
      <div class="trust-cell trust-sources">
        <p class="label">Sources</p>
        <p class="trust-main">
          <span class="figure" data-testid={id.sourcesTotal}>
            {count(sum.sources)}
          </span>
          <StateBar total={sum.sources} by={sum.byState} />
        </p>
        <ul class="trust-states">
          {states
            .filter((s) => s === "live" || sum.byState[s] > 0)
            .map((s) => (
              <li key={s}>
                <a href={enginesPath(s)}>
                  <StateGlyph state={s} size={12} />
                  <b data-testid={id.sourcesIn(s)}>{count(sum.byState[s])}</b> {s}
                </a>
              </li>
            ))}
        </ul>
      </div>
      <Cell
        label="Worst lag"
        alarm={sum.lag !== undefined && sum.lag.ms > 1000}
        note={sum.lag && <a href={enginePath(sum.lag.source.id)}>{sourceName(sum.lag.source)}</a>}
      >
        <span data-testid={id.lagWorst} data-value={sum.lag?.ms}>
          {sum.lag ? lag(sum.lag.ms) : "–"}
        </span>
      </Cell>
      <Cell label="Behind" alarm={sum.behind > 1000} note="sequences to apply">
        <span data-testid={id.behind} data-value={sum.behind}>
          {short(sum.behind)}
        </span>
      </Cell>
      <Cell
        label="Holes"
        alarm={sum.holes > 0}
        note={sum.recovered > 0 ? `open; ${short(sum.recovered)} batches recovered` : "open in sequences"}
      >
        <span data-testid={id.holes} data-value={sum.holes}>
          {short(sum.holes)}
        </span>
      </Cell>
      <Cell
        label="Lost"
        alarm={sum.unhealed.lost > 0}
        note={sum.malformed > 0 ? `batches; ${short(sum.malformed)} malformed` : "batches"}
      >
        <span data-testid={id.lost} data-value={sum.lost}>
          {short(sum.lost)}
        </span>
      </Cell>
      <Cell label="Dropped" alarm={sum.unhealed.dropped > 0} note="batches">
        <span data-testid={id.dropped} data-value={sum.dropped}>
          {short(sum.dropped)}
        </span>
      </Cell>
      <Cell
        label="Digests"
        alarm={sum.differing.length > 0}
        note={compared === 0 ? "not compared yet" : `agreed; ${count(sum.differed)} differed`}
      >
        <span data-testid={id.digestAgreed} data-value={sum.agreed}>
          {short(sum.agreed)}
        </span>
        <span class="hidden" data-testid={id.digestDiffered}>
          {sum.differed}
        </span>
      </Cell>
      <div class="trust-cell trust-services">
        <p class="label">Services</p>
        <ul class="services">
          {services.map((s) => (
            <ServiceLine key={s.name} service={s} />
          ))}
          {services.length === 0 && <li class="soft">not told yet</li>}
        </ul>
      </div>
    </section>
  );
}

interface CellProps {
  label: string;
  alarm: boolean;
  note: ComponentChildren;
  children: ComponentChildren;
}

function Cell({ label, alarm, note, children }: CellProps) {
  return (
    <div class={alarm ? "trust-cell alarm" : "trust-cell"}>
      <p class="label">
        {label}
        {alarm && <StateGlyph state="stale" size={12} />}
      </p>
      <p class="figure">{children}</p>
      <p class="note">{note}</p>
    </div>
  );
}

function StateBar({ total, by }: { total: number; by: Record<SourceState, number> }) {
  return (
    <span class="statebar" aria-hidden="true">
      {states
        .filter((s) => by[s] > 0)
        .map((s) => (
          <span key={s} class={`statebar-part fill-${s}`} style={{ flexGrow: by[s] / total }} />
        ))}
    </span>
  );
}

function ServiceLine({ service }: { service: Service }) {
  const lagging = service.detail?.lag_seconds;
  const title = [service.reason, typeof lagging === "number" ? `${lagging} s behind` : ""].filter((t) => t).join("; ");
  return (
    <li title={title} data-testid={id.service(service.name)} data-state={service.state}>
      <ServiceGlyph state={service.state} />
      <span>{service.name}</span> <b class={service.state === "ok" ? "soft" : ""}>{service.state}</b>
    </li>
  );
}
