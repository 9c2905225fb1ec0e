import { useComputed } from "@preact/signals";
import { stamp, zone } from "../format";
import { store } from "../live/live";
import { Empty } from "../parts/empty";
import { FleetPanel } from "./fleetpanel";
import { FlowPanel } from "./flowpanel";
import { HitsPanel } from "./hitspanel";
import { InsightList } from "./insightlist";
import { LoadsPanel } from "./loadspanel";
import { OccupancyPanel } from "./occupancypanel";
import { TrustBar } from "./trustbar";

/** The first screen: can what is shown be trusted, what moves, how full is it, does it help. */
export function PulseScreen() {
  const none = useComputed(() => store.sourceIds.value.length === 0);
  return (
    <div class="pulse">
      <h1 class="hidden">Pulse</h1>
      <TrustBar />
      {none.value ? <NoSources /> : <InsightList />}
      <div class="pulse-grid">
        <FlowPanel />
        <div class="pulse-side">
          <HitsPanel />
          <LoadsPanel />
          <OccupancyPanel />
        </div>
      </div>
      <FleetPanel />
      <Colophon />
    </div>
  );
}

function NoSources() {
  return (
    <Empty title="No engine has been heard yet.">
      <p>
        Start the engine with its KV-cache events switched on, then tell kvstrata where they are:
        <br />
        <code>kvstrata run --engine zmq+tcp://HOST:5557,replay=tcp://HOST:5558,model=MODEL</code>
      </p>
      <p>
        <code>kvstrata doctor --engine …</code> says what stands in the way. <code>kvstrata demo</code> shows everything
        with simulated engines.
      </p>
    </Empty>
  );
}

function Colophon() {
  const meta = store.meta.value;
  if (!meta) {
    return null;
  }
  return (
    <p class="colophon">
      kvstrata {meta.version} · roles {meta.roles.join(", ")} · up since {stamp(meta.started)} · times are local (
      {zone(new Date())})
    </p>
  );
}
