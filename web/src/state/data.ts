// The training data, as /api/data and /api/status tell of them.

export interface ShardStatus {
  shard: number;
  use: "in_use" | "next" | "assigned" | "held_out" | "read";
  bytes: number | null; // null: not in the cache
  origin: "source" | "node" | "earlier" | null;
  verified: boolean;
}

export interface RefreshStatus {
  state: "pending" | "current" | "grown" | "older" | "incomplete" | "refused" | "unreachable";
  explanation: string;
  checked_at: number | null;
  next_at: number | null;
  newest_shards: number | null;
  newest_tokens: number | null;
  newest_ids: number | null;
  updated_at: string;
}

export interface DataCoverage {
  nodes: number;
  shards: number;
  copies: number[]; // mean number of copies in equal stretches of the data set
}

export interface DownloadStatus {
  name: string;
  bytes_done: number;
  bytes_total: number | null;
  bytes_per_second: number;
  attempt: number;
  error: string | null;
  retry_at: number | null;
}

export interface DataStatus {
  source: string;
  verified: boolean;
  explanation: string;
  is_demo: boolean;
  total_shards: number;
  total_tokens: number;
  held_out_shards: number;
  shard: number | null;
  shard_windows_done: number;
  shard_windows_total: number;
  passes: number;
  shards_seen: number;
  rotations: number;
  last_rotation_reason: string;
  cached_shards: number;
  cached_bytes: number;
  cache_limit_bytes: number;
  next_shard_ready: boolean;
  downloads: DownloadStatus[];
  files_from_nodes: number;
  shards: ShardStatus[]; // in the order of their use, then those that were read
  refresh: RefreshStatus;
  coverage: DataCoverage | null; // null before the node is in a swarm
}
