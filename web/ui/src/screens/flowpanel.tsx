import { signal, useComputed } from "@preact/signals";
import { rates } from "../fleet";
import { rate } from "../format";
import { second, store, tenth } from "../live/live";
import { Chart, type ChartData, type ChartSeries, Swatch } from "../parts/chart";
import type { Paint } from "../parts/palette";
import { id } from "../testids";

const span = 300;

const series: ChartSeries[] = [
  { name: "stored", unit: "blocks/s", paint: "stored", filled: true },
  { name: "evicted", unit: "blocks/s", paint: "evicted", mirrored: true, filled: true },
  { name: "loaded", unit: "blocks/s", paint: "loaded" },
];

const calm = matchMedia("(prefers-reduced-motion: reduce)");
const stepwise = signal(calm.matches);
calm.addEventListener("change", () => {
  stepwise.value = calm.matches;
});

/** Blocks that come and go, second by second, for five minutes. */
export function FlowPanel() {
  // A point of the drawing is about a third of a second wide: to draw it more often would move nothing.
  const ticks = useComputed(() => (stepwise.value ? second.value : Math.floor(tenth.value / 300) * 300));
  const data = useComputed(() => {
    store.filled.value;
    return window((ticks.value + store.skew.value) / 1000);
  });
  const quiet = useComputed(() => {
    second.value;
    return store.points().size === 0;
  });
  return (
    <section class="panel flow" aria-labelledby="flow-title">
      <div class="panel-head">
        <h2 id="flow-title">Blocks per second</h2>
        <p class="note">fleet, last 5 min, evicted drawn below zero; figures: mean of the last 5 s</p>
      </div>
      <div class="readouts">
        <Readout kind="stored" word="stored" />
        <Readout kind="evicted" word="evicted" />
        <Readout kind="loaded" word="loaded" />
      </div>
      <div class="chart-wrap">
        <Chart
          label="Blocks stored, evicted and loaded per second, last 300 seconds"
          series={series}
          data={data}
          time
          height={288}
          testid={id.chartFlow}
        />
        {quiet.value && <p class="quiet-note">No block moved in the last 5 minutes.</p>}
      </div>
    </section>
  );
}

function Readout({ kind, word }: { kind: "stored" | "evicted" | "loaded"; word: string }) {
  const now = useComputed(() => {
    store.filled.value;
    return rates(store.points(), (tenth.value + store.skew.value) / 1000)[kind];
  });
  const text = useComputed(() => rate(now.value));
  const exact = useComputed(() => now.value.toFixed(2));
  const paint: Paint = kind;
  return (
    <p class="readout">
      <span class="figure" data-testid={id.rate(kind)} data-value={exact}>
        {text}
      </span>
      <span class="readout-word">
        <Swatch paint={paint} /> {word} <span class="unit">blocks/s</span>
      </span>
    </p>
  );
}

/** The last 300 whole seconds before now; the present second is not over, so it is not drawn. */
function window(now: number): ChartData {
  const points = store.points();
  const last = Math.floor(now) - 1;
  // Of the seconds before this server began nothing is known; a zero would be a claim.
  const began = Math.ceil((store.meta.peek()?.started ?? 0) / 1000);
  const x: number[] = [];
  const stored: (number | null)[] = [];
  const evicted: (number | null)[] = [];
  const loaded: (number | null)[] = [];
  for (let s = last - span; s <= last; s++) {
    const p = points.get(s);
    x.push(s);
    const nothing = s < began ? null : 0;
    stored.push(p?.stored ?? nothing);
    evicted.push(p?.evicted ?? nothing);
    loaded.push(p?.loaded ?? nothing);
  }
  return { x, ys: [stored, evicted, loaded], min: now - span, max: now - 1 };
}
