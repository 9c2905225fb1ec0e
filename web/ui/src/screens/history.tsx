import { useSignal } from "@preact/signals";
import { useEffect, useState } from "preact/hooks";
import { ApiError, queries, query } from "../api";
import type { QueryInfo, QueryResult } from "../contract";
import { store } from "../live/live";
import { go } from "../navigation";
import { Empty } from "../parts/empty";
import { queryAddress } from "../query";
import type { Route } from "../route";
import { id } from "../testids";
import { QueryForm } from "./queryform";
import { ResultView } from "./resultview";

type HistoryRoute = Extract<Route, { screen: "history" }>;

/** The named queries. The address holds the whole question: opened again, it is asked again. */
export function HistoryScreen({ route }: { route: HistoryRoute }) {
  const [list, setList] = useState<QueryInfo[] | ApiError | undefined>(undefined);
  const again = useSignal(0);
  const meta = store.meta.value;
  useEffect(() => {
    const abort = new AbortController();
    setList(undefined);
    queries(abort.signal).then(setList, (error) => error instanceof ApiError && setList(error));
    return () => abort.abort();
  }, [again.value]);

  if (list instanceof ApiError) {
    const off = meta !== undefined && !meta.roles.includes("history");
    return (
      <>
        <Head />
        <Empty title={off ? "This server keeps no history." : list.message} testid={id.historyError}>
          <p>
            {off ? (
              <>
                Start one with the history role: <code>kvstrata run --roles subscriber,prefix,history,web</code>. The
                live screens need none.
              </>
            ) : (
              list.advice
            )}
          </p>
          <button type="button" class="button" onClick={() => again.value++}>
            Try again
          </button>
        </Empty>
      </>
    );
  }
  if (list === undefined) {
    return (
      <>
        <Head />
        <p class="note">Asking which queries there are …</p>
      </>
    );
  }
  // Without a name it is the first: the page has something to show at once.
  const chosen = route.query === "" ? list[0] : list.find((q) => q.name === route.query);
  return (
    <>
      <Head />
      <div class="history">
        <QueryList list={list} route={route} chosen={chosen} />
        <div class="history-main">
          {chosen ? (
            <Asked key={chosen.name} info={chosen} route={route} />
          ) : (
            <Empty
              title={route.query === "" ? "There are no queries." : `There is no query named ${route.query}.`}
              testid={id.historyEmpty}
            >
              <p>Each answers one question from the stored events, with a chart, a table and its SQL.</p>
            </Empty>
          )}
        </div>
      </div>
    </>
  );
}

function Head() {
  return (
    <div class="screen-head">
      <h1>History</h1>
    </div>
  );
}

/** The queries; the time range and the filters go along to the next one. */
function QueryList({ list, route, chosen }: { list: QueryInfo[]; route: HistoryRoute; chosen: QueryInfo | undefined }) {
  const choose = (name: string) => {
    const params: Record<string, string> = {};
    for (const kept of ["since", "until", "model", "engine"]) {
      if (route.params[kept]) {
        params[kept] = route.params[kept];
      }
    }
    go({ ...route, query: name, params });
  };
  return (
    <nav class="querylist" aria-label="Queries">
      <ul>
        {list.map((q) => (
          <li key={q.name}>
            <button
              type="button"
              class={q === chosen ? "query chosen" : "query"}
              data-testid={id.historyQuery}
              data-name={q.name}
              aria-pressed={q === chosen}
              onClick={() => choose(q.name)}
            >
              <span>{q.title}</span>
              {q.help && <span class="sub">{q.help}</span>}
            </button>
          </li>
        ))}
      </ul>
    </nav>
  );
}

function Asked({ info, route }: { info: QueryInfo; route: HistoryRoute }) {
  const [answer, setAnswer] = useState<QueryResult | ApiError | undefined>(undefined);
  const [busy, setBusy] = useState(true);
  const [run, setRun] = useState(0);
  const address = queryAddress(info, route.params, true);
  const missing = info.params?.find((p) => p.kind === "hash" && !p.default && !route.params[p.name]);
  // Run asks the same question again.
  useEffect(() => {
    if (missing) {
      setBusy(false);
      setAnswer(undefined);
      return;
    }
    const abort = new AbortController();
    setBusy(true);
    query(address, abort.signal)
      .then(setAnswer, (error) => error instanceof ApiError && setAnswer(error))
      .finally(() => {
        if (!abort.signal.aborted) {
          setBusy(false);
        }
      });
    return () => abort.abort();
  }, [address, run]);

  const ask = (params: Record<string, string>) => {
    go({ ...route, query: info.name, params });
    setRun(run + 1);
  };
  return (
    <>
      <QueryForm info={info} params={route.params} busy={busy} onRun={ask} />
      <div class={busy ? "answer busy" : "answer"} aria-busy={busy}>
        {missing && <p class="note">This question is about one block: type its {missing.name} and run it.</p>}
        {!missing && answer === undefined && <p class="note">Asking …</p>}
        {answer instanceof ApiError && (
          <div class="problem" role="alert" data-testid={id.historyError} data-status={answer.status}>
            <p>
              <b>{answer.message}</b>
            </p>
            <p>{answer.advice}</p>
          </div>
        )}
        {answer !== undefined && !(answer instanceof ApiError) && (
          <ResultView result={answer} onSelect={(since, until) => ask({ ...route.params, since, until })} />
        )}
      </div>
    </>
  );
}
