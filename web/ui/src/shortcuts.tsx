import { signal } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import { go, route } from "./navigation";
import { Icon } from "./parts/icon";
import { home } from "./route";
import { screens, togglePause } from "./topbar";

const stored = "kvstrata.keys";
const open = signal(false);
const enabled = signal(read());

export function openShortcuts(): void {
  open.value = true;
}

/** The keys of the page, and the dialog that lists them. Letters alone can be switched off: they trouble speech input. */
export function Shortcuts() {
  const dialog = useRef<HTMLDialogElement>(null);
  useEffect(() => watchKeys(), []);
  const shown = open.value;
  useEffect(() => {
    if (shown) {
      dialog.current?.showModal();
    } else {
      dialog.current?.close();
    }
  }, [shown]);
  return (
    <dialog ref={dialog} class="dialog" aria-labelledby="keys-title" onClose={() => (open.value = false)}>
      <div class="dialog-head">
        <h2 id="keys-title">Keyboard shortcuts</h2>
        <button type="button" class="tool" aria-label="Close" onClick={() => (open.value = false)}>
          <Icon name="close" />
        </button>
      </div>
      <dl class="keys">
        {screens.map((s) => (
          <div key={s.screen}>
            <dt>
              <kbd>g</kbd> <kbd>{s.key}</kbd>
            </dt>
            <dd>{s.title}</dd>
          </div>
        ))}
        <div>
          <dt>
            <kbd>/</kbd>
          </dt>
          <dd>the screen's filter</dd>
        </div>
        <div>
          <dt>
            <kbd>.</kbd>
          </dt>
          <dd>pause or follow</dd>
        </div>
        <div>
          <dt>
            <kbd>Esc</kbd>
          </dt>
          <dd>close the panel, leave the field</dd>
        </div>
        <div>
          <dt>
            <kbd>?</kbd>
          </dt>
          <dd>this list</dd>
        </div>
        <div>
          <dt>
            <kbd>←</kbd> <kbd>→</kbd>
          </dt>
          <dd>cursor of a focused chart; ten points with Shift</dd>
        </div>
      </dl>
      <label class="choice">
        <input type="checkbox" checked={enabled.value} onChange={(event) => setEnabled(event.currentTarget.checked)} />
        Shortcuts of a single letter or sign
      </label>
    </dialog>
  );
}

function watchKeys(): () => void {
  let leading = 0;
  const press = (event: KeyboardEvent) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented || open.peek()) {
      return;
    }
    const target = event.target as HTMLElement;
    if (target.matches("input, textarea, select")) {
      if (event.key === "Escape") {
        target.blur();
      }
      return;
    }
    if (!enabled.peek()) {
      return;
    }
    const led = Date.now() - leading < 1200;
    leading = 0;
    const screen = led ? screens.find((s) => s.key === event.key) : undefined;
    if (screen) {
      event.preventDefault();
      go(home(screen.screen, route.peek().paused));
    } else if (event.key === "g") {
      leading = Date.now();
    } else if (event.key === "/") {
      event.preventDefault();
      document.querySelector<HTMLInputElement>("[data-filter]")?.focus();
    } else if (event.key === "?") {
      openShortcuts();
    } else if (event.key === ".") {
      togglePause();
    }
  };
  addEventListener("keydown", press);
  return () => removeEventListener("keydown", press);
}

function setEnabled(on: boolean): void {
  enabled.value = on;
  try {
    localStorage.setItem(stored, on ? "on" : "off");
  } catch {
    // Storage may be forbidden; the choice then lasts as long as the page.
  }
}

function read(): boolean {
  try {
    return localStorage.getItem(stored) !== "off";
  } catch {
    return true;
  }
}
