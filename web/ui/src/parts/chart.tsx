import { effect, type ReadonlySignal, signal } from "@preact/signals";
import { useEffect, useMemo, useRef } from "preact/hooks";
import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";
import { clock, short, stamp } from "../format";
import { paletteKey } from "../theme";
import { announce } from "./announcer";
import { colour, dashes, type Paint } from "./palette";

export interface ChartSeries {
  name: string;
  unit: string;
  paint: Paint;
  /** Drawn downwards from zero: what leaves, under what comes. */
  mirrored?: boolean;
  filled?: boolean;
  bars?: boolean;
  /** Drawn without dashes: it is alone. */
  solid?: boolean;
}

export interface ChartData {
  /** Seconds where x is time. */
  x: number[];
  ys: (number | null)[][];
  /** The range shown; of the data where absent. */
  min?: number;
  max?: number;
}

interface Props {
  label: string;
  series: readonly ChartSeries[];
  data: ReadonlySignal<ChartData>;
  time: boolean;
  /** The name of x, where it is not time. */
  x?: string;
  height: number;
  testid: string;
  /** Writes a value of y with its unit; without it, units stand with the names. */
  write?: (n: number) => string;
  /** Called with a range of x that was drawn with the pointer. */
  onSelect?: (min: number, max: number) => void;
}

/**
 * A chart for eyes, keys and ears: arrow keys move its cursor and a live region says what is there, and a hidden table holds
 * a digest of the data.
 */
export function Chart({ label, series, data, time, x, height, testid, write, onSelect }: Props) {
  const box = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | undefined>(undefined);
  const at = useMemo(() => signal<{ index: number; left: number } | undefined>(undefined), []);
  const select = useRef(onSelect);
  select.current = onSelect;

  // Series and time are fixed for a mounted chart.
  useEffect(() => {
    const host = box.current;
    if (!host) {
      return;
    }
    const u = new uPlot(options(series, time, height, host.clientWidth || 600, select, at, write), [[]], host);
    plot.current = u;
    const stopData = effect(() => show(u, series, data.value));
    const stopTheme = effect(() => {
      paletteKey();
      u.redraw(false, true);
    });
    const resized = new ResizeObserver(() => u.setSize({ width: host.clientWidth, height }));
    resized.observe(host);
    document.fonts?.ready.then(() => u.redraw(false, true));
    return () => {
      stopData();
      stopTheme();
      resized.disconnect();
      u.destroy();
    };
  }, [data]);

  const move = (event: KeyboardEvent) => {
    const u = plot.current;
    const { x: xs } = data.peek();
    if (!u || xs.length === 0) {
      return;
    }
    const from = at.peek()?.index ?? xs.length - 1;
    const step = event.shiftKey ? 10 : 1;
    const target = { ArrowLeft: from - step, ArrowRight: from + step, Home: 0, End: xs.length - 1 }[event.key];
    if (target !== undefined) {
      event.preventDefault();
      const index = Math.min(xs.length - 1, Math.max(0, target));
      u.setCursor({ left: u.valToPos(xs[index] ?? 0, "x"), top: u.bbox.height / 2 / devicePixelRatio });
      announce(sentence(series, data.peek(), index, time, x, write));
    } else if (event.key === "Escape" && at.peek()) {
      event.stopPropagation();
      u.setCursor({ left: -10, top: -10 });
    }
  };

  return (
    <figure class="chart" data-testid={testid}>
      <div
        class="chart-frame"
        role="application"
        aria-roledescription="chart"
        aria-label={`${label}. Arrow keys move the cursor.`}
        // biome-ignore lint/a11y/noNoninteractiveTabindex: its cursor moves with the arrow keys
        tabIndex={0}
        onKeyDown={move}
        onBlur={() => plot.current?.setCursor({ left: -10, top: -10 })}
      >
        <div ref={box} class="chart-box" />
        <Tip at={at} data={data} series={series} time={time} x={x} write={write} />
      </div>
      <DataTable label={label} data={data} series={series} time={time} x={x} write={write} />
    </figure>
  );
}

export function Legend({ series }: { series: readonly ChartSeries[] }) {
  return (
    <ul class="legend">
      {series.map((s) => (
        <li key={s.name}>
          <Swatch paint={s.paint} />
          {s.name}
          {s.unit && <span class="unit"> {s.unit}</span>}
        </li>
      ))}
    </ul>
  );
}

/** A stroke as the chart draws it: colour and dashes. */
export function Swatch({ paint }: { paint: Paint }) {
  return (
    <svg class={`swatch ink-${paint}`} width="22" height="8" viewBox="0 0 22 8" aria-hidden="true" focusable="false">
      <path d="M1 4h20" stroke-dasharray={dashes[paint].join(" ")} />
    </svg>
  );
}

interface Shared {
  data: ReadonlySignal<ChartData>;
  series: readonly ChartSeries[];
  time: boolean;
  x: string | undefined;
  write: Props["write"];
}

function Tip({
  at,
  data,
  series,
  time,
  x,
  write,
}: Shared & { at: ReadonlySignal<{ index: number; left: number } | undefined> }) {
  const cursor = at.value;
  if (!cursor) {
    return null;
  }
  const { x: xs, ys } = data.value;
  const right = cursor.left > 160;
  return (
    <div class={right ? "tip left" : "tip"} style={{ left: `${cursor.left}px` }} aria-hidden="true">
      <p class="tip-head">{place(xs[cursor.index] ?? 0, time, x)}</p>
      {series.map((s, i) => (
        <p key={s.name} class="tip-row">
          <Swatch paint={s.paint} />
          <span>{s.name}</span>
          <b>{value(ys[i]?.[cursor.index], write)}</b>
        </p>
      ))}
    </div>
  );
}

const tableRows = 30;

/** The data in at most 30 rows of means. It changes every five seconds, so that reading it is possible. */
function DataTable({ label, data, series, time, x, write }: Shared & { label: string }) {
  const digest = useMemo(() => signal(data.peek()), [data]);
  useEffect(() => {
    digest.value = data.peek();
    const timer = setInterval(() => {
      digest.value = data.peek();
    }, 5000);
    return () => clearInterval(timer);
  }, [data, digest]);
  const { x: xs, ys } = digest.value;
  const step = Math.max(1, Math.ceil(xs.length / tableRows));
  const starts = xs.map((_, i) => i).filter((i) => i % step === 0);
  return (
    <div class="hidden">
      <table>
        <caption>
          {label}
          {step > 1 && `; each row is the mean of ${step} points`}
        </caption>
        <thead>
          <tr>
            <th scope="col">{time ? "time" : (x ?? "x")}</th>
            {series.map((s) => (
              <th key={s.name} scope="col">
                {s.name} {write ? "" : s.unit}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          {starts.map((start) => (
            <tr key={start}>
              <th scope="row">{place(xs[start] ?? 0, time, undefined)}</th>
              {series.map((s, i) => (
                <td key={s.name}>{value(mean(ys[i]?.slice(start, start + step) ?? []), write)}</td>
              ))}
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

function options(
  series: readonly ChartSeries[],
  time: boolean,
  height: number,
  width: number,
  select: { current: Props["onSelect"] },
  at: { value: { index: number; left: number } | undefined },
  write: Props["write"],
): uPlot.Options {
  const font = "11px 'Plex Sans', sans-serif";
  const grid = { stroke: () => colour("grid"), width: 1 };
  const bars = uPlot.paths.bars?.({ size: [0.7, 40], align: 0 });
  return {
    width,
    height,
    legend: { show: false },
    padding: [8, 28, 0, 0],
    cursor: {
      y: false,
      points: { size: 7, width: 1.5 },
      drag: { x: select.current !== undefined, y: false, setScale: false },
    },
    hooks: {
      setCursor: [
        (u) => {
          const { idx, left } = u.cursor;
          const inside = idx !== null && idx !== undefined && left !== undefined && left >= 0;
          at.value = inside ? { index: idx, left: left + u.bbox.left / devicePixelRatio } : undefined;
        },
      ],
      setSelect: [
        (u) => {
          if (u.select.width > 4) {
            select.current?.(u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x"));
          }
          u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
        },
      ],
    },
    scales: {
      x: { time, range: (_, min, max) => (min === max ? [min - 1, max + 1] : [min, max]) },
      y: { range: (_, min, max) => reach(series, min, max) },
    },
    axes: [
      {
        font,
        stroke: () => colour("ink3"),
        grid: { show: false },
        ticks: { ...grid, size: 4 },
        size: 26,
        space: time ? 76 : 60,
        gap: 4,
        ...(time ? { values: timeLabels } : { values: (_: uPlot, marks: number[]) => marks.map(short) }),
      },
      {
        font,
        stroke: () => colour("ink3"),
        grid,
        ticks: { show: false },
        size: (_, marks) => 14 + 6.2 * Math.max(1, ...(marks ?? []).map((m) => m.length)),
        gap: 6,
        space: 32,
        values: (_, marks) => marks.map((m) => value(Math.abs(m), write)),
      },
    ],
    series: [
      {},
      ...series.map(
        (s): uPlot.Series => ({
          label: s.name,
          stroke: () => colour(s.paint),
          width: s.bars ? 0 : 1.6,
          points: { show: false },
          ...(s.bars || s.solid || dashes[s.paint].length === 0 ? {} : { dash: [...dashes[s.paint]] }),
          ...(s.bars ? { fill: () => colour(s.paint) } : s.filled ? { fill: () => `${colour(s.paint)}2e` } : {}),
          ...(s.bars && bars ? { paths: bars } : {}),
        }),
      ),
    ],
  };
}

function show(u: uPlot, series: readonly ChartSeries[], data: ChartData): void {
  const drawn = data.ys.map((ys, i) => (series[i]?.mirrored ? ys.map((y) => (y === null ? null : -y)) : ys));
  u.setData([data.x, ...drawn], false);
  const min = data.min ?? data.x[0] ?? 0;
  const max = data.max ?? data.x.at(-1) ?? 1;
  u.batch(() => u.setScale("x", { min, max }));
}

/** The range of y: it holds zero, has some air, and is never empty. */
function reach(series: readonly ChartSeries[], min: number | null, max: number | null): [number, number] {
  const mirrored = series.some((s) => s.mirrored);
  // A flow that stands still is drawn as a flat line, not as a wild one on a tiny scale.
  const top = Math.max(max ?? 0, mirrored ? 10 : 0) * 1.08;
  const bottom = Math.min(min ?? 0, mirrored ? -10 : 0) * 1.08;
  return top === bottom ? [0, 1] : [bottom, top];
}

function timeLabels(_: uPlot, marks: number[], __: number, ___: number, step: number): string[] {
  let day = "";
  return marks.map((mark) => {
    const text = stamp(mark * 1000);
    const fresh = text.slice(0, 10) !== day;
    day = text.slice(0, 10);
    if (step >= 86400) {
      return text.slice(5, 10);
    }
    const hour = step < 60 ? text.slice(11) : text.slice(11, 16);
    return fresh && step >= 3600 ? `${text.slice(5, 10)} ${hour}` : hour;
  });
}

function place(x: number, time: boolean, name: string | undefined): string {
  if (time) {
    const ms = x * 1000;
    return Math.abs(Date.now() - ms) < 43_200_000 ? clock(ms) : stamp(ms);
  }
  return name ? `${name} ${value(x)}` : value(x);
}

function sentence(
  series: readonly ChartSeries[],
  data: ChartData,
  index: number,
  time: boolean,
  x: string | undefined,
  write: Props["write"],
): string {
  const parts = series.map((s, i) => `${s.name} ${value(data.ys[i]?.[index], write)} ${write ? "" : s.unit}`.trim());
  return `${place(data.x[index] ?? 0, time, x)}: ${parts.join(", ")}`;
}

function value(n: number | null | undefined, write?: (n: number) => string): string {
  if (n === null || n === undefined) {
    return "unknown";
  }
  if (write) {
    return write(n);
  }
  return Math.abs(n) < 10 && !Number.isInteger(n) ? n.toPrecision(2) : short(n);
}

function mean(values: readonly (number | null)[]): number | null {
  const known = values.filter((v) => v !== null);
  return known.length === 0 ? null : known.reduce((a, b) => a + b, 0) / known.length;
}
