import { useComputed } from "@preact/signals";
import { useState } from "preact/hooks";
import type { QueryInfo } from "../contract";
import { store } from "../live/live";
import { useDraft } from "../parts/draft";
import { complaint, defaultSince, fields, hasRange, instant, ranges, toApiTime, toLocalField } from "../query";
import { id } from "../testids";

interface Props {
  info: QueryInfo;
  params: Record<string, string>;
  busy: boolean;
  onRun: (params: Record<string, string>) => void;
}

/** A form made from what a query says of its parameters. A range asks at once; fields wait for Run. */
export function QueryForm({ info, params, busy, onRun }: Props) {
  const draft = useDraft(params);
  const wrong = fields(info).map((f) => complaint(f.kind, draft.value[f.name] ?? ""));
  const submit = (event: Event) => {
    event.preventDefault();
    const sent = draft.latest.current;
    if (fields(info).every((f) => complaint(f.kind, sent[f.name] ?? "") === "")) {
      onRun(sent);
    }
  };
  return (
    <form class="queryform" aria-label={`Parameters of ${info.title}`} onSubmit={submit}>
      {hasRange(info) && <RangeFields info={info} params={draft.latest.current} onChange={onRun} />}
      <div class="queryfields">
        {fields(info).map((f, i) => {
          const complaintId = `wrong-${f.name}`;
          const problem = wrong[i] ?? "";
          return (
            <label key={f.name} class="labelled" title={f.help}>
              <span class="label">{f.name}</span>
              <input
                type="text"
                class={f.kind === "hash" ? "field mono" : "field"}
                value={draft.value[f.name] ?? ""}
                placeholder={f.default || (f.kind === "text" ? "any" : f.kind)}
                inputMode={f.kind === "number" ? "decimal" : "text"}
                spellcheck={false}
                autocomplete="off"
                {...(f.name === "engine" || f.name === "model" ? { list: `known-${f.name}` } : {})}
                aria-invalid={problem !== ""}
                {...(problem === "" ? {} : { "aria-describedby": complaintId })}
                {...(i === 0 ? { "data-filter": true } : {})}
                onInput={(event) => draft.set({ ...draft.latest.current, [f.name]: event.currentTarget.value })}
              />
              {problem !== "" && (
                <span class="wrong" id={complaintId}>
                  {problem}
                </span>
              )}
            </label>
          );
        })}
        <button type="submit" class="button primary" data-testid={id.historyRun}>
          {busy ? "Running …" : "Run"}
        </button>
      </div>
      <KnownNames />
    </form>
  );
}

function RangeFields({
  info,
  params,
  onChange,
}: {
  info: QueryInfo;
  params: Record<string, string>;
  onChange: (params: Record<string, string>) => void;
}) {
  const since = params.since ?? defaultSince(info);
  const until = params.until ?? "";
  const preset = until === "" && ranges.some(([value]) => value === since);
  const [custom, setCustom] = useState(!preset);
  const choose = (next: { since: string; until: string }) => {
    const { since: _, until: __, ...rest } = params;
    onChange({ ...rest, since: next.since, ...(next.until ? { until: next.until } : {}) });
  };
  return (
    <fieldset class="range">
      <legend class="label">Time range</legend>
      <div class="choices">
        {ranges.map(([value, label]) => (
          <button
            key={value}
            type="button"
            class="choice-button"
            aria-pressed={!custom && since === value && until === ""}
            data-testid={id.range(value)}
            onClick={() => {
              setCustom(false);
              choose({ since: value, until: "" });
            }}
          >
            {label}
          </button>
        ))}
        <button
          type="button"
          class="choice-button"
          aria-pressed={custom || !preset}
          aria-expanded={custom || !preset}
          data-testid={id.range("custom")}
          onClick={() => setCustom(!custom)}
        >
          custom
        </button>
      </div>
      {(custom || !preset) && (
        <div class="custom">
          <label class="labelled">
            <span class="label">from, local time{instant(since) ? "" : ` (now: ${since} back)`}</span>
            <input
              class="field"
              type="datetime-local"
              step="1"
              value={toLocalField(since)}
              onChange={(event) => choose({ since: toApiTime(event.currentTarget.value) || defaultSince(info), until })}
            />
          </label>
          <label class="labelled">
            <span class="label">until{until === "" ? " (now)" : ""}</span>
            <input
              class="field"
              type="datetime-local"
              step="1"
              value={toLocalField(until)}
              onChange={(event) => choose({ since, until: toApiTime(event.currentTarget.value) })}
            />
          </label>
        </div>
      )}
    </fieldset>
  );
}

/** What the fleet is made of now, to choose from; history may know more. */
function KnownNames() {
  const names = useComputed(() => {
    store.sourceIds.value;
    const all = store.peekSources();
    return { engine: [...new Set(all.map((s) => s.instance))], model: [...new Set(all.map((s) => s.model))] };
  }).value;
  return (
    <>
      {(["engine", "model"] as const).map((field) => (
        <datalist key={field} id={`known-${field}`}>
          {names[field].map((n) => (
            <option key={n} value={n} />
          ))}
        </datalist>
      ))}
    </>
  );
}
