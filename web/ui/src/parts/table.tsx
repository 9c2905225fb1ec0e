import type { ComponentChildren, RefObject } from "preact";
import { Icon } from "./icon";

interface ScrollProps {
  label: string;
  children: ComponentChildren;
  class?: string;
  box?: RefObject<HTMLElement | null>;
  onScroll?: () => void;
}

/** A region that scrolls by itself, so that the page need not; it can be focused, so that keys can scroll it. */
export function Scroll({ label, children, class: name = "", box, onScroll }: ScrollProps) {
  return (
    <section
      class={`scroll ${name}`}
      aria-label={label}
      // biome-ignore lint/a11y/noNoninteractiveTabindex: what scrolls must be reachable with keys
      tabIndex={0}
      {...(box ? { ref: box } : {})}
      {...(onScroll ? { onScroll } : {})}
    >
      {children}
    </section>
  );
}

export interface Order {
  key: string;
  falling: boolean;
}

/** An order as the address holds it: lag, or -lag for falling. */
export function readOrder(text: string, fallback: Order): Order {
  if (text === "") {
    return fallback;
  }
  return text.startsWith("-") ? { key: text.slice(1), falling: true } : { key: text, falling: false };
}

export function writeOrder(order: Order): string {
  return (order.falling ? "-" : "") + order.key;
}

/** The order after a click on a column: numbers fall first, words rise first. */
function nextOrder(order: Order, key: string, numeric: boolean): Order {
  return order.key === key ? { key, falling: !order.falling } : { key, falling: numeric };
}

interface HeadProps {
  column: string;
  label: string;
  unit?: string;
  numeric?: boolean;
  order: Order;
  onSort: (order: Order) => void;
}

/** A column's head that sorts by it. */
export function SortHead({ column, label, unit, numeric = false, order, onSort }: HeadProps) {
  const active = order.key === column;
  return (
    <th
      scope="col"
      class={numeric ? "num" : ""}
      aria-sort={active ? (order.falling ? "descending" : "ascending") : "none"}
    >
      <button type="button" class="sort" onClick={() => onSort(nextOrder(order, column, numeric))}>
        <span>
          {label}
          {unit && <span class="unit"> {unit}</span>}
        </span>
        <span class={active ? "sort-mark" : "sort-mark idle"}>
          <Icon name={active && !order.falling ? "up" : "down"} size={11} />
        </span>
      </button>
    </th>
  );
}

const natural = new Intl.Collator("en", { numeric: true });

/** Sorts by a key's values; what is unknown stays last either way, what is equal stays by name. */
export function sorted<T>(
  rows: readonly T[],
  falling: boolean,
  value: (row: T) => string | number | undefined,
  name: (row: T) => string,
): T[] {
  return [...rows].sort((a, b) => {
    const x = value(a);
    const y = value(b);
    if (x === undefined || y === undefined) {
      return x === y ? natural.compare(name(a), name(b)) : x === undefined ? 1 : -1;
    }
    const less = typeof x === "number" && typeof y === "number" ? x - y : natural.compare(String(x), String(y));
    return less === 0 ? natural.compare(name(a), name(b)) : falling ? -less : less;
  });
}
