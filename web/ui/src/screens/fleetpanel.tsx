import { useComputed } from "@preact/signals";
import type { Source } from "../contract";
import { fill, modelOfId, sourceName } from "../fleet";
import { percent, plural, rate, short } from "../format";
import { second, store } from "../live/live";
import { StateGlyph } from "../parts/icon";
import { Meter } from "../parts/meter";
import { enginePath } from "../route";
import { id } from "../testids";

/** The fleet as a wall of gauges: each source as full as its pool. */
export function FleetPanel() {
  const ids = store.sourceIds.value;
  if (ids.length === 0) {
    return null;
  }
  const models = Map.groupBy(ids, modelOfId);
  return (
    <section class="panel" aria-labelledby="fleet-title">
      <div class="panel-head">
        <h2 id="fleet-title">Fleet</h2>
        <p class="note">copies against the device pool, or copies where it is not told; blocks stored per second</p>
      </div>
      {[...models].map(([model, members]) => (
        <div key={model}>
          {models.size > 1 && (
            <h3 class="fleet-model">
              {model} <span class="note">{plural(members.length, "source")}</span>
            </h3>
          )}
          <ul class="fleet" aria-label={`Sources of ${model}`}>
            {members.map((source) => (
              <FleetCell key={source} source={source} />
            ))}
          </ul>
        </div>
      ))}
    </section>
  );
}

function FleetCell({ source }: { source: string }) {
  // Once a second is as often as a wall of figures can be read.
  const doc = useComputed(() => {
    second.value;
    return store.source(source).peek();
  }).value;
  if (!doc) {
    return null;
  }
  const level = fill(doc);
  const name = sourceName(doc);
  const held = doc.tiers.reduce((n, t) => n + t.copies, 0);
  return (
    <li class={`tank tank-${doc.state}`} data-testid={id.fleetCell} data-id={doc.id}>
      <a href={enginePath(doc.id)} title={`${name}: ${doc.state}${doc.reason ? `, ${doc.reason}` : ""}`}>
        <span class="tank-name">
          <StateGlyph state={doc.state} size={11} />
          <span class="clip">{name}</span>
        </span>
        <span class="tank-line">
          <b>{level === undefined ? short(held) : percent(level)}</b>
          <span>{doc.state === "live" ? flow(doc) : doc.state}</span>
        </span>
        {level === undefined ? <span class="tank-open" /> : <Meter share={level} />}
      </a>
    </li>
  );
}

/** A connector stores little and loads much. */
function flow(s: Source): string {
  return s.origin === "connector" && s.rate.stored === 0
    ? `${rate(s.rate.loaded)}/s loaded`
    : `${rate(s.rate.stored)}/s`;
}
