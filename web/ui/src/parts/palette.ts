import { paletteKey } from "../theme";

export type Paint = "stored" | "evicted" | "loaded" | "four" | "five" | "six";

export const paints: readonly Paint[] = ["stored", "evicted", "loaded", "four", "five", "six"];

/** Series differ in their dashes too: colour is never the only difference. */
export const dashes: Record<Paint, readonly number[]> = {
  stored: [],
  evicted: [6, 3],
  loaded: [2, 3],
  four: [10, 3],
  five: [8, 3, 2, 3],
  six: [3, 2],
};

let key = "";
const known = new Map<string, string>();

/** A colour of the style sheet, for what is drawn on a canvas. */
export function colour(name: Paint | "grid" | "ink3"): string {
  const now = paletteKey();
  if (now !== key) {
    key = now;
    known.clear();
  }
  let value = known.get(name);
  if (value === undefined) {
    value = getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
    known.set(name, value);
  }
  return value;
}
