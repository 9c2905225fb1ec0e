import { describe, expect, it } from "vitest";
import { enginePath, explainPath, format, home, parse, type Route } from "../src/route";

const parseAddress = (address: string) => {
  const url = new URL(address, "http://host");
  return parse(url.pathname, url.search);
};

describe("route", () => {
  const routes: [string, Route][] = [
    ["/", { screen: "pulse", paused: false }],
    ["/?paused=1", { screen: "pulse", paused: true }],
    ["/engines", { screen: "engines", paused: false, filter: "", sort: "", source: "" }],
    [
      "/engines?q=%3Cimg+src%3Dx%3E&sort=-lag&source=default.demo%252Fllama.prefill-0.0.engine&paused=1",
      {
        screen: "engines",
        paused: true,
        filter: "<img src=x>",
        sort: "-lag",
        source: "default.demo%2Fllama.prefill-0.0.engine",
      },
    ],
    ["/transfers?q=redis&sort=-p99", { screen: "transfers", paused: false, filter: "redis", sort: "-p99" }],
    ["/prefixes?sort=tokens", { screen: "prefixes", paused: false, filter: "", sort: "tokens" }],
    [
      "/history?query=events&since=15m&step=30s",
      { screen: "history", paused: false, query: "events", params: { since: "15m", step: "30s" } },
    ],
    ["/explain", { screen: "explain", paused: false, hash: "", since: "" }],
    ["/explain/34dc6330fee229a2?since=6h", { screen: "explain", paused: false, hash: "34dc6330fee229a2", since: "6h" }],
    [
      "/tail?source=prefill-*&kinds=STORED,EVICTED",
      { screen: "tail", paused: false, source: "prefill-*", kinds: ["STORED", "EVICTED"], hash: "" },
    ],
  ];
  it.each(routes)("%s is read and written", (address, route) => {
    expect(parseAddress(address)).toEqual(route);
    expect(format(route)).toBe(address);
  });

  it("takes an address that it would write otherwise", () => {
    expect(parseAddress("/tail?kinds=NONSENSE,EVICTED").screen).toBe("tail");
    expect(parseAddress("/tail?kinds=NONSENSE,EVICTED")).toMatchObject({ kinds: ["EVICTED"] });
    expect(parseAddress("/engines/")).toMatchObject({ screen: "engines" });
    expect(parseAddress("/explain/%zz")).toMatchObject({ screen: "explain", hash: "%zz" });
    expect(parseAddress("/nowhere/at/all")).toEqual({ screen: "unknown", paused: false, path: "/nowhere/at/all" });
  });

  it("keeps the page's own names out of a query's parameters", () => {
    expect(
      format({
        screen: "history",
        paused: false,
        query: "events",
        params: { query: "other", paused: "1", limit: "5" },
      }),
    ).toBe("/history?query=events&limit=5");
  });

  it("makes links", () => {
    expect(explainPath("ab12")).toBe("/explain/ab12");
    expect(parseAddress(enginePath("a.b%2Fc.d.0.engine"))).toMatchObject({ source: "a.b%2Fc.d.0.engine" });
    expect(format(home("tail", true))).toBe("/tail?paused=1");
  });
});
