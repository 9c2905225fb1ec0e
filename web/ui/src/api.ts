import type { Explanation, QueryInfo, QueryResult, SourceReport } from "./contract";

/** An answer that is no answer, with what to do in words for people. */
export class ApiError extends Error {
  constructor(
    readonly status: number,
    message: string,
    readonly advice: string,
  ) {
    super(message);
  }
}

const advice: Record<number, string> = {
  400: "Change the field that it names, and run it again.",
  401: "Your session has ended: reload the page to log in again.",
  404: "Choose another query from the list.",
  422: "Narrow the time range, or ask for one model or engine.",
  429: "Too many queries at once: wait a moment and run it again.",
  503: "Check that ClickHouse runs, then run it again. Live screens go on meanwhile.",
};

export async function queries(signal: AbortSignal): Promise<QueryInfo[]> {
  return ((await get("/v1/queries", signal)) as { queries: QueryInfo[] | null }).queries ?? [];
}

export async function query(address: string, signal: AbortSignal): Promise<QueryResult> {
  const result = (await get(address, signal)) as QueryResult;
  return { ...result, rows: result.rows ?? [], columns: result.columns ?? [] };
}

/** What is told of one source beside its live document. */
export async function sourceReport(id: string, signal: AbortSignal): Promise<SourceReport | undefined> {
  const answer = (await get(`/v1/sources?source=${encodeURIComponent(id)}`, signal)) as {
    sources: SourceReport[] | null;
  };
  return answer.sources?.[0];
}

export async function explain(hash: string, since: string, signal: AbortSignal): Promise<Explanation> {
  const range = since === "" ? "" : `?since=${encodeURIComponent(since)}`;
  return (await get(`/v1/explain/${encodeURIComponent(hash)}${range}`, signal)) as Explanation;
}

async function get(address: string, signal: AbortSignal): Promise<unknown> {
  let response: Response;
  try {
    response = await fetch(address, { signal, headers: { Accept: "application/json" } });
  } catch (cause) {
    if (signal.aborted) {
      throw cause;
    }
    throw new ApiError(
      0,
      "The server does not answer.",
      "Check that kvstrata runs and that you reach it, then try again.",
    );
  }
  const text = await response.text();
  let body: unknown;
  try {
    body = JSON.parse(text);
  } catch {
    body = undefined;
  }
  if (!response.ok || body === undefined) {
    const told = (body as { error?: string } | undefined)?.error;
    throw new ApiError(
      response.status,
      told ? sentence(told) : `The server answered ${response.status} ${response.statusText}.`,
      advice[response.status] ?? "Look at the server's log.",
    );
  }
  return body;
}

/** What a server said, as a sentence. */
function sentence(text: string): string {
  const head = text.slice(0, 1).toUpperCase() + text.slice(1);
  return /[.!?]$/.test(head) ? head : `${head}.`;
}
