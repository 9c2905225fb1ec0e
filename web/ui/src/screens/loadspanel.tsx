import { lag } from "../format";
import { store } from "../live/live";
import { format, home } from "../route";
import { id } from "../testids";
import { throughput } from "../transfers";

/** How fast blocks travel, in a line; the screen Transfers has the rest. */
export function LoadsPanel() {
  const loads = store.loads.value;
  const told = loads !== undefined && loads.loads > 0;
  return (
    <section class="panel loadline" aria-labelledby="loads-title" data-testid={id.loads} data-value={loads?.rate.bytes}>
      <h2 id="loads-title">
        <a href={format(home("transfers"))}>Loads</a>
      </h2>
      <p>
        {told ? <b>{throughput(loads.rate.bytes)}</b> : <span class="soft">no connector tells of any</span>}
        {told && loads.latency_ms && <span class="note">p99 {lag(loads.latency_ms.p99)}</span>}
        {told && <span class="note">last {loads.window_seconds} s</span>}
      </p>
    </section>
  );
}
