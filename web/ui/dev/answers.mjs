// Answers of the history API, made up so that each kind of column and chart occurs.
import { hash, random } from "./fleet.mjs";

const since = { name: "since", kind: "duration", default: "1h", help: "how far back, or from when" };

export const queryList = [
  {
    name: "events",
    title: "Events over time",
    help: "Blocks stored, evicted and loaded in each interval",
    params: [since, { name: "step", kind: "duration", default: "30s", help: "length of an interval" }],
  },
  {
    name: "evictions",
    title: "Age at eviction",
    help: "How long blocks lived before they were pushed out",
    params: [since, { name: "tier", kind: "text", default: "GPU", help: "only this tier" }],
  },
  { name: "engines", title: "Evictions by engine", help: "Which engines evict most, and how soon", params: [since] },
  { name: "rates", title: "Stored by engine over time", help: "One line an engine", params: [since] },
  {
    name: "thrash",
    title: "Thrash",
    help: "Blocks stored again soon after they were evicted",
    params: [since, { name: "within", kind: "duration", default: "60s", help: "how soon is soon" }],
  },
  {
    name: "capacity",
    title: "What would more memory bring",
    help: "Estimated hit rate for pool sizes, from reuse distances",
    params: [since, { name: "sample", kind: "number", default: "0.01", help: "share of hashes looked at" }],
  },
  { name: "ledger", title: "Gaps and losses", help: "Sequences that did not come, and why", params: [since] },
  {
    name: "block",
    title: "Children of a block",
    help: "Runs that continued it",
    params: [since, { name: "hash", kind: "hash", default: "", help: "the block" }],
  },
];

const seconds = (text) => {
  const m = /^(\d+(?:\.\d+)?)(s|m|h|d)$/.exec(text);
  return m ? Number(m[1]) * { s: 1, m: 60, h: 3600, d: 86400 }[m[2]] : Number.NaN;
};

export function queryAnswer(fleet, name, params) {
  const info = queryList.find((q) => q.name === name);
  if (!info) {
    return [404, { error: `no query is named ${name}; GET /v1/queries lists them` }];
  }
  const now = Date.now();
  const until = params.has("until") ? Date.parse(params.get("until")) : now;
  const back = params.get("since") ?? "1h";
  const from = Number.isNaN(seconds(back)) ? Date.parse(back) : until - seconds(back) * 1000;
  if (Number.isNaN(from) || Number.isNaN(until)) {
    return [400, { error: `since: ${back} is neither a duration (15m) nor a time (2026-11-29T12:00:00Z)` }];
  }
  if (name === "thrash" && until - from > 6 * 3_600_000) {
    return [422, { error: "the query would read 2.1 billion rows, more than the 1 GiB that it may use" }];
  }
  if (name === "ledger" && back === "24h") {
    return [503, { error: "ClickHouse does not answer: dial tcp 127.0.0.1:9000: connection refused" }];
  }
  const next = random(name.length * 31);
  const made = answers[name](fleet, from, until, next, params);
  return [
    200,
    {
      query: name,
      title: info.title,
      since: from,
      until,
      exactness: "exact",
      notes: [],
      truncated: false,
      elapsed_ms: 12.5 + 80 * next(),
      sql: `SELECT toStartOfInterval(time, INTERVAL 30 SECOND) AS t,\n       sumIf(blocks, op = 'STORED') AS stored\nFROM   kv_events\nWHERE  committed >= fromUnixTimestamp64Milli(${from})\n  AND  committed < fromUnixTimestamp64Milli(${until})\nGROUP  BY t\nORDER  BY t`,
      ...made,
    },
  ];
}

const column = (name, kind, unit) => ({ name, kind, ...(unit ? { unit } : {}) });

const answers = {
  events(_, from, until, next) {
    const step = Math.max(30_000, Math.round((until - from) / 120_000) * 1000);
    const rows = [];
    for (let t = Math.ceil(from / step) * step; t < until; t += step) {
      const load = 1 + 0.4 * Math.sin(t / 400_000) + 0.2 * next();
      rows.push([
        t,
        Math.round(27_000 * load),
        Math.round(25_000 * load * (0.9 + 0.2 * next())),
        Math.round(4000 * next()),
      ]);
    }
    return {
      columns: [
        column("time", "time"),
        column("stored", "number", "blocks"),
        column("evicted", "number", "blocks"),
        column("loaded", "number", "blocks"),
      ],
      rows,
      chart: { kind: "line", x: "time", y: ["stored", "evicted", "loaded"] },
    };
  },
  evictions(_, __, ___, next) {
    const edges = ["< 1 s", "1 s", "5 s", "15 s", "30 s", "1 min", "5 min", "15 min", "1 h"];
    return {
      columns: [column("age", "text"), column("blocks", "number", "blocks"), column("share", "ratio")],
      rows: edges.map((e, i) => [
        e,
        Math.round(90_000 * Math.exp(-((i - 5) ** 2) / 5) * (0.8 + 0.4 * next())),
        Math.exp(-((i - 5) ** 2) / 5) / 4,
      ]),
      chart: { kind: "bar", x: "age", y: ["blocks"] },
      notes: ["Blocks cleared by a resync are not counted: nobody evicted them."],
    };
  },
  engines(fleet, _, __, next) {
    return {
      columns: [
        column("engine", "text"),
        column("evicted", "number", "blocks"),
        column("median_age", "seconds"),
        column("bytes", "bytes"),
        column("within_a_minute", "ratio"),
        column("example", "hash"),
      ],
      rows: fleet.sources
        .slice(0, 20)
        .map((s) => [
          s.instance,
          Math.round(90_000 * next()),
          400 * next(),
          Math.round(1e12 * next()),
          next() > 0.9 ? null : next(),
          hash(next),
        ]),
      chart: { kind: "bar", x: "engine", y: ["evicted"] },
    };
  },
  rates(fleet, from, until, next) {
    const rows = [];
    for (let t = Math.ceil(from / 60_000) * 60_000; t < until; t += 60_000) {
      for (const s of fleet.sources.slice(0, 4)) {
        rows.push([t, s.instance, Math.round(s.tempo * 60 * (0.8 + 0.5 * next()))]);
      }
    }
    return {
      columns: [column("time", "time"), column("engine", "text"), column("stored", "number", "blocks")],
      rows,
      chart: { kind: "line", x: "time", y: ["stored"] },
    };
  },
  thrash(_, from, until, next) {
    const rows = [];
    for (let t = Math.ceil(from / 60_000) * 60_000; t < until; t += 60_000) {
      rows.push([t, 0.05 + 0.1 * next(), Math.round(900 * next())]);
    }
    return {
      columns: [column("time", "time"), column("thrash", "ratio"), column("blocks", "number", "blocks")],
      rows,
      chart: { kind: "bar", x: "time", y: ["blocks"] },
      exactness: "sampled 1 %",
    };
  },
  capacity(_, __, ___, next) {
    const rows = [];
    for (let pool = 4096; pool <= 262_144; pool *= 1.25) {
      rows.push([
        Math.round(pool),
        0.82 * (1 - Math.exp(-pool / 48_000)) + 0.004 * next(),
        Math.round(pool * 2_097_152),
      ]);
    }
    return {
      columns: [column("pool", "number", "blocks"), column("hit_rate", "ratio"), column("memory", "bytes")],
      rows,
      chart: { kind: "line", x: "pool", y: ["hit_rate"] },
      exactness: "estimated from 1 % of hashes, ± 0.4 percentage points",
      notes: [
        "Reuse is seen by stores, loads and lookups only; hits inside an engine leave no event, so true rates are higher.",
      ],
    };
  },
  ledger() {
    return {
      columns: [
        column("time", "time"),
        column("engine", "text"),
        column("first", "number"),
        column("last", "number"),
        column("reason", "text"),
      ],
      rows: [],
      chart: { kind: "none" },
    };
  },
  block(fleet, _, __, ___, params) {
    return {
      columns: [column("prefix", "hash"), column("runs", "number"), column("last", "time"), column("engine", "text")],
      rows: fleet.hot.slice(0, 12).map((p) => [p.prefix, Math.round(p.continued), p.last, "=HYPERLINK(evil)"]),
      chart: { kind: "none" },
      notes: params.get("hash") ? [] : ["No hash was given: children of the empty prompt."],
      truncated: true,
    };
  },
};

export function explainAnswer(fleet, name) {
  if (!/^([0-9a-f]{2})+$/i.test(name)) {
    return [400, { error: `hash ${name}: want hexadecimal digits` }];
  }
  if (name.startsWith("0000")) {
    return [
      200,
      {
        hash: name,
        found: false,
        summary: [],
        names: [],
        resident: [],
        parent: null,
        events: [],
        truncated: false,
        elapsed_ms: 3.1,
      },
    ];
  }
  const next = random(Number.parseInt(name.slice(0, 6), 16));
  const now = Date.now();
  const some = fleet.sources.filter((s) => s.origin === "engine" && s.tiers.length > 0).sort(() => next() - 0.5);
  const events = [];
  const resident = [];
  const begin = now - 3_100_000;
  for (const [i, s] of some.slice(0, 5).entries()) {
    let t = begin + Math.floor(900_000 * next() * (i + 0.2));
    let seq = 100 + Math.floor(900 * next());
    const add = (op, tier, effect, copies, extra = {}) => {
      events.push({
        time: t,
        id: s.id,
        instance: s.instance,
        op,
        tier,
        group: 0,
        effect,
        copies,
        age: null,
        epoch: s.epoch,
        seq: seq++,
        reason: "",
        ...extra,
      });
    };
    while (t < now) {
      const stay = 60_000 + Math.floor(900_000 * next());
      add("STORED", "GPU", 1, 1);
      if (i === 2) {
        t += 400;
        add("STORED", "CPU", 1, 1);
      }
      if (t + stay > now || i === 0) {
        resident.push({ id: s.id, instance: s.instance, tier: "GPU", copies: 1, since: t });
        if (i === 2) {
          resident.push({ id: s.id, instance: s.instance, tier: "CPU", copies: 1, since: t });
        }
        break;
      }
      t += stay;
      if (i === 3) {
        events.push({
          time: t,
          id: s.id,
          instance: s.instance,
          op: "CLEARED",
          tier: "",
          group: 0,
          effect: 0,
          copies: 0,
          age: null,
          epoch: s.epoch,
          seq: seq++,
          reason: "resync: lost 41..55",
        });
      } else {
        add("EVICTED", "GPU", -1, 0, { age: stay / 1000 });
        if (i === 2) {
          add("EVICTED", "CPU", -1, 0, { age: stay / 1000 });
        }
      }
      t += 40_000 + Math.floor(500_000 * next());
      if (i === 1 && t < now) {
        add("LOADED", "GPU", 0, 0, { reason: "from STORAGE of store-0" });
        t += 300;
      }
    }
  }
  events.sort((a, b) => a.time - b.time);
  const stores = events.filter((e) => e.op === "STORED").length;
  return [
    200,
    {
      hash: name,
      found: true,
      summary: [
        `Stored ${stores} times on 5 engines, first 52 min ago.`,
        `Resident now on ${new Set(resident.map((r) => r.id)).size} engines; evicted ${events.filter((e) => e.op === "EVICTED").length} times, after 7 min 12 s in the median.`,
        "Once it was cleared by a resync: that was no eviction, the engine's events were lost.",
      ],
      names: [{ prefix: name.slice(0, 16), engine_hash: hash(next, 64), model: "demo/llama-sim" }],
      resident,
      parent: { engine_hash: hash(next), prefix: hash(next) },
      events,
      truncated: false,
      elapsed_ms: 18.25,
    },
  ];
}
