// Development server with the node's routes: `npm run build && npm run mock -- --scenario startup --port 8123`.
// It serves the built dashboard under the same Content-Security-Policy as the node does.

import { readFile } from "node:fs/promises";
import { createServer } from "node:http";
import { extname, join, normalize } from "node:path";
import { fileURLToPath } from "node:url";
import { history, lossAt, SCENARIOS, status } from "./node.mjs";
import { pipeline } from "./pipeline.mjs";
import { rounds } from "./rounds.mjs";
import { network, peers, swarm } from "./swarm.mjs";

const option = (name, fallback) => {
  const index = process.argv.indexOf(`--${name}`);
  return index > 0 ? process.argv[index + 1] : fallback;
};
let scenario = option("scenario", "training");
if (!SCENARIOS.includes(scenario)) throw new Error(`--scenario is one of ${SCENARIOS.join(", ")}`);
const port = Number(option("port", "8123"));
const root = fileURLToPath(new URL("../../neuroshard/api/static/", import.meta.url));
const TYPES = { ".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml" };
const started = Date.now() / 1000 - 900;
let steps = { startup: 0, waiting: 0, early: 14, long: 9_800 }[scenario] ?? 764;
const crowd = peers(scenario);

setInterval(() => {
  if (["training", "early", "long", "alarm", "swarm", "crowd", "pipeline"].includes(scenario)) steps += 1;
}, 900);

const logs = Array.from({ length: 240 }, (_, index) => ({
  sequence: index + 1, time: started + index * 3, level: index % 41 === 40 ? "WARNING" : "INFO", logger: "neuroshard.training",
  message: index % 41 === 40 ? "a shard download was cut off; resuming at byte 65,536" : `step ${index * 3}: loss ${lossAt(index * 3 + 1).toFixed(3)}, 2,251 tokens/s`,
}));

const globalView = () => {
  const all = swarm(scenario, steps);
  return {
    training_nodes: all.training_nodes, global_loss: steps ? all.global_loss : null, global_min_loss: all.min_loss, total_steps: all.total_steps,
    total_tokens: all.total_tokens, data_shards: 16, data_shards_covered: Math.min(15, 1 + Math.floor(steps / 20)), is_converging: true,
  };
};

const ANSWERS = {
  "GET /api/session": () => ({ authenticated: true, secret_required: false, csrf_token: "mock", setup: false }),
  "GET /api/status": () => status(scenario, steps, started),
  "GET /api/training/history": () => ({ points: history(steps, started), held_out: [] }),
  "GET /api/training/global": globalView,
  "GET /api/peers": () => ({ count: crowd.length, network: network(scenario), swarm: swarm(scenario, steps), peers: crowd }),
  "GET /api/pipeline": () => pipeline(scenario, steps),
  "GET /api/rounds": () => rounds(scenario),
  "GET /api/contribution": () => ({ span: "day", width_seconds: 300, points: [], total: null }),
  "GET /api/samples": () => ({ prompts: ["Once upon a time"], samples: [], next_step: 0, explanation: "" }),
  "GET /api/logs": () => ({ records: logs, last_sequence: logs.length }),
  "GET /api/config": () => ({
    port: { value: 8000, source: "environment", allowed: "0 to 65535", applies: "after a restart" },
    memory: { value: null, source: "default", allowed: "megabytes, at least 1; unset: measured", applies: "after a restart" },
    cpu_threads: { value: 2, source: "flag", allowed: "1 to 1024; unset: measured", applies: "after a restart" },
    max_storage: { value: 2000, source: "default", allowed: "megabytes of cached shards, at least 20", applies: "at once" },
    data_dir: { value: "/home/ada/.local/share/neuroshard", source: "default", allowed: "a folder", applies: "only as a flag or an environment variable" },
  }),
  "GET /health": () => ({ status: "ok" }),
  "POST /api/training/pause": () => command("paused", "Training is paused; nothing is lost."),
  "POST /api/training/resume": () => command("training", "Training goes on."),
  "POST /api/checkpoints": () => ({ state: scenario, message: `Saved a checkpoint at step ${steps}.` }),
  "PATCH /api/config": () => ({ state: scenario, message: "Stored; it holds after a restart." }),
  "POST /api/shutdown": () => {
    setTimeout(() => process.exit(0), 400);
    return { state: "stopping", message: "Saving a final checkpoint, then stopping." };
  },
};

function command(state, message) {
  scenario = state;
  return { state, message };
}

createServer(async (request, response) => {
  const path = new URL(request.url, "http://localhost").pathname;
  response.setHeader("Content-Security-Policy", "default-src 'self'; img-src 'self' data:; object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'");
  const answer = ANSWERS[`${request.method} ${path}`];
  if (path === "/api/events") return streamEvents(response);
  if (path === "/v1/completions") return streamCompletion(response);
  if (answer) {
    response.writeHead(request.method === "POST" ? 202 : 200, { "Content-Type": "application/json" });
    return response.end(JSON.stringify(answer()));
  }
  return serveFile(path === "/" ? "/index.html" : path, response);
}).listen(port, "127.0.0.1", () => console.log(`http://127.0.0.1:${port} (${scenario})`));

function streamEvents(response) {
  response.writeHead(200, { "Content-Type": "text/event-stream", "Cache-Control": "no-store" });
  let seen = steps;
  const timer = setInterval(() => {
    response.write(`event: status\ndata: ${JSON.stringify(status(scenario, steps, started))}\n\n`);
    const changed = crowd.filter(() => Math.random() < 0.1).map((peer) => Object.assign(peer, { steps: peer.steps + 1, last_seen: Date.now() / 1000 }));
    if (changed.length > 0) response.write(`event: peers\ndata: ${JSON.stringify({ count: crowd.length, changed, gone: [] })}\n\n`);
    for (; seen < steps; seen++) {
      const point = { step: seen + 1, time: Date.now() / 1000, loss: lossAt(seen + 1), lr: 1e-3, tokens: seen * 2048 };
      response.write(`event: loss\ndata: ${JSON.stringify({ points: [point] })}\n\n`);
    }
  }, 1000);
  response.on("close", () => clearInterval(timer));
}

function streamCompletion(response) {
  response.writeHead(200, { "Content-Type": "text/event-stream" });
  const words = " a list of the arguments and the name of the file is returned when the object is not a string".split(/(?= )/);
  const timer = setInterval(() => {
    const word = words.shift();
    const choice = { text: word ?? "", index: 0, finish_reason: word ? null : "length" };
    response.write(`data: ${JSON.stringify({ choices: [choice] })}\n\n`);
    if (word) return;
    clearInterval(timer);
    response.end("data: [DONE]\n\n");
  }, 80);
  response.on("close", () => clearInterval(timer));
}

async function serveFile(path, response) {
  try {
    const body = await readFile(join(root, normalize(path)));
    response.writeHead(200, { "Content-Type": TYPES[extname(path)] ?? "application/octet-stream" });
    response.end(body);
  } catch {
    response.writeHead(404).end();
  }
}
