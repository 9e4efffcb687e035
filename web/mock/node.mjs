// A pretended node for developing the dashboard: plausible values, nothing learns here.

import { summary } from "./pipeline.mjs";
import { network, PEERS_OF, swarm } from "./swarm.mjs";

const now = () => Date.now() / 1000;

export const SCENARIOS = ["training", "startup", "paused", "waiting", "early", "failed", "alarm", "long", "swarm", "crowd", "pipeline", "gap"];

const STAGES = [
  ["Opening the data folder", "/home/ada/.local/share/neuroshard"],
  ["Measuring this computer", "2 cores, 8,000 MB, tier 6,500 MB"],
  ["Collecting demo text", "2.3 MB of documentation found in this Python"],
  ["Learning the vocabulary", "2,048 of 4,096 tokens"],
  ["Cutting the text into shards", ""],
  ["Building the model", ""],
  ["Loading the newest checkpoint", ""],
];

export function startupStages(done) {
  return STAGES.map(([name, detail], index) => ({
    name,
    state: index < done ? "done" : index === done ? "running" : "pending",
    detail: index <= done ? detail : "",
    fraction: index === done ? 0.5 : null,
  }));
}

export function lossAt(step, noise = Math.random()) {
  return 8.32 * Math.exp(-step / 60) + 5.9 * Math.exp(-step / 900) * (1 - Math.exp(-step / 60)) + 2.1 * (1 - Math.exp(-step / 900)) + (noise - 0.5) * 0.35;
}

export function history(steps, start) {
  const stride = Math.max(1, Math.floor(steps / 1000));
  const points = [];
  for (let step = 1; step <= steps; step += stride) {
    points.push({ step, time: start + step * 0.9, loss: lossAt(step), lr: 1e-3, tokens: step * 2048 });
  }
  return points;
}

export function heldOut(steps, start) {
  const points = [];
  for (let step = 0; step <= steps; step += Math.max(50, Math.floor(steps / 60))) {
    const loss = lossAt(Math.max(step, 1), 0.5) + 0.08 + step * 2e-5;
    points.push({ step, time: start + step * 0.9, loss, improvement: 8.32 - loss, standard_error: 0.031 });
  }
  return points;
}

export function status(scenario, steps, started) {
  const starting = scenario === "startup";
  const state = { startup: "starting", paused: "paused", waiting: "waiting_for_data", failed: "failed", gap: "waiting_for_stages" }[scenario] ?? "training";
  const held = starting || scenario === "early" ? [] : heldOut(steps, started);
  return {
    version: "0.1.0", started_at: started, time: now(), uptime_seconds: now() - started, state,
    state_reason: reason(scenario), is_standing_by: false, startup: startupStages(starting ? 3 : 7),
    node_id: "12D3KooWQb1pUWp2vWm3zZ6i8kQ1y6r4P8sPpZ4nE8vK1tq9b7Zc", wallet_id: "9f2c41d07be3a655",
    data_dir: "/home/ada/.local/share/neuroshard", is_demo: scenario !== "waiting" && scenario !== "alarm",
    paused_until: scenario === "paused" ? now() + 540 : null, warnings: [],
    roles: ["driver", "validator"], layers: { start: 0, stop: 6 }, device: "cpu",
    model: starting ? null : model(), memory: starting ? null : memory(), run: starting ? null : run(),
    training: training(state, steps, held), verification: verification(scenario), diloco: diloco(scenario, steps),
    data: starting ? null : data(scenario, steps), checkpoints: checkpoints(scenario, steps), resources: resources(starting),
    pipeline: starting ? null : summary(scenario), network: network(scenario), swarm: swarm(scenario, steps), contribution: null, kindness: { decision: { action: "run", reason: "Nothing holds training up.", rule: "", until: null, share: 1 }, readings: [] },
  };
}

function reason(scenario) {
  return {
    startup: "Learning the vocabulary.", paused: "You paused it from the dashboard.",
    waiting: "The data server does not answer; the node keeps trying by itself.",
    gap: "Layers 5-8 are missing.",
    failed: "The loss was not a number three times in a row; the last good checkpoint is restored.",
  }[scenario] ?? "Training alone on its own run.";
}

const architecture = { hidden_size: 256, layer_count: 6, head_count: 8, key_value_head_count: 4, feed_forward_size: 704, vocabulary_size: 4096, sequence_length: 256, rope_theta: 10000, norm_epsilon: 1e-5 };
const model = () => ({ architecture, parameter_count: 5_412_352, layers: { start: 0, stop: 6 }, roles: ["driver", "validator"] });
const memory = () => ({ tier_mb: 6500, limit_mb: 6568, limit_source: "total minus reserve", need_mb: 1140, resident_mb: 1012, peak_mb: 1098 });
const run = () => ({ run_id: "4b1f9d03c2".repeat(6) + "77aa", is_own: true, is_demo: true, explanation: "It trains a run of its own, because nobody else is in this run." });

function training(state, steps, held) {
  const active = state === "training";
  return {
    steps, tokens: steps * 2048, loss: steps ? lossAt(steps) : null, loss_ema: steps ? lossAt(steps, 0.5) : null, lr: 9.6e-4,
    tokens_per_second: active ? 2240 + Math.random() * 80 : 0, step_seconds: active ? 0.91 : 0, batch_size: 4, sequences_per_step: 8,
    skipped_steps: 0, precision: "fp32", held_out: held, held_out_sequences: 32, unigram_entropy: 6.62,
  };
}

function verification(scenario) {
  if (scenario === "startup" || scenario === "early")
    return { training_verified: false, status: "insufficient_data", reason: "One held-out test so far; two are needed.", action: "Nothing to do: wait for the next tests.", loss_trend: "insufficient_data" };
  if (scenario === "failed")
    return { training_verified: false, status: "diverged", reason: "The loss became infinite.", action: "Start it again with a smaller learning rate.", loss_trend: "needs_attention" };
  return { training_verified: true, status: "verified", reason: "Held-out loss improved by 4.31 ± 0.03 nats a token in two tests running.", action: "Nothing to do.", loss_trend: "improving" };
}

const diloco = (scenario, steps) => ({
  inner_step: steps % 500, inner_steps_total: 500, outer_steps: Math.floor(steps / 500), last_sync: steps > 500 ? now() - 140 : null, members: 1,
  lone_outer: "keep", strategy: "streaming", part: "quarter 3 of 4", codec: "int8",
  explanation: PEERS_OF[scenario] ? "Other nodes hold the same layers: every 500 steps all of them agree on one average." : "Alone: outer steps move the anchor only; there is nobody to synchronise with.",
  state_root: "", certified_root: "", successful_syncs: 0, failed_syncs: 0,
});

function data(scenario, steps) {
  const waiting = scenario === "waiting";
  const download = { name: waiting ? "manifest.json" : "shard_7.pt", bytes_done: waiting ? 0 : 180_000, bytes_total: waiting ? null : 312_000, bytes_per_second: waiting ? 0 : 2.1e6, attempt: waiting ? 4 : 1, error: waiting ? "connection refused by dwquwt9gkkeil.cloudfront.net" : null, retry_at: waiting ? now() + 17 : null };
  return {
    source: waiting ? "https://dwquwt9gkkeil.cloudfront.net" : "http://127.0.0.1:43817", verified: scenario !== "alarm",
    explanation: scenario === "alarm" ? "The manifest carries no signature and no digests: nobody vouches for this text." : "Signed manifest, every shard checked by its digest.",
    is_demo: !waiting && scenario !== "alarm", total_shards: waiting ? 0 : 16, total_tokens: waiting ? 0 : 612_000, held_out_shards: waiting ? 0 : 1, shard: waiting ? null : 5,
    shard_windows_done: steps % 149, shard_windows_total: waiting ? 0 : 149, passes: Math.floor(steps / 300), shards_seen: waiting ? 0 : Math.min(15, 1 + Math.floor(steps / 20)),
    rotations: Math.floor(steps / 20), last_rotation_reason: "all passages of the shard were read", cached_shards: 6, cached_bytes: 1_900_000, cache_limit_bytes: 2_000_000_000,
    next_shard_ready: !waiting, downloads: waiting || steps % 3 === 0 ? [download] : [], files_from_nodes: 0,
    shards: waiting ? [] : shards(), refresh: refresh(scenario), coverage: PEERS_OF[scenario] ? { nodes: 3, shards: 14, copies: [1, 1, 2, 3, 3, 2, 1, 0, 1, 1, 2, 2, 1, 1, 1, 0] } : null,
  };
}

const shards = () => ["in_use", "next", "assigned", "assigned", "held_out", "read"].map((use, at) => {
  const here = use !== "assigned";
  return { shard: 5 + at, use, bytes: here ? 312_000 : null, origin: here ? (at === 1 ? "node" : "source") : null, verified: here };
});

const refresh = (scenario) => ({
  state: scenario === "alarm" ? "refused" : "current", explanation: scenario === "alarm" ? "Refused: the manifest is not signed, although this source was signed before." : "The source has the data of this run, and no newer ones.",
  checked_at: now() - 120, next_at: now() + 180, newest_shards: 16, newest_tokens: 612_000, newest_ids: 4096, updated_at: "2026-01-01",
});

function checkpoints(scenario, steps) {
  const saved = Math.max(0, steps - (steps % 30));
  const generations = saved === 0 ? [] : [0, 30, 60].filter((back) => saved > back).map((back) => ({ step: saved - back, outer_step: Math.floor(saved / 500), time: now() - 20 - back, loss: lossAt(saved - back, 0.5), bytes: 65_100_000, path: `step-${saved - back}` }));
  return {
    folder: "/home/ada/.local/share/neuroshard/checkpoints/9f2c41d07be3a655", generations, last_saved_step: saved || null, last_saved_time: saved ? now() - (steps % 30) * 0.9 : null,
    interval_seconds: 30, could_lose: saved ? `the last ${steps % 30} steps (${Math.round((steps % 30) * 0.9)} seconds of work)` : "everything since the start: no checkpoint yet",
    could_lose_steps: steps % 30, could_lose_seconds: (steps % 30) * 0.9, last_write_seconds: 0.4, last_stall_seconds: 0.021,
    alarm: scenario === "alarm" ? "The disk is full (12 MB free, 70 MB needed): training goes on, but nothing new is saved. Free some space." : null,
    restored: saved ? "Went on from step 412 of the last start." : null,
  };
}

const resources = (starting) => ({
  device: "cpu", device_name: "AMD Ryzen 5 5600", cpu_cores: starting ? 0.9 : 1.9, cpu_threads_limit: 2, disk_free_bytes: 78e9, disk_used_bytes: 204e6,
  gpu_memory_bytes: null, gpu_memory_total_bytes: null, gpu_utilisation: null, threads: [],
});
