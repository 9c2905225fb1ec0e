import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { clock, duration, stamp } from "../format";
import { type Lane, type Span, type Story, ticks } from "../story";
import { id } from "../testids";

const headHeight = 22;
const bar = 14;

/** Where a block was and when: a lane for each source and tier. The table below the drawing says the same in words. */
export function Timeline({ story }: { story: Story }) {
  const box = useRef<HTMLDivElement>(null);
  const [width, setWidth] = useState(800);
  useEffect(() => {
    const host = box.current;
    if (!host) {
      return;
    }
    const watch = new ResizeObserver(() => setWidth(host.clientWidth));
    watch.observe(host);
    return () => watch.disconnect();
  }, []);
  // On a narrow page names stand above their lanes.
  const narrow = width < 560;
  const gutter = narrow ? 0 : 190;
  const rowHeight = narrow ? 44 : 30;
  const right = 14;
  const scale = useMemo(() => {
    const reach = Math.max(1, width - gutter - right);
    return (t: number) => gutter + ((t - story.from) / (story.to - story.from)) * reach;
  }, [story, width, gutter]);
  const marks = ticks(story.from, story.to, Math.max(2, Math.floor((width - gutter) / 110)));
  const height = headHeight + story.lanes.length * rowHeight + 6;
  const days = story.to - story.from > 86_400_000;
  return (
    <figure class="timeline">
      <div ref={box}>
        <svg
          width={width}
          height={height}
          role="img"
          aria-label={`Residency of the block on ${story.lanes.length} lanes, ${stamp(story.from)} to now`}
        >
          {marks.map((t) => (
            <g key={t}>
              <path class="tl-grid" d={`M${scale(t)} ${headHeight - 4}V${height}`} />
              <text
                class="tl-time"
                x={scale(t)}
                y={12}
                text-anchor={scale(t) > width - 40 ? "end" : scale(t) < gutter + 30 ? "start" : "middle"}
              >
                {days ? stamp(t).slice(5, 16) : clock(t)}
              </text>
            </g>
          ))}
          <path class="tl-now" d={`M${scale(story.to)} ${headHeight - 4}V${height}`} />
          {story.lanes.map((lane, i) => (
            <LaneRow
              key={lane.key}
              lane={lane}
              top={headHeight + i * rowHeight}
              height={rowHeight}
              scale={scale}
              gutter={gutter}
              width={width}
            />
          ))}
        </svg>
      </div>
      <figcaption class="tl-legend">
        <span>
          <Key d={<rect class="tl-span" x="0" y="1" width="20" height="9" rx="2" />} /> resident
        </span>
        <span>
          <Key d={<rect class="tl-span tl-still" x="0" y="1" width="20" height="9" rx="2" />} /> resident now
        </span>
        <span>
          <Key d={<path class="tl-loaded" d="M10 0l5.5 5.5L10 11 4.5 5.5z" />} /> LOADED
        </span>
        <span>
          <Key d={<path class="tl-cleared" d="M6 1l8 9M14 1l-8 9" />} /> CLEARED
        </span>
        <span>
          <Key d={<path class="tl-evicted" d="M10 0v11" />} /> EVICTED
        </span>
      </figcaption>
    </figure>
  );
}

function Key({ d }: { d: preact.ComponentChildren }) {
  return (
    <svg width="20" height="11" aria-hidden="true" focusable="false">
      {d}
    </svg>
  );
}

interface LaneProps {
  lane: Lane;
  top: number;
  height: number;
  scale: (t: number) => number;
  gutter: number;
  width: number;
}

function LaneRow({ lane, top, height, scale, gutter, width }: LaneProps) {
  const above = gutter === 0;
  const middle = above ? top + height - 13 : top + height / 2;
  const label = above ? top + 14 : middle + 4;
  const fits = Math.floor(((above ? width : gutter) - 62) / 6.6);
  const name = lane.name.length > fits ? `${lane.name.slice(0, fits - 1)}…` : lane.name;
  const tier = `${lane.tier}${lane.group ? ` ${lane.group}` : ""}`;
  return (
    <g data-testid={id.explainLane}>
      <path class="tl-base" d={`M${gutter} ${middle}H${width - 14}`} />
      <text class="tl-name" x={0} y={label}>
        {name}
        <title>{`${lane.name} ${tier}`}</title>
      </text>
      <text class="tl-tier" x={above ? width - 20 : gutter - 10} y={label} text-anchor="end">
        {tier}
      </text>
      {lane.spans.map((span) => (
        <SpanBar key={span.from} span={span} y={middle - bar / 2} scale={scale} />
      ))}
      {lane.marks.map((m, i) => {
        const x = scale(m.at);
        const words = `${m.event.op} ${stamp(m.at, true)}${m.event.reason ? `, ${m.event.reason}` : ""}`;
        return (
          <g key={i}>
            <title>{words}</title>
            {m.event.op === "LOADED" && <path class="tl-loaded" d={`M${x} ${middle - 6}l6 6-6 6-6-6z`} />}
            {m.event.op === "CLEARED" && (
              <path class="tl-cleared" d={`M${x - 4.5} ${middle - 4.5}l9 9M${x + 4.5} ${middle - 4.5}l-9 9`} />
            )}
            {m.event.op === "EVICTED" && <path class="tl-evicted" d={`M${x} ${middle - 8}v16`} />}
          </g>
        );
      })}
    </g>
  );
}

function SpanBar({ span, y, scale }: { span: Span; y: number; scale: (t: number) => number }) {
  const x = scale(span.from);
  const width = Math.max(2, scale(span.to) - x);
  const age = duration((span.to - span.from) / 1000);
  const end = span.openEnd ? "resident now" : `${span.end?.op ?? "ended"} ${stamp(span.to, true)}`;
  return (
    <g>
      <title>{`${span.openStart ? "stored before" : "STORED"} ${stamp(span.from, true)}, ${end}, ${age}`}</title>
      <rect class={span.openEnd ? "tl-span tl-still" : "tl-span"} x={x} y={y} width={width} height={bar} rx={2} />
      {span.end?.op === "EVICTED" && <path class="tl-evicted" d={`M${x + width} ${y - 2}v${bar + 4}`} />}
      {width > 64 && (
        <text class="tl-age" x={x + 9} y={y + bar - 3.5}>
          {age}
        </text>
      )}
    </g>
  );
}
