// Pretended stages and microbatches, for developing the view of the pipeline: scenarios "pipeline", "gap" and "crowd".

const LAYERS = 12;
const RECENT = 32;
const OWN = "12D3KooWQb1pUWp2vWm3zZ6i8kQ1y6r4P8sPpZ4nE8vK1tq9b7Zc";
const now = () => Date.now() / 1000;

const node = (stage, replica) => (stage === 0 && replica === 0 ? OWN : `12D3KooWStage${stage}Replica${replica}`.padEnd(52, "x"));

function sizes(scenario) {
  if (scenario === "crowd") return [64, 200];
  return ["pipeline", "gap"].includes(scenario) ? [3, 2] : [1, 1];
}

function stages(scenario) {
  const [count, replicas] = sizes(scenario);
  const size = count > LAYERS ? 1 : LAYERS / count;
  return Array.from({ length: count }, (_, stage) => {
    const isMissing = scenario === "gap" && stage === 1;
    const holders = Array.from({ length: isMissing ? 1 : replicas }, (_, replica) => node(stage, replica));
    return {
      stage, layers: { start: stage * size, stop: (stage + 1) * size }, roles: [], holders, paused: [], joining: isMissing ? holders : [],
      is_here: stage === 0, is_missing: isMissing, is_resting: false, has_single_holder: !isMissing && replicas === 1,
      has_copy: !isMissing && replicas === 1 ? stage !== 1 : null, copy_age_seconds: !isMissing && replicas === 1 && stage !== 1 ? 12 : null,
    };
  });
}

export function summary(scenario) {
  const missing = stages(scenario).filter((stage) => stage.is_missing).map((stage) => stage.layers);
  return { stage_count: sizes(scenario)[0], missing: missing.length > 0 ? "Layers 5-8 are missing." : "", missing_layers: missing };
}

function hop({ stage, holders }) {
  const slow = stage === 1 ? 2 : 1;
  return {
    stage, node_id: holders[Math.floor(Math.random() * holders.length)], compute_seconds: 0.12 * slow, wait_seconds: (0.05 + Math.random() * 0.1) * slow * slow,
    wire_seconds: stage === 0 ? 0 : 0.02 + Math.random() * 0.02, recompute_seconds: 0, bytes_sent: 262_144, bytes_received: 262_144,
  };
}

const seconds = (one) => one.compute_seconds + one.wait_seconds + one.wire_seconds;

function passage(all, number) {
  const hops = all.map(hop);
  const other = number % 11 === 10 ? 0.4 : 0;
  const takeovers = other > 0 && all.length > 1 ? [{ stage: 1, before: node(1, 7), after: hops[1].node_id, is_exact: number % 2 === 0 }] : [];
  return {
    session: 1 + Math.floor(number / 8), microbatch: 1 + (number % 8), ended_at: now() - (RECENT - number) * 1.8, seconds: hops.reduce((sum, one) => sum + seconds(one), other),
    other_seconds: other, tokens: 1024, hops, takeovers, failures: takeovers.length,
  };
}

function flow(scenario) {
  const all = stages(scenario);
  const recent = scenario === "gap" ? [] : Array.from({ length: RECENT }, (_, number) => passage(all, number));
  const mean = (stage, part) => recent.reduce((sum, one) => sum + one.hops[stage][part], 0) / recent.length;
  const parts = ["compute_seconds", "wait_seconds", "wire_seconds"];
  const loads = recent.length === 0 ? [] : all.map(({ stage, holders }) => ({ stage, nodes: holders.length, ...Object.fromEntries(parts.map((part) => [part, mean(stage, part)])) }));
  const known = recent.length > 0;
  return {
    window_seconds: 60, microbatches: recent.length, tokens: recent.length * 1024, tokens_per_second: (recent.length * 1024) / 60, bubble_share: known ? 0.44 : null,
    recompute_share: known ? 0 : null, wire_bytes_per_token: known ? 1024 * (all.length - 1) : null, loads,
    bottleneck: known && all.length > 1 ? { stage: 1, node_id: node(1, 0), seconds: loads[1].compute_seconds + loads[1].wait_seconds, share: 0.52 } : null,
    exact_takeovers: 2, approximate_takeovers: 1, failures: 4, given_up: 0, unanswered: [], recent,
  };
}

export function pipeline(scenario, steps) {
  const all = stages(scenario);
  const layers = all[all.length - 1].layers.stop;
  return {
    ...summary(scenario), stages: all, layer_count: layers, layers_covered: layers, coverage: 1, complete: scenario !== "gap", flow: flow(scenario),
    own_stages: [{ stage: 0, layers: all[0].layers, steps, outer_step: 1, loss: 3.6, grad_norm: 0.4, sequences_accumulated: steps % 8, sequences_wanted: 8, open_microbatches: 2, sessions: 1, last_saved_step: steps - (steps % 30) }],
  };
}
