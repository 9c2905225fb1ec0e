import { effect } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import { Banners } from "./banner";
import { plural } from "./format";
import { connection, fleetInsights, fleetTrust, store } from "./live/live";
import { route } from "./navigation";
import { Announcer } from "./parts/announcer";
import type { Route } from "./route";
import { EnginesScreen } from "./screens/engines";
import { ExplainScreen } from "./screens/explain";
import { HistoryScreen } from "./screens/history";
import { PrefixesScreen } from "./screens/prefixes";
import { PulseScreen } from "./screens/pulse";
import { TailScreen } from "./screens/tail";
import { TransfersScreen } from "./screens/transfers";
import { UnknownScreen } from "./screens/unknown";
import { Shortcuts } from "./shortcuts";
import { TopBar, titleOf } from "./topbar";

export function App() {
  const main = useRef<HTMLElement>(null);
  const now = route.value;
  const first = useRef(true);
  // A new screen takes the focus, a new filter does not.
  useEffect(() => {
    if (!first.current) {
      main.current?.focus({ preventScroll: true });
    }
    first.current = false;
  }, [now.screen]);
  useEffect(() => effect(() => showTitle()), []);
  return (
    <>
      <a class="skip" href="#main">
        Skip to content
      </a>
      <TopBar />
      <Banners />
      <main id="main" ref={main} tabIndex={-1} aria-label={titleOf(now.screen)}>
        <ScreenOf now={now} />
      </main>
      <Shortcuts />
      <Announcer />
    </>
  );
}

function ScreenOf({ now }: { now: Route }) {
  const filled = store.filled.value;
  switch (now.screen) {
    case "pulse":
      return filled ? <PulseScreen /> : <Waiting title="Pulse" />;
    case "engines":
      return filled ? <EnginesScreen route={now} /> : <Waiting title="Engines" />;
    case "transfers":
      return filled ? <TransfersScreen route={now} /> : <Waiting title="Transfers" />;
    case "prefixes":
      return filled ? <PrefixesScreen route={now} /> : <Waiting title="Prefixes" />;
    case "history":
      return <HistoryScreen route={now} />;
    case "explain":
      return <ExplainScreen route={now} />;
    case "tail":
      return <TailScreen route={now} />;
    case "unknown":
      return <UnknownScreen path={now.path} />;
  }
}

/** Before the first state nothing is known: a zero would be a claim. */
function Waiting({ title }: { title: string }) {
  return (
    <>
      <div class="screen-head">
        <h1>{title}</h1>
      </div>
      <p class="note">Waiting for the first state from the server.</p>
    </>
  );
}

/** The title says what is wrong, for whoever has the page in a tab behind others. */
function showTitle(): void {
  const screen = titleOf(route.value.screen);
  document.title = `${trouble()}${screen} · kvstrata`;
}

function trouble(): string {
  if (connection.status.value.phase === "waiting") {
    return "Reconnecting · ";
  }
  if (route.value.paused) {
    return "Paused · ";
  }
  const grave = fleetInsights.value.filter((i) => i.weight === "act").length;
  if (grave > 0) {
    const { gone } = fleetTrust.value.byState;
    return gone > 0 ? `! ${gone} gone · ` : `! ${plural(grave, "problem")} · `;
  }
  return "";
}
