import { type ReadonlySignal, signal } from "@preact/signals";
import { format, parse, type Route } from "./route";

const current = signal<Route>(parse(location.pathname, location.search));

/** What the address says now. */
export const route: ReadonlySignal<Route> = current;

/** Goes to a route: a new entry in the history, or in place of the present one. */
export function go(next: Route, how: "push" | "replace" = "push"): void {
  const address = format(next);
  if (address === location.pathname + location.search) {
    return;
  }
  if (how === "push") {
    history.pushState(null, "", address);
  } else {
    history.replaceState(null, "", address);
  }
  const moved = current.peek().screen !== next.screen;
  current.value = next;
  if (moved) {
    scrollTo(0, 0);
  }
}

/** Follows the history's buttons, and links to the page's own screens without loading it anew. */
export function watchNavigation(): void {
  addEventListener("popstate", () => {
    current.value = parse(location.pathname, location.search);
  });
  document.addEventListener("click", (event) => {
    if (
      event.defaultPrevented ||
      event.button !== 0 ||
      event.metaKey ||
      event.ctrlKey ||
      event.shiftKey ||
      event.altKey
    ) {
      return;
    }
    const link = (event.target as Element).closest?.("a[href]");
    if (!(link instanceof HTMLAnchorElement) || link.origin !== location.origin || link.download || link.target) {
      return;
    }
    if (link.pathname.startsWith("/v1/") || link.getAttribute("href")?.startsWith("#")) {
      return;
    }
    event.preventDefault();
    go(parse(link.pathname, link.search));
  });
}
