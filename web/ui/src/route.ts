import { type EventKind, eventKinds } from "./contract";

/** Everything that the address holds. A field at its default is left out of the address. */
export type Route =
  | { screen: "pulse"; paused: boolean }
  | { screen: "engines"; paused: boolean; filter: string; sort: string; source: string }
  | { screen: "transfers"; paused: boolean; filter: string; sort: string }
  | { screen: "prefixes"; paused: boolean; filter: string; sort: string }
  | { screen: "history"; paused: boolean; query: string; params: Record<string, string> }
  | { screen: "explain"; paused: boolean; hash: string; since: string }
  | { screen: "tail"; paused: boolean; source: string; kinds: EventKind[]; hash: string }
  | { screen: "unknown"; paused: boolean; path: string };

export type Screen = Exclude<Route["screen"], "unknown">;

/** A query's parameter may not take one of the page's own names. */
const own = new Set(["query", "paused"]);

export function parse(path: string, search: string): Route {
  const q = new URLSearchParams(search);
  const text = (name: string) => q.get(name) ?? "";
  const paused = q.get("paused") === "1";
  const [head = "", ...rest] = path.split("/").slice(1);
  const deeper = rest.filter((part) => part !== "");
  if (head === "explain") {
    return { screen: "explain", paused, hash: decode(deeper.join("/")), since: text("since") };
  }
  if (deeper.length === 0) {
    switch (head) {
      case "":
        return { screen: "pulse", paused };
      case "engines":
        return { screen: "engines", paused, filter: text("q"), sort: text("sort"), source: text("source") };
      case "transfers":
        return { screen: "transfers", paused, filter: text("q"), sort: text("sort") };
      case "prefixes":
        return { screen: "prefixes", paused, filter: text("q"), sort: text("sort") };
      case "history": {
        const params: Record<string, string> = {};
        for (const [name, value] of q) {
          if (!own.has(name) && value !== "") {
            params[name] = value;
          }
        }
        return { screen: "history", paused, query: text("query"), params };
      }
      case "tail": {
        const asked = text("kinds").split(",");
        const kinds = eventKinds.filter((kind) => asked.includes(kind));
        return { screen: "tail", paused, source: text("source"), kinds, hash: text("hash") };
      }
    }
  }
  return { screen: "unknown", paused, path };
}

export function format(route: Route): string {
  const q = new URLSearchParams();
  const put = (name: string, value: string) => {
    if (value !== "") {
      q.set(name, value);
    }
  };
  let path = `/${route.screen}`;
  switch (route.screen) {
    case "pulse":
      path = "/";
      break;
    case "engines":
      put("q", route.filter);
      put("sort", route.sort);
      put("source", route.source);
      break;
    case "transfers":
    case "prefixes":
      put("q", route.filter);
      put("sort", route.sort);
      break;
    case "history":
      put("query", route.query);
      for (const [name, value] of Object.entries(route.params)) {
        if (!own.has(name)) {
          put(name, value);
        }
      }
      break;
    case "explain":
      path = route.hash === "" ? "/explain" : `/explain/${encodeURIComponent(route.hash)}`;
      put("since", route.since);
      break;
    case "tail":
      put("source", route.source);
      put("kinds", route.kinds.join(","));
      put("hash", route.hash);
      break;
    case "unknown":
      path = route.path;
      break;
  }
  put("paused", route.paused ? "1" : "");
  const search = q.toString().replaceAll("%2C", ",");
  return search === "" ? path : `${path}?${search}`;
}

/** The plain address of a screen. */
export function home(screen: Screen, paused = false): Route {
  return parse(screen === "pulse" ? "/" : `/${screen}`, paused ? "paused=1" : "");
}

export function explainPath(hash: string): string {
  return format({ screen: "explain", paused: false, hash, since: "" });
}

export function enginePath(id: string): string {
  return format({ screen: "engines", paused: false, filter: "", sort: "", source: id });
}

export function enginesPath(filter: string): string {
  return format({ screen: "engines", paused: false, filter, sort: "", source: "" });
}

function decode(part: string): string {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}
