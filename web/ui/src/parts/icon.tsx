import type { ComponentChildren } from "preact";
import type { ServiceState, SourceState } from "../contract";
import type { Weight } from "../insight";

function Glyph({ children, size = 14 }: { children: ComponentChildren; size?: number }) {
  return (
    <svg class="glyph" width={size} height={size} viewBox="0 0 14 14" aria-hidden="true" focusable="false">
      {children}
    </svg>
  );
}

const check = <path class="glyph-cut" d="M4 7.2 6.2 9.4 10.1 4.9" />;
const bang = <path class="glyph-cut" d="M7 4.6v3.2M7 10v.4" />;

/** Each state has a shape of its own: it can be told without its colour. */
const shapes: Record<SourceState | "off", ComponentChildren> = {
  live: [<circle key="o" class="glyph-fill" cx="7" cy="7" r="6" />, check],
  recovering: (
    <>
      <circle class="glyph-line" cx="7" cy="7" r="5.1" stroke-dasharray="22 10" />
      <circle class="glyph-fill" cx="7" cy="7" r="1.7" />
    </>
  ),
  partial: (
    <>
      <circle class="glyph-line" cx="7" cy="7" r="5.2" />
      <path class="glyph-fill" d="M7 1.8a5.2 5.2 0 0 1 0 10.4z" />
    </>
  ),
  stale: (
    <>
      <path class="glyph-fill" d="M7 .9 13.4 12.6H.6z" />
      {bang}
    </>
  ),
  gone: (
    <>
      <rect class="glyph-fill" x="1" y="1" width="12" height="12" rx="2" />
      <path class="glyph-cut" d="M4.5 4.5l5 5M9.5 4.5l-5 5" />
    </>
  ),
  off: <path class="glyph-line" d="M2 7h10" />,
};

export function StateGlyph({ state, size = 14 }: { state: SourceState; size?: number }) {
  return (
    <span class={`tone-${state}`}>
      <Glyph size={size}>{shapes[state]}</Glyph>
    </span>
  );
}

/** A state as shape and word. */
export function StateBadge({ state }: { state: SourceState }) {
  return (
    <span class={`badge tone-${state}`}>
      <Glyph>{shapes[state]}</Glyph>
      <span>{state}</span>
    </span>
  );
}

const serviceShape: Record<ServiceState, SourceState | "off"> = {
  ok: "live",
  behind: "partial",
  down: "gone",
  off: "off",
};

export function ServiceGlyph({ state }: { state: ServiceState }) {
  return (
    <span class={`tone-${serviceShape[state]}`}>
      <Glyph>{shapes[serviceShape[state]]}</Glyph>
    </span>
  );
}

const weightShape: Record<Weight, SourceState> = { act: "gone", watch: "stale", note: "recovering" };

export function WeightGlyph({ weight }: { weight: Weight }) {
  return (
    <span class={`tone-${weightShape[weight]}`}>
      <Glyph size={16}>{shapes[weightShape[weight]]}</Glyph>
    </span>
  );
}

const drawings = {
  pause: <path d="M4.5 3v8M9.5 3v8" />,
  play: <path d="M4 2.5 11 7l-7 4.5z" />,
  copy: <path d="M5 5V2.5h6.5V9H9M2.5 5H9v6.5H2.5z" />,
  done: <path d="M3 7.5 6 10.5 11.5 4" />,
  close: <path d="M3 3l8 8M11 3l-8 8" />,
  auto: (
    <>
      <circle cx="7" cy="7" r="5" />
      <path class="icon-fill" d="M7 2a5 5 0 0 1 0 10z" />
    </>
  ),
  light: (
    <>
      <circle cx="7" cy="7" r="2.6" />
      <path d="M7 .8v1.6M7 11.6v1.6M.8 7h1.6M11.6 7h1.6M2.6 2.6l1.1 1.1M10.3 10.3l1.1 1.1M11.4 2.6l-1.1 1.1M3.7 10.3l-1.1 1.1" />
    </>
  ),
  dark: <path d="M11.8 8.6A5.2 5.2 0 0 1 5.4 2.2a5.2 5.2 0 1 0 6.4 6.4z" />,
  up: <path d="M7 11V3.5M3.8 6.5 7 3.3l3.2 3.2" />,
  down: <path d="M7 3v7.5M3.8 7.5 7 10.7l3.2-3.2" />,
  save: <path d="M7 2v6.5M4 6 7 9l3-3M2.5 11.8h9" />,
} as const;

export function Icon({ name, size = 14 }: { name: keyof typeof drawings; size?: number }) {
  return (
    <svg class="icon" width={size} height={size} viewBox="0 0 14 14" aria-hidden="true" focusable="false">
      {drawings[name]}
    </svg>
  );
}

/** The product's mark: strata. */
export function Mark() {
  return (
    <svg class="mark" width="22" height="22" viewBox="0 0 22 22" aria-hidden="true" focusable="false">
      <rect class="mark-a" x="1" y="3" width="14" height="4" rx="1.5" />
      <rect class="mark-b" x="4" y="9" width="17" height="4" rx="1.5" />
      <rect class="mark-c" x="1" y="15" width="11" height="4" rx="1.5" />
    </svg>
  );
}
