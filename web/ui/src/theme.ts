import { effect, type ReadonlySignal, signal } from "@preact/signals";

export type Theme = "auto" | "light" | "dark";

const stored = "kvstrata.theme";
const wanted = signal<Theme>(read());
const system = matchMedia("(prefers-color-scheme: dark)");
const systemDark = signal(system.matches);

export const theme: ReadonlySignal<Theme> = wanted;

/** Counts changes of what colours mean, for what draws them on a canvas. */
export function paletteKey(): string {
  return `${wanted.value}-${systemDark.value}`;
}

export function setTheme(next: Theme): void {
  wanted.value = next;
  try {
    localStorage.setItem(stored, next);
  } catch {
    // Storage may be forbidden; the choice then lasts as long as the page.
  }
}

export function watchTheme(): void {
  system.addEventListener("change", () => {
    systemDark.value = system.matches;
  });
  effect(() => {
    const root = document.documentElement;
    if (wanted.value === "auto") {
      root.removeAttribute("data-theme");
    } else {
      root.dataset.theme = wanted.value;
    }
  });
}

function read(): Theme {
  try {
    const value = localStorage.getItem(stored);
    return value === "light" || value === "dark" ? value : "auto";
  } catch {
    return "auto";
  }
}
