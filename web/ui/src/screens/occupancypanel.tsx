import { useComputed } from "@preact/signals";
import { type Occupancy, occupancy } from "../fleet";
import { count, percent, short } from "../format";
import { sources } from "../live/live";
import { Meter } from "../parts/meter";
import { id } from "../testids";

/** How full each tier is; against the pool where engines told its size. */
export function OccupancyPanel() {
  const tiers = useComputed(() => occupancy(sources.value)).value;
  return (
    <section class="panel" aria-labelledby="occupancy-title">
      <div class="panel-head">
        <h2 id="occupancy-title">Occupancy</h2>
        <p class="note">resident copies, by tier</p>
      </div>
      {tiers.length === 0 && <p class="note">Nothing is resident: no engine stored a block that it still holds.</p>}
      {tiers.map((t) => (
        <TierLine key={t.tier} tier={t} />
      ))}
    </section>
  );
}

function TierLine({ tier }: { tier: Occupancy }) {
  const share = tier.pool > 0 ? tier.pooled / tier.pool : undefined;
  return (
    <div
      class="tier"
      data-testid={id.occupancy(tier.tier)}
      data-copies={tier.copies}
      data-blocks={tier.blocks}
      data-pool={tier.pool}
    >
      <p class="tier-head">
        <b>{tier.tier}</b>
        <span>
          {share === undefined ? (
            <>
              {short(tier.copies)} <span class="unit">copies</span>
            </>
          ) : (
            percent(share)
          )}
        </span>
      </p>
      {share !== undefined && <Meter share={share} />}
      <p class="note">
        {share === undefined
          ? `${short(tier.blocks)} blocks on ${count(tier.sources)} sources; size of this tier not told`
          : `${short(tier.pooled)} of ${short(tier.pool)} copies in pools; ${short(tier.blocks)} blocks${
              tier.pools < tier.sources
                ? `; ${count(tier.sources - tier.pools)} of ${count(tier.sources)} did not tell their pool`
                : ""
            }`}
      </p>
    </div>
  );
}
