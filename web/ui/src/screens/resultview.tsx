import { useMemo } from "preact/hooks";
import type { Cell, Column, QueryResult } from "../contract";
import { bytes, count, duration, fixed, lag, percent, plural, stamp, unknown } from "../format";
import { download } from "../parts/clipboard";
import { Empty } from "../parts/empty";
import { CopyButton, Hash } from "../parts/hash";
import { Icon } from "../parts/icon";
import { Scroll } from "../parts/table";
import { toCsv, toJson } from "../result";
import { id } from "../testids";
import { ResultChart } from "./resultchart";

/** Rows drawn at first; more on demand, so that a long answer does not stop the page. */
const drawn = 200;

interface Props {
  result: QueryResult;
  onSelect: (since: string, until: string) => void;
}

export function ResultView({ result, onSelect }: Props) {
  const file = useMemo(
    () => `kvstrata-${result.query}-${new Date(result.until).toISOString().slice(0, 19).replaceAll(":", "")}`,
    [result],
  );
  return (
    <section class="result" aria-label={`Answer: ${result.title}`}>
      <div class="panel-head">
        <h2>{result.title}</h2>
        <p class="note">
          {stamp(result.since)} to {stamp(result.until)} · <b data-testid={id.historyExactness}>{result.exactness}</b> ·{" "}
          {plural(result.rows.length, "row")}
          {result.truncated && ", cut off at the limit"}
          {result.elapsed_ms !== undefined && ` · ${lag(result.elapsed_ms)}`}
        </p>
      </div>
      {result.notes?.map((note) => (
        <p key={note} class="lead">
          {note}
        </p>
      ))}
      {result.rows.length === 0 ? (
        <Empty title="Nothing happened in this range." testid={id.historyEmpty}>
          <p>Choose a longer range, or fewer conditions. History begins when the history role first ran.</p>
        </Empty>
      ) : (
        <>
          <ResultChart result={result} onSelect={onSelect} />
          <div class="actions">
            <button
              type="button"
              class="button"
              data-testid={id.historyCsv}
              onClick={() => download(`${file}.csv`, "text/csv", toCsv(result))}
            >
              <Icon name="save" /> CSV
            </button>
            <button
              type="button"
              class="button"
              data-testid={id.historyJson}
              onClick={() => download(`${file}.json`, "application/json", toJson(result))}
            >
              <Icon name="save" /> JSON
            </button>
            {result.sql && <CopyButton text={result.sql} what="SQL" label="Copy SQL" />}
          </div>
          <ResultTable result={result} />
        </>
      )}
      {result.sql && (
        <details class="sql" data-testid={id.historySql}>
          <summary>SQL</summary>
          {/* biome-ignore lint/a11y/noNoninteractiveTabindex: what scrolls must be reachable with keys */}
          <pre tabIndex={0}>{result.sql}</pre>
        </details>
      )}
    </section>
  );
}

function ResultTable({ result }: { result: QueryResult }) {
  const rows = result.rows.slice(0, drawn);
  return (
    <>
      <Scroll label={`Rows of ${result.title}`} class="tall">
        <table class="grid">
          <thead>
            <tr>
              {result.columns.map((c) => (
                <th key={c.name} scope="col" class={numeric(c) ? "num" : ""}>
                  {c.name.replaceAll("_", " ")}
                  {c.unit && c.kind === "number" && <span class="unit"> {c.unit}</span>}
                </th>
              ))}
            </tr>
          </thead>
          <tbody>
            {rows.map((row, i) => (
              <tr key={i} data-testid={id.historyRow}>
                {result.columns.map((c, j) => (
                  <td key={c.name} class={numeric(c) ? "num" : ""}>
                    <CellText column={c} value={row[j] ?? null} />
                  </td>
                ))}
              </tr>
            ))}
          </tbody>
        </table>
      </Scroll>
      {result.rows.length > drawn && (
        <p class="note">
          The first {count(drawn)} of {plural(result.rows.length, "row")}; the files hold them all.
        </p>
      )}
    </>
  );
}

function numeric(c: Column): boolean {
  return c.kind === "number" || c.kind === "seconds" || c.kind === "bytes" || c.kind === "ratio";
}

function CellText({ column, value }: { column: Column; value: Cell }) {
  if (value === null) {
    return (
      <span class="soft">
        <span aria-hidden="true">{unknown}</span>
        <span class="hidden">unknown</span>
      </span>
    );
  }
  if (column.kind === "hash") {
    return value === "" ? null : <Hash hash={String(value)} />;
  }
  if (typeof value !== "number") {
    return <span class="prose">{String(value)}</span>;
  }
  switch (column.kind) {
    case "time":
      return <span class="nowrap">{stamp(value, value % 1000 !== 0)}</span>;
    case "seconds":
      return <span title={`${value} s`}>{duration(value)}</span>;
    case "bytes":
      // The unit may be a rate, B/s; the cell has a unit of its own, MiB.
      return (
        <span title={`${count(value)} ${column.unit || "B"}`}>
          {bytes(value)}
          {column.unit?.startsWith("B/") && column.unit.slice(1)}
        </span>
      );
    case "ratio":
      return <span title={String(value)}>{percent(value)}</span>;
    default:
      return <>{Number.isInteger(value) ? count(value) : fixed(value, Math.abs(value) < 10 ? 2 : 1)}</>;
  }
}
