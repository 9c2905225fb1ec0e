// A server that plays a fleet by docs/api.md, to develop and to look at the dashboard: node dev/mock.mjs [--port 4180]
// [--scenario trouble|calm|empty|nohistory|busy]. It also serves dist, under the policy that the real server sends.
import { readFile } from "node:fs/promises";
import { createServer } from "node:http";
import { extname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { parseArgs } from "node:util";
import { gzipSync } from "node:zlib";
import { WebSocketServer } from "ws";
import { explainAnswer, queryAnswer, queryList } from "./answers.mjs";
import { Fleet } from "./fleet.mjs";

const { values: flags } = parseArgs({
  options: { port: { type: "string", default: "4180" }, scenario: { type: "string", default: "trouble" } },
});
const dist = join(fileURLToPath(new URL(".", import.meta.url)), "..", "dist");
const policy =
  "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; font-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";
const types = {
  ".html": "text/html; charset=utf-8",
  ".js": "text/javascript",
  ".css": "text/css",
  ".svg": "image/svg+xml",
  ".woff2": "font/woff2",
  ".txt": "text/plain",
};

const fleet = new Fleet(flags.scenario);
setInterval(() => fleet.step(), 100);

const server = createServer((request, response) => {
  const url = new URL(request.url, "http://mock");
  serve(url, response, request.headers["accept-encoding"] ?? "").catch((error) => {
    answer(response, 500, { error: String(error) });
  });
});

async function serve(url, response, encodings) {
  const path = url.pathname;
  if (path === "/v1/sources") {
    const wanted = url.searchParams.get("source");
    return answer(response, 200, { sources: fleet.sources.filter((s) => !wanted || s.id === wanted) });
  }
  if (path === "/v1/prefixes") {
    return answer(response, 200, { rows: fleet.prefixes() });
  }
  if (path.startsWith("/v1/") && fleet.scenario === "nohistory") {
    return answer(response, 404, { error: "this process has no history role" });
  }
  if (path === "/v1/queries") {
    return answer(response, 200, { queries: queryList });
  }
  if (path.startsWith("/v1/query/")) {
    await new Promise((done) => setTimeout(done, 150));
    return answer(response, ...queryAnswer(fleet, path.slice("/v1/query/".length), url.searchParams));
  }
  if (path.startsWith("/v1/explain/")) {
    return answer(response, ...explainAnswer(fleet, path.slice("/v1/explain/".length)));
  }
  if (path.startsWith("/v1/")) {
    return answer(response, 404, { error: `no such path: ${path}` });
  }
  const file = extname(path) === "" ? "/index.html" : path;
  try {
    const body = await readFile(join(dist, file));
    const head = {
      "Content-Type": types[extname(file)] ?? "application/octet-stream",
      "Content-Security-Policy": policy,
    };
    const zip = encodings.includes("gzip") && !file.endsWith(".woff2");
    response.writeHead(200, zip ? { ...head, "Content-Encoding": "gzip" } : head).end(zip ? gzipSync(body) : body);
  } catch {
    answer(response, 404, { error: `no such file: ${file}` });
  }
}

function answer(response, status, body) {
  response.writeHead(status, { "Content-Type": "application/json" }).end(JSON.stringify(body));
}

const sockets = new WebSocketServer({ server, path: "/v1/live" });
sockets.on("connection", (socket) => {
  let sent = new Map();
  let tail = null;
  const push = () => {
    const now = fleet.documents();
    const set = {};
    for (const [key, doc] of now) {
      const text = JSON.stringify(doc);
      if (sent.get(key) !== text) {
        set[key] = doc;
        sent.set(key, text);
      }
    }
    const del = [...sent.keys()].filter((key) => !now.has(key));
    for (const key of del) {
      sent.delete(key);
    }
    return { v: fleet.version, now: fleet.now(), set, del };
  };
  socket.send(JSON.stringify({ ...push(), full: true }));
  const timer = setInterval(() => {
    const frame = push();
    if (Object.keys(frame.set).length + frame.del.length > 0) {
      socket.send(JSON.stringify(frame));
    }
    if (tail) {
      const { lines, matched } = fleet.tail(tail);
      if (matched > 0) {
        socket.send(
          JSON.stringify({ tail: { lines: lines.slice(0, 20), matched, shown: Math.min(20, lines.length) } }),
        );
      }
    }
  }, 100);
  socket.on("message", (data) => {
    const asked = JSON.parse(String(data));
    if (asked.tail?.source?.includes("[")) {
      socket.send(JSON.stringify({ error: `source ${asked.tail.source}: syntax error in pattern` }));
      return;
    }
    tail = asked.tail;
  });
  socket.on("close", () => {
    clearInterval(timer);
    sent = new Map();
  });
});

server.listen(Number(flags.port), "127.0.0.1", () =>
  console.log(`mock of ${flags.scenario} at http://127.0.0.1:${flags.port}`),
);
