// A fleet that lives: engines that store and evict, some of them in trouble.

const models = ["demo/llama-sim", "Qwen/Qwen3-235B-A22B-Instruct-2507"];

/** Numbers that look random and are the same each time. */
export function random(seed) {
  let state = seed >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) | 0;
    let t = Math.imul(state ^ (state >>> 15), 1 | state);
    t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
    return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
  };
}

export function hash(next, digits = 16) {
  let text = "";
  while (text.length < digits) {
    text += Math.floor(next() * 65536)
      .toString(16)
      .padStart(4, "0");
  }
  return text;
}

const token = (name) =>
  [...Buffer.from(name)]
    .map((c) =>
      /[A-Za-z0-9_-]/.test(String.fromCharCode(c))
        ? String.fromCharCode(c)
        : `%${c.toString(16).toUpperCase().padStart(2, "0")}`,
    )
    .join("");

export class Fleet {
  constructor(scenario) {
    this.scenario = scenario;
    this.next = random(7);
    this.started = Date.now() - 5_400_000;
    this.version = 0;
    this.sources = [];
    this.points = new Map();
    this.moved = [];
    if (scenario !== "empty") {
      this.populate(scenario === "busy" ? 100 : 40);
    }
    this.hot = Array.from({ length: scenario === "empty" ? 0 : 50 }, (_, i) => this.prefix(i));
    const second = Math.floor(Date.now() / 1000);
    for (let s = second - 300; s < second && scenario !== "empty"; s++) {
      this.points.set(s, this.wave(s));
    }
  }

  now() {
    return Date.now();
  }

  wave(s) {
    const load = 1 + 0.45 * Math.sin(s / 37) + 0.2 * Math.sin(s / 7.3) + 0.25 * this.next();
    const stored = Math.round(900 * load * (s % 140 < 12 ? 1.9 : 1));
    return {
      stored,
      evicted: Math.round(stored * (0.72 + 0.2 * this.next())),
      loaded: Math.round(180 * this.next() * load),
    };
  }

  populate(n) {
    const calm = this.scenario === "calm";
    for (let i = 0; i < n; i++) {
      const role = i % 3 === 2 ? "decode" : "prefill";
      const model = models[i % 5 === 4 ? 1 : 0];
      let instance = `${role}-${Math.floor(i / 3) * (role === "decode" ? 1 : 2) + (role === "decode" ? 0 : i % 3)}`;
      if (i === 11 && !calm) {
        instance = "<img src=x onerror=alert(1)>";
      }
      const origin = i % 13 === 12 ? "connector" : "engine";
      const pool = i % 11 === 10 || origin === "connector" ? 0 : 16384;
      const copies = Math.round((pool || 9000) * (0.55 + 0.44 * this.next()));
      const cpu = Math.round(copies * 1.7 * this.next());
      const live = 5000 + Math.round(90000 * this.next());
      const source = {
        id: `default.${token(model)}.${token(instance)}.${i % 8 === 7 ? 1 : 0}.${origin}`,
        cluster: "default",
        model,
        instance,
        dp_rank: i % 8 === 7 ? 1 : 0,
        origin,
        state: "live",
        reason: "",
        epoch: this.started + i * 1733,
        started: true,
        seq: live - 1,
        behind: 0,
        lag_ms: 3 + 9 * this.next(),
        last_event: Date.now(),
        stored: live * 12,
        evicted: live * 12 - copies,
        loaded: origin === "connector" ? live : 0,
        rate: { stored: 0, evicted: 0, loaded: 0 },
        tiers: [
          ...(origin === "connector" ? [] : [{ tier: "GPU", blocks: copies - Math.round(copies / 90), copies }]),
          ...(i % 2 === 0 || origin === "connector" ? [{ tier: "CPU", blocks: cpu, copies: cpu }] : []),
          ...(i % 9 === 0 ? [{ tier: "DISK", blocks: 31000 + i, copies: 31000 + i }] : []),
        ],
        pool,
        block_size: 16,
        copies: "counted",
        ledger: {
          first: 0,
          last: live - 1,
          live,
          recovered: 0,
          held: 0,
          asked: 0,
          lost: 0,
          duplicates: i % 4,
          malformed: 0,
          dropped: 0,
        },
        balanced: true,
        holes: 0,
        digest: { agreed: 3600 + i * 3, differed: 0, last: "agreed" },
        dialect: i % 5 === 4 ? "sglang array" : "vllm map",
        endpoint: `tcp://10.12.${Math.floor(i / 8)}.${10 + (i % 8)}:5557`,
      };
      source.tempo = (origin === "connector" ? 0 : 22) * (0.4 + 1.3 * this.next());
      this.sources.push(source);
    }
    if (!calm) {
      this.break();
    }
    this.shape();
  }

  break() {
    const [a, b, c, d, e, f, g] = [3, 8, 14, 20, 23, 29, 33].map((i) => this.sources[i]);
    Object.assign(a, { state: "gone", reason: "disconnected for 3 min", lag_ms: undefined, tempo: 0 });
    Object.assign(b, { state: "partial", reason: "lost 41..55: the replay does not reach back so far", holes: 0 });
    b.ledger.lost = 15;
    b.ledger.live -= 15;
    Object.assign(c, {
      state: "recovering",
      reason: "asked the replay for 9120..9133",
      holes: 1,
      behind: 14,
      tempo: 0,
    });
    Object.assign(d, { state: "stale", reason: "no word from its subscriber for 61 s", tempo: 0 });
    Object.assign(e, { lag_ms: 2400, behind: 1840 });
    f.ledger.dropped = 7;
    f.digest = { agreed: 3011, differed: 2, last: "agreed" };
    Object.assign(g, {
      started: false,
      seq: 0,
      lag_ms: undefined,
      last_event: 0,
      tiers: [],
      tempo: 0,
      state: "recovering",
      reason: "connected, but no event yet",
    });
    g.ledger = {
      first: 0,
      last: 0,
      live: 0,
      recovered: 0,
      held: 0,
      asked: 0,
      lost: 0,
      duplicates: 0,
      malformed: 0,
      dropped: 0,
    };
    g.digest = { agreed: 0, differed: 0, last: "not compared yet" };
    this.slow = e;
  }

  prefix(i) {
    const blocks = 1 + Math.floor(60 * this.next() ** 2);
    const n = Math.min(this.sources.length, 1 + Math.floor(14 * this.next() ** 2));
    const owners = [...this.sources]
      .filter((s) => s.state !== "gone" && s.tiers.length > 0)
      .sort(() => this.next() - 0.5)
      .slice(0, i === 7 ? 0 : n)
      .map((s) => ({
        id: s.id,
        instance: s.instance,
        tier: s.tiers[Math.floor(this.next() * s.tiers.length)].tier,
        copies: 1 + (this.next() > 0.8),
      }));
    return {
      prefix: hash(this.next),
      model: models[i % 6 === 5 ? 1 : 0],
      blocks,
      tokens: blocks * 16,
      block_size: 16,
      continued: Math.round(4000 / (i + 1) ** 0.8) / 10,
      copies: owners.reduce((sum, o) => sum + o.copies * blocks, 0),
      owners,
      resident_tokens: owners.length * blocks * 16,
      stored: Date.now() - Math.floor(4_000_000 * this.next()),
      last: Date.now() - Math.floor(60_000 * this.next() ** 3),
    };
  }

  step() {
    this.version++;
    if (this.sources.length === 0) {
      return;
    }
    const now = Date.now();
    const second = Math.floor(now / 1000);
    const load = 1 + 0.45 * Math.sin(second / 37) + 0.2 * Math.sin(second / 7.3);
    const point = this.points.get(second) ?? { stored: 0, evicted: 0, loaded: 0 };
    this.moved = [];
    for (const s of this.sources) {
      if (s.tempo === 0) {
        const loads = s.origin === "connector" && this.next() > 0.5;
        if (loads) {
          s.loaded += 8;
          point.loaded += 8;
          this.moved.push([s, "LOADED", 8]);
        }
        s.rate = { stored: 0, evicted: 0, loaded: loads ? 40 : s.origin === "connector" ? s.rate.loaded : 0 };
        continue;
      }
      const stored = Math.floor(s.tempo * 0.1 * load * 2 * this.next() + this.next());
      const evicted = Math.floor(stored * (0.6 + 0.5 * this.next()));
      const gpu = s.tiers[0];
      gpu.copies = Math.min(s.pool || 1e9, Math.max(0, gpu.copies + stored - evicted));
      gpu.blocks = gpu.copies - Math.round(gpu.copies / 90);
      s.stored += stored;
      s.evicted += evicted;
      s.rate = {
        stored: Math.round((s.rate.stored * 0.94 + stored * 10 * 0.06) * 10) / 10,
        evicted: Math.round((s.rate.evicted * 0.94 + evicted * 10 * 0.06) * 10) / 10,
        loaded: 0,
      };
      point.stored += stored;
      point.evicted += evicted;
      if (stored > 0) {
        s.seq++;
        s.ledger.last++;
        s.ledger.live++;
        s.last_event = now;
        s.lag_ms = s === this.slow ? 2000 + 900 * this.next() : Math.round((3 + 9 * this.next() ** 3) * 100) / 100;
        this.moved.push([s, "STORED", stored]);
      }
      if (evicted > 0) {
        this.moved.push([s, "EVICTED", evicted]);
      }
      if (this.version % 10 === 0) {
        s.digest.agreed++;
      }
    }
    this.points.set(second, point);
    this.points.delete(second - 301);
  }

  shape() {
    for (let i = 0; i < 60; i++) {
      this.step();
    }
    this.points.clear();
  }

  prefixes() {
    if (this.version % 10 === 0) {
      for (const p of this.hot) {
        if (this.next() > 0.7) {
          p.last = Date.now();
          p.continued = Math.round((p.continued + this.next()) * 10) / 10;
        } else {
          p.continued = Math.round(p.continued * 0.998 * 10) / 10;
        }
      }
    }
    return [...this.hot].sort((a, b) => b.continued - a.continued);
  }

  services() {
    const bad = this.scenario === "trouble";
    return [
      { name: "nats", state: "ok", reason: "", detail: {} },
      { name: "prefix", state: "ok", reason: "", detail: {} },
      this.scenario === "nohistory" || this.scenario === "empty"
        ? { name: "history", state: "off", reason: "this process has no history role", detail: {} }
        : {
            name: "history",
            state: bad ? "behind" : "ok",
            reason: bad ? "rows are committed 14 s after their events" : "",
            detail: { rows: 81_234_567, lag_seconds: bad ? 14.2 : 0.9, behind_messages: bad ? 5120 : 0 },
          },
    ];
  }

  documents() {
    const documents = new Map();
    const roles = ["subscriber", "prefix", "web", ...(this.scenario === "nohistory" ? [] : ["history"])];
    documents.set("meta", { version: "0.9.0-dev", started: this.started, roles });
    for (const s of this.services()) {
      documents.set(`service/${s.name}`, s);
    }
    for (const { tempo: _, ...s } of this.sources) {
      documents.set(`source/${s.id}`, s);
    }
    for (const [second, point] of this.points) {
      documents.set(`point/${second}`, { ...point });
    }
    const lookups = 12_000 + this.version * 3;
    documents.set(
      "hits",
      this.scenario === "calm" || this.scenario === "busy"
        ? {
            reported: true,
            from: "prefix index",
            window_seconds: 300,
            lookups,
            asked_blocks: lookups * 41,
            matched_blocks: Math.round(lookups * 41 * 0.634),
            asked_tokens: lookups * 667,
            matched_tokens: Math.round(lookups * 41 * 0.634 * 16),
          }
        : {
            reported: false,
            from: "",
            window_seconds: 300,
            lookups: 0,
            asked_blocks: 0,
            matched_blocks: 0,
            asked_tokens: 0,
            matched_tokens: 0,
          },
    );
    documents.set("prefixes", { rows: this.prefixes() });
    if (this.loaded === undefined || Date.now() >= this.loaded.due) {
      this.loaded = { due: Date.now() + 1000, doc: this.loads() };
    }
    documents.set("loads", this.loaded.doc);
    return documents;
  }

  loads() {
    const none = { loads: 0, blocks: 0, bytes: 0, rate: { loads: 0, blocks: 0, bytes: 0 } };
    const doc = { window_seconds: 10, ...none, pairs: [], more: 0, forgotten: 0, slowest: [] };
    if (this.scenario === "empty" || this.scenario === "nohistory") {
      return { ...doc, seconds: { first: 0, bytes: [] } };
    }
    const now = Date.now();
    const second = Math.floor(now / 1000);
    const to = this.sources.filter((s) => s.instance.startsWith("decode")).slice(0, 6);
    const from = [...this.sources.filter((s) => s.instance.startsWith("prefill")).slice(0, 3), this.sources[11]];
    const names = [...from.map((s) => s?.instance ?? ""), "redis://kv-store.cache.svc.cluster.local:6379", ""];
    const wave = (s, n) => Math.max(0, 1 + Math.sin(s / (11 + n)) + 0.4 * Math.sin(s / 3));
    names.forEach((peer, i) => {
      for (const [j, s] of to.entries()) {
        const busy = (i + j) % 4 === 3 ? 0 : wave(second, i + j) / (1 + i);
        const loads = Math.round(busy * 42) / 10;
        const p50 = 0.9 + i * 2.1 + j / 7;
        doc.pairs.push({
          from: peer,
          from_tier: i === 4 ? "STORAGE" : "GPU",
          to: s.instance,
          to_tier: i === 4 ? "CPU" : "GPU",
          id: s.id.replace(/engine$/, "connector"),
          loads: 40_000 + this.version * (i + 1),
          blocks: 960_000 + this.version * 24,
          bytes: 2_013_265_920_000 / (1 + i) ** 3 + this.version * 1e7,
          last: loads > 0 ? now - 200 * i : now - 90_000,
          rate: { loads, blocks: loads * 24, bytes: loads * 24 * 2_097_152 },
          ...(loads > 0
            ? { latency_ms: { p50, p99: p50 * 4.4, max: p50 * 4.9 }, speed: Math.round(1.3e10 / (1 + i)) }
            : {}),
        });
      }
    });
    doc.pairs.sort((a, b) => b.rate.bytes - a.rate.bytes);
    for (const p of doc.pairs) {
      for (const field of ["loads", "blocks", "bytes"]) {
        doc[field] += p[field];
        doc.rate[field] += p.rate[field];
      }
    }
    doc.last = now - 100;
    doc.latency_ms = { p50: 1.28, p99: 41.9, max: 47.3 };
    doc.speed = 9_400_000_000;
    doc.slowest = doc.pairs
      .filter((p) => p.latency_ms)
      .sort((a, b) => b.latency_ms.max - a.latency_ms.max)
      .slice(0, 10)
      .map(({ from: peer, from_tier, to: name, to_tier, id, latency_ms }, n) => ({
        time: now - 4000 * n - 17,
        request: n === 2 ? "" : `cmpl-${hash(random(n + 5), 32)}-0`,
        from: peer,
        from_tier,
        to: name,
        to_tier,
        id,
        blocks: 24 + n,
        bytes: (24 + n) * 2_097_152,
        duration_ms: latency_ms.max,
      }));
    const bytes = Array.from({ length: 300 }, (_, n) => Math.round(8e8 * wave(second - 300 + n, 2)));
    return { ...doc, seconds: { first: second - 300, bytes } };
  }

  tail(filter) {
    const pattern = new RegExp(
      `^${(filter.source || "*")
        .replace(/[.+^${}()|\\]/g, "\\$&")
        .replaceAll("*", ".*")
        .replaceAll("?", ".")}$`,
    );
    const kinds = filter.kinds?.length ? filter.kinds : ["STORED", "EVICTED", "LOADED", "CLEARED"];
    const found = this.moved.filter(
      ([s, kind]) => kinds.includes(kind) && (pattern.test(s.instance) || pattern.test(s.model)),
    );
    const lines = found.map(([s, kind, n]) => ({
      time: new Date(Date.now() - 4).toISOString(),
      received: new Date().toISOString(),
      source: s.id,
      epoch: s.epoch,
      seq: s.seq,
      way: "live",
      kind,
      tier: kind === "LOADED" ? "CPU" : "GPU",
      block_size: 16,
      ...(kind === "LOADED"
        ? { load: { from: "STORAGE", peer: "store-0", bytes: n * 2_097_152, duration_s: 0.004 * n * this.next() } }
        : {}),
      blocks: Array.from({ length: n }, () => ({
        hash: hash(this.next, 16),
        ...(this.next() > 0.5 ? { prefix: this.hot[Math.floor(this.next() * this.hot.length)].prefix } : {}),
        effect: kind === "STORED" ? 1 : kind === "EVICTED" ? -1 : 0,
        ...(kind === "EVICTED" ? { copies_left: 0, age_s: 400 * this.next() } : {}),
      })),
    }));
    return filter.hash ? { lines: [], matched: 0 } : { lines, matched: lines.length };
  }
}
