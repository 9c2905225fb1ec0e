import { signal } from "@preact/signals";
import { useMemo } from "preact/hooks";
import type { QueryResult } from "../contract";
import { fixed, short } from "../format";
import { Chart, type ChartSeries, Legend } from "../parts/chart";
import { type Paint, paints } from "../parts/palette";
import { type Drawing, drawing } from "../result";
import { id } from "../testids";

const barsDrawn = 24;

/** An answer as a chart, as the query says it is best drawn. */
export function ResultChart({
  result,
  onSelect,
}: {
  result: QueryResult;
  onSelect: (since: string, until: string) => void;
}) {
  const drawn = useMemo(() => drawing(result), [result]);
  if (!drawn) {
    return null;
  }
  return drawn.labels ? (
    <Bars title={result.title} drawn={drawn} labels={drawn.labels} />
  ) : (
    <Lines key={`${result.since}-${result.until}`} title={result.title} drawn={drawn} onSelect={onSelect} />
  );
}

function Lines({
  title,
  drawn,
  onSelect,
}: {
  title: string;
  drawn: Drawing;
  onSelect: (since: string, until: string) => void;
}) {
  const series = useMemo<ChartSeries[]>(() => {
    const own = paintsOf(drawn.lines);
    return drawn.lines.map((line, i) => ({
      name: line.name,
      unit: line.unit,
      paint: own[i] ?? "stored",
      filled: drawn.lines.length === 1,
      bars: drawn.kind === "bar",
    }));
  }, [drawn]);
  const data = useMemo(
    () => signal({ x: drawn.time ? drawn.xs.map((x) => x / 1000) : drawn.xs, ys: drawn.lines.map((l) => l.values) }),
    [drawn],
  );
  const iso = (seconds: number) => new Date(Math.round(seconds) * 1000).toISOString().replace(".000Z", "Z");
  return (
    <>
      <Legend series={series} />
      <Chart
        key={drawn.lines.map((l) => l.name).join()}
        label={title}
        series={series}
        data={data}
        time={drawn.time}
        x={`${drawn.x} ${drawn.unit}`.trim()}
        height={260}
        testid={id.historyChart}
        {...(drawn.time ? { onSelect: (min: number, max: number) => onSelect(iso(min), iso(max)) } : {})}
      />
      {drawn.time && <p class="note">Draw over the chart to narrow the range.</p>}
    </>
  );
}

/** A bar a row; the table below says the same in numbers. */
function Bars({ title, drawn, labels }: { title: string; drawn: Drawing; labels: string[] }) {
  const most = Math.max(...drawn.lines.flatMap((l) => l.values.map((v) => Math.abs(v ?? 0)))) || 1;
  const own = paintsOf(drawn.lines);
  return (
    <figure class="bars" data-testid={id.historyChart} aria-label={`${title}, as bars`}>
      {drawn.lines.length > 1 && (
        <Legend series={drawn.lines.map((l, i) => ({ name: l.name, unit: l.unit, paint: own[i] ?? "stored" }))} />
      )}
      <ul>
        {labels.slice(0, barsDrawn).map((label, row) => (
          <li key={row}>
            <span class="bars-label clip" title={label}>
              {label}
            </span>
            <span class="bars-lines">
              {drawn.lines.map((line, i) => {
                const v = line.values[row] ?? null;
                return (
                  <span key={line.name} class="bars-line">
                    <span
                      class={`bars-bar paint-${own[i]}`}
                      style={{ width: `${((Math.abs(v ?? 0) / most) * 100).toFixed(2)}%` }}
                      aria-hidden="true"
                    />
                    <span>
                      {v === null ? "unknown" : Number.isInteger(v) ? short(v) : fixed(v, 2)}{" "}
                      <span class="unit">{line.unit}</span>
                    </span>
                  </span>
                );
              })}
            </span>
          </li>
        ))}
      </ul>
      {labels.length > barsDrawn && <p class="note">The first {barsDrawn} rows; all are in the table.</p>}
    </figure>
  );
}

/** What is stored is blue everywhere, wherever it stands among the lines; the others take the paints that are left. */
function paintsOf(lines: readonly { name: string }[]): Paint[] {
  const own = lines.map((l) => paints.find((p) => p === l.name));
  const left = paints.filter((p) => !own.includes(p));
  return own.map((p) => p ?? left.shift() ?? "stored");
}
