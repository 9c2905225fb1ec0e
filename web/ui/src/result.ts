import type { Cell, QueryResult } from "./contract";

/** An answer as comma-separated values: times as ISO 8601 in UTC, everything else as it came. */
export function toCsv(result: QueryResult): string {
  const head = result.columns.map((c) => quote(c.unit ? `${c.name} (${c.unit})` : c.name));
  const rows = result.rows.map((row) =>
    result.columns.map((c, i) => {
      const value = row[i] ?? null;
      return c.kind === "time" && typeof value === "number" ? new Date(value).toISOString() : text(value);
    }),
  );
  return `${[head, ...rows].map((r) => r.join(",")).join("\r\n")}\r\n`;
}

/** An answer as it came, but for the SQL's line breaks: JSON for tools. */
export function toJson(result: QueryResult): string {
  return `${JSON.stringify(result, null, 1)}\n`;
}

function text(value: Cell): string {
  if (value === null) {
    return "";
  }
  return typeof value === "string" ? quote(value) : String(value);
}

/** Names come from engines: one that begins like a formula must not become one in a spreadsheet. */
function quote(value: string): string {
  const safe = /^[=+\-@\t\r]/.test(value) ? `'${value}` : value;
  return /[",\r\n']/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
}

export interface Drawing {
  kind: "line" | "bar";
  time: boolean;
  x: string;
  unit: string;
  /** Values of x, rising; of a bar chart of words, the words are in labels. */
  xs: number[];
  labels: string[] | undefined;
  lines: { name: string; unit: string; values: (number | null)[] }[];
}

const mostLines = 6;

/** Units of columns whose kind says it. */
const units: Record<string, string> = { ratio: "%", seconds: "s", bytes: "B" };

/**
 * What an answer's chart draws. Where an x comes more than once, the rows are of several things, told apart by the first
 * column of words: each gets a line of its own, the largest six of them.
 */
export function drawing(result: QueryResult): Drawing | undefined {
  const chart = result.chart;
  if (!chart || (chart.kind !== "line" && chart.kind !== "bar") || !chart.x || !chart.y?.length) {
    return undefined;
  }
  const at = (name: string) => result.columns.findIndex((c) => c.name === name);
  const xAt = at(chart.x);
  const xColumn = result.columns[xAt];
  const yAts = chart.y.map(at).filter((i) => i >= 0);
  if (!xColumn || yAts.length === 0) {
    return undefined;
  }
  const time = xColumn.kind === "time";
  const base = { kind: chart.kind as "line" | "bar", time, x: chart.x, unit: xColumn.unit ?? "" };
  const nameOf = (i: number) => (result.columns[i]?.name ?? "").replaceAll("_", " ");
  const unitOf = (i: number) => result.columns[i]?.unit ?? units[result.columns[i]?.kind ?? ""] ?? "";
  const read = (row: Cell[], i: number) => {
    const value = row[i];
    return typeof value !== "number" ? null : result.columns[i]?.kind === "ratio" ? value * 100 : value;
  };
  if (result.rows.some((row) => typeof row[xAt] !== "number") || (chart.kind === "bar" && !time)) {
    return {
      ...base,
      xs: result.rows.map((_, i) => i),
      labels: result.rows.map((row) => (row[xAt] === null || row[xAt] === undefined ? "unknown" : String(row[xAt]))),
      lines: yAts.map((i) => ({ name: nameOf(i), unit: unitOf(i), values: result.rows.map((row) => read(row, i)) })),
    };
  }
  const xs = [...new Set(result.rows.map((row) => row[xAt] as number))].sort((a, b) => a - b);
  const place = new Map(xs.map((x, i) => [x, i]));
  const wordAt = xs.length < result.rows.length ? result.columns.findIndex((c) => c.kind === "text") : -1;
  const lines = new Map<string, { name: string; unit: string; values: (number | null)[] }>();
  for (const row of result.rows) {
    for (const i of yAts) {
      const word = wordAt < 0 ? "" : String(row[wordAt] ?? "unknown");
      const name = wordAt < 0 ? nameOf(i) : yAts.length > 1 ? `${word} ${nameOf(i)}` : word;
      let line = lines.get(name);
      if (!line) {
        line = { name, unit: unitOf(i), values: xs.map(() => null) };
        lines.set(name, line);
      }
      line.values[place.get(row[xAt] as number) ?? 0] = read(row, i);
    }
  }
  const size = (values: (number | null)[]) => values.reduce<number>((n, v) => n + (v ?? 0), 0);
  const kept = [...lines.values()];
  if (wordAt >= 0) {
    kept.sort((a, b) => size(b.values) - size(a.values));
  }
  return { ...base, xs, labels: undefined, lines: kept.slice(0, mostLines) };
}
