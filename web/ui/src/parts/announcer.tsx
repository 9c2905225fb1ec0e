import { signal } from "@preact/signals";

const text = signal("");
let timer = 0;

/** Has screen readers say a text once they are free; of several in a quarter of a second only the last. */
export function announce(words: string): void {
  clearTimeout(timer);
  timer = setTimeout(() => {
    text.value = words;
  }, 250);
}

export function Announcer() {
  return (
    <div class="hidden" role="status" aria-live="polite">
      {text}
    </div>
  );
}
