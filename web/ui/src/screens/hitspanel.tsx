import type { Hits } from "../contract";
import { count, duration, percent, short } from "../format";
import { store } from "../live/live";
import { Meter } from "../parts/meter";
import { id } from "../testids";

/** A hit rate is never shown without what it is a share of, and never made up. */
export function HitsPanel() {
  const hits = store.hits.value;
  const reported = hits?.reported === true && (hits.asked_blocks ?? 0) > 0;
  return (
    <section class="panel" aria-labelledby="hits-title" data-testid={id.hits} data-reported={reported}>
      <div class="panel-head">
        <h2 id="hits-title">Hit rate</h2>
        {reported && hits?.window_seconds !== undefined && <p class="note">last {duration(hits.window_seconds)}</p>}
      </div>
      {reported && hits ? <Reported hits={hits} /> : <NotReported hits={hits} />}
    </section>
  );
}

function Reported({ hits }: { hits: Hits }) {
  return (
    <>
      <Ratio testid={id.hitsBlocks} matched={hits.matched_blocks ?? 0} asked={hits.asked_blocks ?? 0} unit="blocks" />
      <Ratio testid={id.hitsTokens} matched={hits.matched_tokens ?? 0} asked={hits.asked_tokens ?? 0} unit="tokens" />
      <p class="note">
        {count(hits.lookups ?? 0)} lookups{hits.from ? `; told by: ${hits.from}` : ""}. Ratio of sums. Engines
        themselves report no hits.
      </p>
    </>
  );
}

function Ratio({ matched, asked, unit, testid }: { matched: number; asked: number; unit: string; testid: string }) {
  const share = asked === 0 ? Number.NaN : matched / asked;
  return (
    <div class="ratio" data-testid={testid} data-matched={matched} data-asked={asked}>
      <span class="figure">{percent(share)}</span>
      <Meter share={share || 0} tone="accent" />
      <span class="ratio-of">
        {short(matched)} of {short(asked)} <span class="unit">{unit}</span>
      </span>
    </div>
  );
}

function NotReported({ hits }: { hits: Hits | undefined }) {
  return (
    <>
      <p class="figure quiet">not reported</p>
      <p class="note">
        {hits?.reported ? "Lookups came, but none asked for a whole block. " : "Nobody looked anything up. "}
        Engines' events tell no hits: a rate needs lookups. Let routers ask <code>POST /v1/lookup</code>, or try{" "}
        <code>kvstrata lookup</code>.
      </p>
    </>
  );
}
