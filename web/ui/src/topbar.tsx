import { ConnectionPill } from "./banner";
import { pausedAt } from "./live/live";
import { go, route } from "./navigation";
import { Icon, Mark } from "./parts/icon";
import { format, home, type Route, type Screen } from "./route";
import { openShortcuts } from "./shortcuts";
import { id } from "./testids";
import { setTheme, type Theme, theme } from "./theme";

export const screens: readonly { screen: Screen; title: string; key: string }[] = [
  { screen: "pulse", title: "Pulse", key: "p" },
  { screen: "engines", title: "Engines", key: "e" },
  { screen: "transfers", title: "Transfers", key: "r" },
  { screen: "prefixes", title: "Prefixes", key: "f" },
  { screen: "history", title: "History", key: "h" },
  { screen: "explain", title: "Explain", key: "x" },
  { screen: "tail", title: "Tail", key: "t" },
];

export function titleOf(screen: Route["screen"]): string {
  return screens.find((s) => s.screen === screen)?.title ?? "Not found";
}

export function togglePause(): void {
  const now = route.peek();
  go({ ...now, paused: !now.paused }, "replace");
}

export function TopBar() {
  const now = route.value;
  return (
    <header class="topbar">
      <a class="brand" href="/" aria-label="kvstrata, to Pulse">
        <Mark />
        <span>kvstrata</span>
      </a>
      <nav class="nav" aria-label="Screens">
        {screens.map((s) => (
          <a
            key={s.screen}
            href={format(home(s.screen, now.paused))}
            data-testid={id.nav(s.screen)}
            {...(s.screen === now.screen ? { "aria-current": "page" as const } : {})}
          >
            {s.title}
          </a>
        ))}
      </nav>
      <div class="tools">
        <ConnectionPill />
        <PauseButton />
        <ThemeButton />
        <button
          type="button"
          class="tool"
          data-testid={id.help}
          aria-label="Keyboard shortcuts"
          title="Keyboard shortcuts (?)"
          onClick={openShortcuts}
        >
          <span aria-hidden="true">?</span>
        </button>
      </div>
    </header>
  );
}

function PauseButton() {
  const paused = pausedAt.value !== undefined;
  return (
    <button
      type="button"
      class={paused ? "tool active" : "tool"}
      data-testid={id.pause}
      aria-pressed={paused}
      title={paused ? "Follow again (.)" : "Pause the page (.)"}
      onClick={togglePause}
    >
      <Icon name={paused ? "play" : "pause"} />
      <span class="tool-text">{paused ? "Resume" : "Pause"}</span>
    </button>
  );
}

const after: Record<Theme, Theme> = { auto: "light", light: "dark", dark: "auto" };

function ThemeButton() {
  const now = theme.value;
  return (
    <button
      type="button"
      class="tool"
      data-testid={id.theme}
      data-theme={now}
      aria-label={`Theme: ${now}; change to ${after[now]}`}
      title={`Theme: ${now}`}
      onClick={() => setTheme(after[now])}
    >
      <Icon name={now} />
    </button>
  );
}
