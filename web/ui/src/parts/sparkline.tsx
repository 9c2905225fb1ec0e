import { traces } from "../live/live";
import { traceLength } from "../live/traces";

const width = 84;
const height = 22;
const middle = 13;

/** Stored upwards, evicted downwards, the last minute; each source on a scale of its own. */
export function Sparkline({ id }: { id: string }) {
  traces.version.value;
  const trace = traces.of(id);
  const top = Math.max(1, ...(trace?.stored ?? []));
  const bottom = Math.max(1, ...(trace?.evicted ?? []));
  return (
    <svg
      class="spark"
      width={width}
      height={height}
      viewBox={`0 0 ${width} ${height}`}
      aria-hidden="true"
      focusable="false"
    >
      {trace && trace.stored.length > 1 && (
        <>
          <path class="spark-stored" d={area(trace.stored, top, -(middle - 1))} />
          <path class="spark-evicted" d={area(trace.evicted, bottom, height - middle - 1)} />
        </>
      )}
      <path class="spark-zero" d={`M0 ${middle}H${width}`} />
    </svg>
  );
}

function area(values: readonly number[], most: number, reach: number): string {
  const step = width / (traceLength - 1);
  const start = width - (values.length - 1) * step;
  const points = values.map((v, i) => `${(start + i * step).toFixed(1)} ${(middle + (v / most) * reach).toFixed(1)}`);
  return `M${start.toFixed(1)} ${middle}L${points.join("L")}L${width} ${middle}Z`;
}
