// Pretended other nodes, for developing the views of the network.

export const PEERS_OF = { swarm: 4, crowd: 1_000, pipeline: 5, gap: 3 };

const KINDS = ["direct", "punched", "relayed", null];
const STANDINGS = ["good", "neutral", "good", "doubtful", "good"];
const now = () => Date.now() / 1000;

export function peers(scenario) {
  return Array.from({ length: PEERS_OF[scenario] ?? 0 }, (_, index) => peer(index));
}

function peer(index) {
  const connection = KINDS[index % 4];
  const id = (index * 7919 + 104_729).toString(36).padStart(8, "q");
  return {
    node_id: `12D3KooW${id.repeat(6).slice(0, 44)}`, wallet_id: id.repeat(2).slice(0, 16), roles: ["driver", "validator"], layers: { start: 0, stop: 6 },
    state: index % 5 === 4 ? "paused" : "training", loss_ema: 3.4 + (index % 97) / 200, tokens_per_second: index % 5 === 4 ? 0 : 7200 / (1 + (index % 6)),
    steps: 900 - (index % 300), tokens: (900 - (index % 300)) * 2048, shard: index % 16, version: "0.1.0", started_at: now() - 5000 - index,
    first_seen: now() - 40 * (index + 1), last_seen: now() - 2, connection, address: connection ? `/ip4/198.51.100.${index % 250}/tcp/${40_000 + index}` : "",
    rtt_seconds: connection ? (8 + (index % 60)) / 1000 : null, bytes_sent: connection ? 310_000 + 1000 * index : 0,
    bytes_received: connection ? 280_000 + 2000 * index : 0, score: index % 5 === 3 ? -20 : 4, standing: STANDINGS[index % 5],
  };
}

export function network(scenario) {
  const others = PEERS_OF[scenario] ?? 0;
  const address = "/ip4/203.0.113.7/tcp/43817/p2p/12D3KooWQb1pUWp2vWm3zZ6i8kQ1y6r4P8sPpZ4nE8vK1tq9b7Zc";
  return {
    state: others ? "connected" : "alone", explanation: others ? `Connected with ${others} nodes of this run.` : "The network runs; nobody else was found yet.",
    peers: others, connections: Math.ceil(others * 0.75), addresses: [address], join_line: `neuroshard --run ${"4b".repeat(32)} --peer ${address}`,
    bytes_sent: 33_400_000, bytes_received: 81_200_000, upload_rate: 12_300, download_rate: 40_700, upload_limit: others ? 1_000_000 : null,
    banned_peers: others ? 1 : 0, refused: others ? { expired_claim: 14, bad_signature: 1 } : {},
  };
}

export function swarm(scenario, steps) {
  const others = PEERS_OF[scenario] ?? 0;
  const training = others - Math.floor(others / 5);
  return {
    nodes: others + 1, training_nodes: training + 1, global_loss: steps ? 3.512 : null, min_loss: steps ? 3.401 : null, total_steps: steps + others * 750,
    total_tokens: (steps + others * 750) * 2048, shards_covered: Math.min(15, 3 + others), tokens_per_second: 2263 + training * 2900,
  };
}
