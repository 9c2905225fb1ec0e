const grouped = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const digits = [0, 1, 2, 3].map(
  (n) => new Intl.NumberFormat("en-US", { minimumFractionDigits: n, maximumFractionDigits: n }),
);

/** A gap that neither wraps nor stretches, between a number and its unit. */
const gap = "\u00a0";

/** What is shown where a value is unknown. */
export const unknown = "–";

export function count(n: number): string {
  return grouped.format(n);
}

/** n with this many digits after the point. */
export function fixed(n: number, places: number): string {
  return (digits[places] ?? grouped).format(n);
}

/** From which size on a count is told in which unit. The first is late: five digits are read as they are. */
const sizes: readonly [from: number, unit: number, sign: string][] = [
  [999.5e9, 1e12, "T"],
  [999.5e6, 1e9, "G"],
  [999.5e3, 1e6, "M"],
  [1e5, 1e3, "k"],
];

/** A count in three digits and a sign where it has more than five: 12,345 · 1.23 M. */
export function short(n: number): string {
  const size = sizes.find(([from]) => Math.abs(n) >= from);
  if (!size) {
    return grouped.format(n);
  }
  const scaled = n / size[1];
  const places = Math.abs(scaled) >= 99.95 ? 0 : Math.abs(scaled) >= 9.995 ? 1 : 2;
  return `${fixed(scaled, places)}${gap}${size[2]}`;
}

/** A count in as little room as it takes, where the exact one stands nearby. */
export function terse(n: number): string {
  return Math.abs(n) >= 10_000 && Math.abs(n) < 1e5 ? `${fixed(n / 1000, 0)}${gap}k` : short(n);
}

/** A rate: small ones keep a digit after the point. */
export function rate(n: number): string {
  if (n === 0) {
    return "0";
  }
  if (Math.abs(n) < 0.05) {
    return "< 0.1";
  }
  return Math.abs(n) < 10 ? fixed(n, 1) : short(Math.round(n));
}

/** A share of 1 in percent, never rounded up to a whole that it is not. */
export function percent(share: number): string {
  if (!Number.isFinite(share)) {
    return unknown;
  }
  const p = share * 100;
  if (p > 0 && p < 0.1) {
    return `< 0.1${gap}%`;
  }
  if (p < 100 && p > 99.9) {
    return `> 99.9${gap}%`;
  }
  return `${fixed(p, p === 0 || p >= 100 ? 0 : 1)}${gap}%`;
}

/** Milliseconds for a lag: µs, ms, s, then as a duration. */
export function lag(ms: number): string {
  if (ms < 1) {
    return `${fixed(ms * 1000, 0)}${gap}µs`;
  }
  if (ms < 100) {
    return `${fixed(ms, 1)}${gap}ms`;
  }
  if (ms < 1000) {
    return `${fixed(ms, 0)}${gap}ms`;
  }
  return duration(ms / 1000);
}

/** Seconds in the two largest units that say something. */
export function duration(seconds: number): string {
  const s = Math.max(0, seconds);
  if (s < 1) {
    return s === 0 ? `0${gap}s` : `${fixed(s * 1000, 0)}${gap}ms`;
  }
  if (s < 10) {
    return `${fixed(s, 1)}${gap}s`;
  }
  if (s < 60) {
    return `${fixed(Math.floor(s), 0)}${gap}s`;
  }
  const steps: [number, string, number, string][] = [
    [86400, "d", 3600, "h"],
    [3600, "h", 60, "min"],
    [60, "min", 1, "s"],
  ];
  for (const [big, bigName, small, smallName] of steps) {
    if (s >= big) {
      const rest = Math.floor((s % big) / small);
      const head = `${count(Math.floor(s / big))}${gap}${bigName}`;
      return rest === 0 ? head : `${head} ${rest}${gap}${smallName}`;
    }
  }
  return unknown;
}

/** Decimal multiples, as links and memories are rated: 1.24 GB/s. Three digits. */
export function decimal(n: number, unit: string): string {
  const signs = ["", "k", "M", "G", "T", "P", "E"];
  let size = n;
  let sign = 0;
  while (Math.abs(size) >= 999.5 && sign < signs.length - 1) {
    size /= 1000;
    sign++;
  }
  const places = Math.abs(size) >= 99.95 ? 0 : Math.abs(size) >= 9.995 ? 1 : 2;
  return `${fixed(size, sign === 0 && (Number.isInteger(size) || size >= 10) ? 0 : places)}${gap}${signs[sign]}${unit}`;
}

export function bytes(n: number): string {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let size = n;
  let unit = 0;
  while (Math.abs(size) >= 1024 && unit < units.length - 1) {
    size /= 1024;
    unit++;
  }
  return `${unit === 0 ? count(size) : fixed(size, size >= 100 ? 0 : 1)}${gap}${units[unit]}`;
}

const two = (n: number) => String(n).padStart(2, "0");

/** Local time of day, with milliseconds where asked. */
export function clock(ms: number, millis = false): string {
  const d = new Date(ms);
  const text = `${two(d.getHours())}:${two(d.getMinutes())}:${two(d.getSeconds())}`;
  return millis ? `${text}.${String(d.getMilliseconds()).padStart(3, "0")}` : text;
}

/** Local date and time, as ISO 8601 without its T. */
export function stamp(ms: number, millis = false): string {
  const d = new Date(ms);
  return `${d.getFullYear()}-${two(d.getMonth() + 1)}-${two(d.getDate())} ${clock(ms, millis)}`;
}

/** Hours that local time is ahead of UTC, as people write it. */
export function zone(at: Date): string {
  const minutes = -at.getTimezoneOffset();
  const rest = Math.abs(minutes) % 60;
  return `UTC${minutes < 0 ? "−" : "+"}${Math.floor(Math.abs(minutes) / 60)}${rest ? `:${two(rest)}` : ""}`;
}

/** The start of a hash that is too long for a line. */
export function shortHash(hash: string): string {
  return hash.length > 16 ? `${hash.slice(0, 16)}…` : hash;
}

export function plural(n: number, one: string, many = `${one}s`): string {
  return `${count(n)}${gap}${n === 1 ? one : many}`;
}
