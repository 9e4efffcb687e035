// Who else is in the run and how this node reaches them; mirrors neuroshard/api/bodies/network.py.

export type NetworkState = "off" | "starting" | "alone" | "connected" | "failed";
export type ConnectionKind = "direct" | "punched" | "relayed" | "in_memory";
export type Standing = "good" | "neutral" | "doubtful" | "bad" | "banned";

export interface PeerStatus {
  node_id: string;
  wallet_id: string;
  roles: string[];
  layers: { start: number; stop: number } | null;
  state: string; // as NodeState, or empty before the peer's first report
  loss_ema: number | null;
  tokens_per_second: number | null;
  steps: number;
  tokens: number;
  shard: number | null;
  version: string;
  started_at: number | null;
  first_seen: number | null;
  last_seen: number | null;
  connection: ConnectionKind | null; // null: known only through others
  address: string;
  rtt_seconds: number | null;
  bytes_sent: number;
  bytes_received: number;
  score: number | null;
  standing: Standing;
}

export interface NetworkStatus {
  state: NetworkState;
  explanation: string;
  connections: number;
  addresses: string[];
  join_line: string;
  bytes_sent: number;
  bytes_received: number;
  upload_rate: number | null;
  download_rate: number | null;
  upload_limit: number | null;
  banned_peers: number;
  refused: Record<string, number>;
}

/** All nodes of the run together, this one included. */
export interface SwarmStatus {
  nodes: number;
  training_nodes: number;
  global_loss: number | null;
  min_loss: number | null;
  total_steps: number;
  total_tokens: number;
  shards_covered: number;
  tokens_per_second: number | null;
}
