import type { QueryInfo, QueryParam } from "./contract";

/** The ranges that one click chooses; anything else is custom. */
export const ranges: readonly [value: string, label: string][] = [
  ["5m", "5 min"],
  ["15m", "15 min"],
  ["1h", "1 h"],
  ["6h", "6 h"],
  ["24h", "24 h"],
];

const common: readonly QueryParam[] = [
  { name: "model", kind: "text", help: "only this model" },
  { name: "engine", kind: "text", help: "only this instance" },
  { name: "limit", kind: "number", help: "at most so many rows" },
];

/** The fields of a query's form but for the time range: its own, then those that every query takes. */
export function fields(info: QueryInfo): QueryParam[] {
  const own = (info.params ?? []).filter((p) => p.name !== "since" && p.name !== "until");
  return [...own, ...common.filter((c) => !own.some((p) => p.name === c.name))];
}

/** Whether a query is about a stretch of time; others ask for what they need among their fields. */
export function hasRange(info: QueryInfo): boolean {
  return info.params?.some((p) => p.name === "since") ?? true;
}

/** The range that holds where the address says nothing. */
export function defaultSince(info: QueryInfo): string {
  return info.params?.find((p) => p.name === "since")?.default || "1h";
}

/** What the form sends: nothing that is empty, since where there is a range, the fields that the query knows. */
export function queryAddress(info: QueryInfo, params: Record<string, string>, sql: boolean): string {
  const q = new URLSearchParams();
  if (hasRange(info)) {
    q.set("since", params.since || defaultSince(info));
    if (params.until) {
      q.set("until", params.until);
    }
  }
  for (const field of fields(info)) {
    const value = params[field.name]?.trim();
    if (value) {
      q.set(field.name, value);
    }
  }
  if (sql) {
    q.set("sql", "1");
  }
  const asked = q.toString();
  return `/v1/query/${encodeURIComponent(info.name)}${asked === "" ? "" : `?${asked}`}`;
}

/** Why a value can't be sent, in words that say what to type; empty when it can. */
export function complaint(kind: string, value: string): string {
  const text = value.trim();
  if (text === "") {
    return "";
  }
  switch (kind) {
    case "number":
      return /^-?\d+(\.\d+)?$/.test(text) ? "" : "want a number, as 50";
    case "duration":
      return /^(\d+(\.\d+)?(ms|s|m|h|d))+$/.test(text) || /^\d{4}-\d\d-\d\dT[\d:.]+(Z|[+-]\d\d:\d\d)$/.test(text)
        ? ""
        : "want a duration, as 90s, 15m or 6h, or a time, as 2026-11-29T12:00:00Z";
    case "hash":
      return /^(0x)?([0-9a-fA-F]{2})+$/.test(text) ? "" : "want a hash in hexadecimal digits";
    default:
      return "";
  }
}

/** A local time as the browser's date field gives it, as the API wants it; empty when it is none. */
export function toApiTime(local: string): string {
  const ms = new Date(local).getTime();
  return Number.isNaN(ms) ? "" : new Date(ms).toISOString().replace(".000Z", "Z");
}

/** The instant that a time of the address means: RFC 3339 or Unix milliseconds; undefined for a duration. */
export function instant(value: string): Date | undefined {
  const at = /^\d{12,14}$/.test(value) ? new Date(Number(value)) : /^\d{4}-/.test(value) ? new Date(value) : undefined;
  return at && !Number.isNaN(at.getTime()) ? at : undefined;
}

/** A time of the address as the browser's date field wants it; empty for a duration. */
export function toLocalField(value: string): string {
  const at = instant(value);
  return at ? new Date(at.getTime() - at.getTimezoneOffset() * 60_000).toISOString().slice(0, 19) : "";
}
