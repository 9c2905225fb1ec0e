import { describe, expect, it } from "vitest";
import type { QueryInfo, QueryResult } from "../src/contract";
import { complaint, fields, queryAddress, toApiTime, toLocalField } from "../src/query";
import { drawing, toCsv } from "../src/result";

const info: QueryInfo = {
  name: "events",
  title: "Events",
  params: [
    { name: "since", kind: "duration", default: "6h" },
    { name: "step", kind: "duration", default: "30s" },
    { name: "engine", kind: "text", help: "its own words" },
  ],
};

describe("query form", () => {
  it("has the query's own fields first, then the common ones", () => {
    expect(fields(info).map((f) => f.name)).toEqual(["step", "engine", "model", "limit"]);
    expect(fields(info)[1]?.help).toBe("its own words");
  });

  it("asks with what was filled in", () => {
    expect(queryAddress(info, {}, false)).toBe("/v1/query/events?since=6h");
    expect(queryAddress(info, { since: "1h", step: " 5s ", engine: "a&b", other: "x", model: "" }, true)).toBe(
      "/v1/query/events?since=1h&step=5s&engine=a%26b&sql=1",
    );
    expect(queryAddress(info, { since: "2026-11-29T12:00:00Z", until: "2026-11-29T13:00:00Z" }, false)).toBe(
      "/v1/query/events?since=2026-11-29T12%3A00%3A00Z&until=2026-11-29T13%3A00%3A00Z",
    );
  });

  it("asks for no range where a query has none", () => {
    const state: QueryInfo = { name: "state", title: "State", help: "", params: [{ name: "at", kind: "duration" }] };
    expect(queryAddress(state, { since: "1h" }, false)).toBe("/v1/query/state");
    expect(queryAddress(state, { since: "1h", at: "15m" }, false)).toBe("/v1/query/state?at=15m");
  });

  it("complains before the server does", () => {
    expect(complaint("number", "5o")).not.toBe("");
    expect(complaint("number", "0.01")).toBe("");
    expect(complaint("duration", "1h30m")).toBe("");
    expect(complaint("duration", "2026-11-29T12:00:00Z")).toBe("");
    expect(complaint("duration", "soon")).not.toBe("");
    expect(complaint("hash", "0x34dc6330fee229a2")).toBe("");
    expect(complaint("hash", "xyz")).not.toBe("");
    expect(complaint("hash", "")).toBe("");
  });

  it("turns local times into the API's and back", () => {
    const local = "2026-11-29T12:34:56";
    expect(toLocalField(toApiTime(local))).toBe(local);
    expect(toApiTime("")).toBe("");
    expect(toLocalField("15m")).toBe("");
    expect(toLocalField(String(new Date(local).getTime()))).toBe(local);
  });
});

const result = (more: Partial<QueryResult>): QueryResult => ({
  query: "q",
  title: "Q",
  since: 0,
  until: 1,
  exactness: "exact",
  columns: [
    { name: "time", kind: "time" },
    { name: "engine", kind: "text" },
    { name: "stored", kind: "number", unit: "blocks" },
  ],
  rows: [],
  ...more,
});

describe("result", () => {
  it("is written as CSV that is no formula", () => {
    const csv = toCsv(
      result({
        rows: [
          [1_796_000_000_000, "=1+1", 5],
          [1_796_000_001_000, 'a,"b"', null],
        ],
      }),
    );
    expect(csv).toBe(
      'time,engine,stored (blocks)\r\n2026-11-30T00:53:20.000Z,"\'=1+1",5\r\n2026-11-30T00:53:21.000Z,"a,""b""",\r\n',
    );
  });

  it("draws a line for each of several things", () => {
    const drawn = drawing(
      result({
        rows: [
          [2000, "a", 1],
          [1000, "a", 2],
          [1000, "b", 9],
        ],
        chart: { kind: "line", x: "time", y: ["stored"] },
      }),
    );
    expect(drawn?.xs).toEqual([1000, 2000]);
    expect(drawn?.lines).toEqual([
      { name: "b", unit: "blocks", values: [9, null] },
      { name: "a", unit: "blocks", values: [2, 1] },
    ]);
  });

  it("draws bars of words, and nothing where nothing is said", () => {
    const drawn = drawing(result({ rows: [[1, "a", 3]], chart: { kind: "bar", x: "engine", y: ["stored"] } }));
    expect(drawn?.labels).toEqual(["a"]);
    expect(drawing(result({ chart: { kind: "none" } }))).toBeUndefined();
    expect(drawing(result({ chart: { kind: "line", x: "gone", y: ["stored"] } }))).toBeUndefined();
  });
});
