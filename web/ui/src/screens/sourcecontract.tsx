import { useEffect, useState } from "preact/hooks";
import { sourceReport } from "../api";
import type { Source, SourceReport } from "../contract";
import { count } from "../format";
import { id } from "../testids";
import { Field, Group } from "./enginepanel";

const everyMs = 5000;

/** What the source's stream was seen to be, and what breaks its contract: asked for while the panel is open. */
export function SourceContract({ s }: { s: Source }) {
  const [report, setReport] = useState<SourceReport>();
  const [failure, setFailure] = useState("");
  useEffect(() => {
    const abort = new AbortController();
    let timer: ReturnType<typeof setTimeout>;
    const ask = async () => {
      try {
        setReport(await sourceReport(s.id, abort.signal));
        setFailure("");
      } catch (cause) {
        if (!abort.signal.aborted) {
          setFailure(cause instanceof Error ? cause.message : "The server does not answer.");
        }
      }
      if (!abort.signal.aborted) {
        timer = setTimeout(ask, everyMs);
      }
    };
    void ask();
    return () => {
      abort.abort();
      clearTimeout(timer);
    };
  }, [s.id]);
  if (!report) {
    return (
      <Group title="Contract">
        <p class={failure ? "note tone-stale" : "note"}>{failure || "Asking the index…"}</p>
      </Group>
    );
  }
  const c = report.contract;
  const holes = report.ledger.holes ?? [];
  return (
    <Group title="Contract">
      <div data-testid={id.contract}>
        <Field name="dialect" value={s.dialect || "not told"} more={c?.forms?.join(", ") ?? ""} />
        <Field name="block hashes" value={words(c?.hashes)} more={checked(c?.check)} />
        <Field name="media" value={words(c?.media)} />
        {(report.groups ?? []).map((g) => (
          <Field
            key={g.group}
            name={`cache group ${Math.max(g.group, 0)}`}
            value={`${count(g.block_size)} tokens a block`}
            more={[g.spec_kind, g.sliding_window && `window ${count(g.sliding_window)}`, g.eagle && "EAGLE"]
              .filter(Boolean)
              .join(", ")}
          />
        ))}
        {c?.fields && (
          <details>
            <summary>{count(c.fields.length)} fields seen</summary>
            <p class="mono wrap">{c.fields.join(" ")}</p>
          </details>
        )}
        {(report.oddities ?? []).map((o) => (
          <p key={o.name} class="note" data-testid={id.contractOdd} data-name={o.name}>
            <strong>{o.name}</strong>, {count(o.count)} times{o.example ? `; the first: ${o.example}` : ""}
          </p>
        ))}
        {!report.oddities?.length && <p class="note">Nothing breaks it.</p>}
        {holes.map((h) => (
          <p key={h.first} class="note">
            Lost {count(h.first)} to {count(h.last)}: {h.reason}
          </p>
        ))}
        {(report.past_lives ?? []).map((life) => (
          <p key={life.epoch} class="note">
            An earlier life, {life.epoch}: {count(life.ledger.first)} to {count(life.ledger.last)},{" "}
            {count(life.ledger.lost)} lost{life.tail_unknown ? "; what it sent after that is unknown" : ""}
          </p>
        ))}
        {failure && <p class="note tone-stale">{failure}</p>}
      </div>
    </Group>
  );
}

function words(list: string[] | undefined): string {
  return list?.length ? list.join(", ") : "none seen";
}

type Check = NonNullable<NonNullable<SourceReport["contract"]>["check"]>;

/** What recomputing block hashes has found. */
export function checked(check: Check | undefined): string {
  if (!check) {
    return "not compared yet";
  }
  if (check.verdict === "verified") {
    return `verified: ${check.scheme}, seed ${check.seed}`;
  }
  return check.reason || "not compared yet";
}
