import { useState } from "preact/hooks";
import { count } from "../format";
import { fleetInsights, fleetTrust } from "../live/live";
import { StateGlyph, WeightGlyph } from "../parts/icon";
import { id } from "../testids";

const shownAtFirst = 4;

/** What is wrong, in sentences; when nothing is, one sentence that says why that can be believed. */
export function InsightList() {
  const all = fleetInsights.value;
  const [more, setMore] = useState(false);
  if (all.length === 0) {
    return <AllWell />;
  }
  const shown = more ? all : all.slice(0, shownAtFirst);
  return (
    <section class="insights" aria-label="Insights">
      <ul>
        {shown.map((insight) => (
          <li
            key={insight.id}
            class={`insight insight-${insight.weight}`}
            data-testid={id.insight}
            data-weight={insight.weight}
            data-id={insight.id}
          >
            <WeightGlyph weight={insight.weight} />
            <p>
              <span class="hidden">{insight.weight}: </span>
              {insight.text} <span class="advice">{insight.advice}</span>{" "}
              {insight.link && <a href={insight.link.href}>{insight.link.text}</a>}
            </p>
          </li>
        ))}
        {all.length > shownAtFirst && (
          <li class="more">
            <button type="button" class="link" aria-expanded={more} onClick={() => setMore(!more)}>
              {more ? "Show fewer" : `Show ${count(all.length - shownAtFirst)} more`}
            </button>
          </li>
        )}
      </ul>
    </section>
  );
}

function AllWell() {
  const sum = fleetTrust.value;
  return (
    <p class="allwell">
      <StateGlyph state="live" /> Every sequence is accounted for: {count(sum.sources)} sources live, no hole open,
      nothing lost or dropped, {sum.agreed > 0 ? "and every digest agrees." : "and no digest compared yet."}
    </p>
  );
}
