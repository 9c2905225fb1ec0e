import { percent } from "../format";

/** A share of a whole as a bar; the words beside it say the same. */
export function Meter({
  share,
  tone = "stored",
}: {
  share: number;
  tone?: "stored" | "evicted" | "loaded" | "accent";
}) {
  const width = `${Math.min(100, Math.max(0, share * 100)).toFixed(2)}%`;
  return (
    <span class="meter" aria-hidden="true" title={percent(share)}>
      <span class={`meter-fill paint-${tone}`} style={{ width }} />
    </span>
  );
}
