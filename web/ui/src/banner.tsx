import type { ComponentChildren } from "preact";
import { useEffect, useState } from "preact/hooks";
import { clock, plural, stamp } from "./format";
import { complaint, connection, lockedOut, pausedAt, restarted, store } from "./live/live";
import { route } from "./navigation";
import { Icon } from "./parts/icon";
import { id } from "./testids";
import { togglePause } from "./topbar";

const words = { connecting: "connecting", live: "live", waiting: "reconnecting" } as const;

export function ConnectionPill() {
  const { phase } = connection.status.value;
  return (
    <span class={`pill phase-${phase}`} data-testid={id.connection} data-phase={phase} role="status">
      <span class="pill-dot" aria-hidden="true" />
      {words[phase]}
    </span>
  );
}

/** What stands between the reader and the present. */
export function Banners() {
  const status = connection.status.value;
  const replaced = restarted.value;
  const paused = pausedAt.value;
  return (
    <section class="banners" aria-label="Notices" data-testid={id.banner}>
      {lockedOut.value && (
        <Banner tone="act" action="Log in" onAction={() => location.reload()}>
          Your session has ended.{store.filled.value ? " What is shown is from before that." : ""}
        </Banner>
      )}
      {status.phase === "waiting" && !lockedOut.value && <Reconnecting until={status.until} attempt={status.attempt} />}
      {status.phase === "connecting" && store.filled.value && (
        <Banner tone="watch">Connecting again. What is shown is from before the loss.</Banner>
      )}
      {paused !== undefined && (
        <Banner tone="note" action="Resume" onAction={togglePause}>
          Paused at {clock(paused)}.{" "}
          {route.value.screen === "tail"
            ? "Events that pass meanwhile are counted, not kept."
            : "What is shown does not follow; it is up to date again at once."}
        </Banner>
      )}
      {replaced !== undefined && (
        <Banner tone="note" action="Dismiss" onAction={clear(restarted)}>
          The server restarted{replaced > 0 ? ` at ${stamp(replaced)}` : ""}: everything shown is from the new process,
          and counts begin anew.
        </Banner>
      )}
      {complaint.value !== "" && (
        <Banner tone="watch" action="Dismiss" onAction={() => (complaint.value = "")}>
          The server refused what this page asked: {complaint.value}
        </Banner>
      )}
    </section>
  );
}

function Reconnecting({ until, attempt }: { until: number; attempt: number }) {
  const [now, setNow] = useState(Date.now());
  useEffect(() => {
    const timer = setInterval(() => setNow(Date.now()), 500);
    return () => clearInterval(timer);
  }, []);
  const left = Math.max(0, Math.ceil((until - now) / 1000));
  return (
    <Banner tone="act" action="Try now" onAction={() => connection.open()}>
      No connection to the server; trying again {left > 0 ? `in ${left}\u00a0s` : "now"} (
      {plural(attempt, "try", "tries")} so far).
      {store.filled.value ? " What is shown is from before the loss." : " Check that kvstrata runs with the web role."}
    </Banner>
  );
}

interface BannerProps {
  tone: "act" | "watch" | "note";
  children: ComponentChildren;
  action?: string;
  onAction?: () => void;
}

function Banner({ tone, children, action, onAction }: BannerProps) {
  return (
    <div class={`banner banner-${tone}`}>
      <p>{children}</p>
      {action && onAction && (
        <button type="button" class="button" onClick={onAction}>
          {action === "Dismiss" && <Icon name="close" size={11} />}
          {action}
        </button>
      )}
    </div>
  );
}

function clear(notice: { value: number | undefined }): () => void {
  return () => {
    notice.value = undefined;
  };
}
