import type { Service, Source } from "./contract";
import { occupancy, sourceName, trust } from "./fleet";
import { count, lag, percent, plural, rate } from "./format";
import { enginePath, enginesPath } from "./route";

/** act: answers or history are wrong or missing now; watch: they may become so; note: worth knowing. */
export type Weight = "act" | "watch" | "note";

export interface Insight {
  id: string;
  weight: Weight;
  text: string;
  advice: string;
  link?: { href: string; text: string };
}

/** Thresholds are shown beside what they judge. */
const slow = 1000;
const far = 1000;
const full = 0.97;

const serviceLoss: Record<string, string> = {
  nats: "Nothing new arrives, and what is shown is as old as the loss.",
  prefix: "Lookups and this page may be behind.",
  history: "History and Explain don't answer, or answer too late.",
};

const serviceAdvice: Record<string, string> = {
  nats: "Check the NATS server and its address (--nats); everything catches up by itself once it answers.",
  prefix: "Look at the process's log and its CPU: the index catches up by itself when it can.",
  history: "Check ClickHouse and its disk; NATS keeps the events until its retention ends.",
};

/** What is wrong, in plain sentences, with what to do; the gravest first. */
export function insights(sources: readonly Source[], services: readonly Service[]): Insight[] {
  const found: Insight[] = [];
  for (const s of services) {
    if (s.state === "down" || s.state === "behind") {
      found.push({
        id: `service-${s.name}`,
        weight: s.state === "down" ? "act" : "watch",
        text: `${s.name} is ${s.state}${s.reason ? `: ${s.reason}` : ""}. ${serviceLoss[s.name] ?? ""}`.trim(),
        advice: serviceAdvice[s.name] ?? "Look at the process's log.",
      });
    }
  }
  found.push(...stateInsights(sources), ...ledgerInsights(sources), ...lagInsights(sources), ...poolInsights(sources));
  const order: Weight[] = ["act", "watch", "note"];
  return found.sort((a, b) => order.indexOf(a.weight) - order.indexOf(b.weight));
}

function stateInsights(sources: readonly Source[]): Insight[] {
  const found: Insight[] = [];
  const told = (
    state: Source["state"],
    weight: Weight,
    meaning: (it: string) => string,
    advice: (some: Source[]) => string,
  ) => {
    const some = sources.filter((s) => s.state === state);
    if (some.length > 0) {
      const one = some.length === 1;
      found.push({
        id: `state-${state}`,
        weight,
        text: `${subject(some)} ${one ? "is" : "are"} ${state}${reasons(some)}. ${meaning(one ? "it" : "them")}`,
        advice: advice(some),
        link: linkTo(some, state),
      });
    }
  };
  told(
    "gone",
    "act",
    (it) => `Lookups leave ${it} out.`,
    () => "Is the engine up, and does it bind its endpoint? Run kvstrata doctor.",
  );
  told(
    "stale",
    "act",
    (it) => `Answers could be too long, so lookups leave ${it} out.`,
    () => "Check that the subscriber runs and reaches NATS.",
  );
  told(
    "partial",
    "watch",
    () => "Answers may be too short, never too long.",
    (some) =>
      some.some((s) => s.reason?.includes("replay") && !s.reason.includes("reach"))
        ? "Give the engine a replay endpoint, and replay= here; a restart or a cache reset makes it whole."
        : "Raise the engine's buffer_steps; a restart or a cache reset makes it whole.",
  );
  told(
    "recovering",
    "note",
    () => "Answers are the last judged ones.",
    () => "Nothing to do yet: it becomes live by itself, or partial with a reason.",
  );
  return found;
}

function ledgerInsights(sources: readonly Source[]): Insight[] {
  const sum = trust(sources);
  const found: Insight[] = [];
  const past = (id: string, verb: string, batches: (s: Source) => number, advice: string) => {
    const some = sources.filter((s) => batches(s) > 0);
    if (some.length === 0) {
      return;
    }
    const n = some.reduce((total, s) => total + batches(s), 0);
    const over = some.every((s) => s.state === "live");
    found.push({
      id,
      weight: over ? "note" : "watch",
      text: `${plural(n, "batch", "batches")} of ${subject(some)} ${n === 1 ? "was" : "were"} ${verb} in this life${
        over ? `; ${some.length === 1 ? "it is" : "they are"} complete again` : ""
      }.`,
      advice,
      link: linkTo(some, ""),
    });
  };
  past(
    "dropped",
    "dropped on the way to NATS",
    (s) => s.ledger.dropped,
    "NATS was down or too slow; consumers resync from a checkpoint by themselves once it answers.",
  );
  past(
    "lost",
    "lost",
    (s) => s.ledger.lost,
    "What they held is unknown. If it happens again, raise the engine's buffer_steps or give it a replay endpoint.",
  );
  if (sum.differing.length > 0) {
    found.push({
      id: "digest",
      weight: "act",
      text: `The last digest of ${subject(sum.differing)} differed: the index does not hold what the publisher holds.`,
      advice: "It resyncs from a checkpoint by itself. If it stays, keep the log and report it.",
      link: linkTo(sum.differing, ""),
    });
  }
  if (sum.unbalanced.length > 0) {
    found.push({
      id: "ledger",
      weight: "act",
      text: `The ledger of ${subject(sum.unbalanced)} does not add up: a sequence is counted twice or not at all.`,
      advice: "This is a fault of kvstrata: keep the log and report it.",
      link: linkTo(sum.unbalanced, ""),
    });
  }
  return found;
}

function lagInsights(sources: readonly Source[]): Insight[] {
  const sum = trust(sources);
  const found: Insight[] = [];
  if (sum.lag && sum.lag.ms > slow) {
    found.push({
      id: "lag",
      weight: "watch",
      text: `Events of ${sourceName(sum.lag.source)} reached the index ${lag(sum.lag.ms)} after they came (more than ${lag(slow)}).`,
      advice: "Look at the CPU of subscriber, NATS and index; the lag falls by itself once they keep up.",
      link: linkTo([sum.lag.source], ""),
    });
  }
  if (sum.behind > far) {
    found.push({
      id: "behind",
      weight: "watch",
      text: `The index is ${plural(sum.behind, "sequence")} behind its subscribers (more than ${count(far)}).`,
      advice: "It catches up by itself when it can; lookups answer from what it has.",
    });
  }
  return found;
}

function poolInsights(sources: readonly Source[]): Insight[] {
  const gpu = occupancy(sources).find((t) => t.pool > 0);
  if (!gpu || gpu.pooled / gpu.pool < full) {
    return [];
  }
  const flow = sources.reduce(
    (sum, s) => ({ stored: sum.stored + s.rate.stored, evicted: sum.evicted + s.rate.evicted }),
    {
      stored: 0,
      evicted: 0,
    },
  );
  if (flow.stored === 0 || flow.evicted < flow.stored / 2) {
    return [];
  }
  return [
    {
      id: "full",
      weight: "note",
      text: `${gpu.tier} pools are ${percent(gpu.pooled / gpu.pool)} full (more than ${percent(full)}): of ${rate(flow.stored)} blocks stored a second, ${rate(flow.evicted)} push out another.`,
      advice: "A full cache is a used cache. History says how old the evicted blocks were.",
      link: { href: "/history", text: "Open History" },
    },
  ];
}

function subject(some: readonly Source[]): string {
  const [a, b] = some;
  if (a && some.length === 1) {
    return sourceName(a);
  }
  if (a && b && some.length === 2) {
    return `${sourceName(a)} and ${sourceName(b)}`;
  }
  return plural(some.length, "source");
}

function reasons(some: readonly Source[]): string {
  const told = [...new Set(some.map((s) => s.reason).filter((r) => r))];
  return told.length === 0 ? "" : ` (${told.slice(0, 2).join("; ")}${told.length > 2 ? "; …" : ""})`;
}

function linkTo(some: readonly Source[], filter: string): { href: string; text: string } {
  const [only] = some;
  return only && some.length === 1
    ? { href: enginePath(only.id), text: "Open the engine" }
    : { href: enginesPath(filter), text: "Show them" };
}
