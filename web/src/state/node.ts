// What the node tells about itself; mirrors neuroshard/status/snapshot.py. Everything may be missing while it starts.

import type { Work } from "./contribution";
import type { DataStatus } from "./data";
import type { KindnessStatus } from "./kindness";
import type { NetworkStatus, SwarmStatus } from "./network";
import type { PipelineSummary } from "./pipeline";

export type NodeState =
  | "starting"
  | "waiting_for_data"
  | "waiting_for_stages"
  | "training"
  | "paused"
  | "not_training"
  | "failed"
  | "stopping";

export interface StartupStage {
  name: string;
  state: "pending" | "running" | "done" | "failed";
  detail: string;
  fraction: number | null;
}

export interface Architecture {
  hidden_size: number;
  layer_count: number;
  head_count: number;
  key_value_head_count: number;
  feed_forward_size: number;
  vocabulary_size: number;
  sequence_length: number;
}

export interface ModelStatus {
  architecture: Architecture;
  parameter_count: number;
  layers: { start: number; stop: number } | null;
  roles: string[];
}

export interface MemoryStatus {
  tier_mb: number;
  limit_mb: number;
  limit_source: string;
  need_mb: number;
  resident_mb: number;
  peak_mb: number;
}

export interface RunStatus {
  run_id: string;
  is_own: boolean;
  is_demo: boolean;
  explanation: string;
}

export interface LossPoint {
  step: number;
  time: number;
  loss: number;
  lr: number;
  tokens: number;
}

export interface HeldOutPoint {
  step: number;
  time: number;
  loss: number;
  improvement: number;
  standard_error: number;
  measured_by: string[];
}

export interface TrainingStatus {
  steps: number;
  tokens: number;
  loss: number | null;
  loss_ema: number | null;
  lr: number;
  tokens_per_second: number | null; // null: it does not train
  step_seconds: number | null;
  batch_size: number;
  sequences_per_step: number;
  skipped_steps: number;
  precision: string;
  held_out: HeldOutPoint[];
  held_out_sequences: number;
  unigram_entropy: number | null;
}

export interface VerificationStatus {
  training_verified: boolean;
  status: "verified" | "improving" | "insufficient_data" | "stalled" | "diverged" | "not_training";
  reason: string;
  action: string;
  loss_trend: "improving" | "stable" | "needs_attention" | "insufficient_data";
}

export interface DilocoStatus {
  inner_step: number;
  inner_steps_total: number;
  outer_steps: number;
  last_sync: number | null;
  members: number;
  lone_outer: string;
  strategy: string; // of the round that comes next, as part and codec; "" while it is not known
  part: string;
  codec: string;
  explanation: string;
  successful_syncs: number;
  failed_syncs: number;
}

export interface CheckpointGeneration {
  step: number;
  outer_step: number;
  time: number;
  loss: number | null;
  bytes: number;
  path: string;
}

export interface CheckpointStatus {
  folder: string;
  generations: CheckpointGeneration[];
  last_saved_step: number | null;
  last_saved_time: number | null;
  interval_seconds: number;
  could_lose: string;
  could_lose_steps: number;
  could_lose_seconds: number;
  last_write_seconds: number;
  last_stall_seconds: number;
  alarm: string | null;
  restored: string | null;
}

export interface ResourceStatus {
  device: string;
  device_name: string;
  cpu_cores: number;
  cpu_threads_limit: number;
  disk_free_bytes: number;
  disk_used_bytes: number;
  gpu_memory_bytes: number | null;
  gpu_memory_total_bytes: number | null;
  gpu_utilisation: number | null;
  threads: { name: string; cores: number }[];
}

export interface NodeStatus {
  version: string;
  started_at: number;
  time: number;
  uptime_seconds: number;
  state: NodeState;
  state_reason: string;
  is_standing_by: boolean;
  startup: StartupStage[];
  node_id: string | null;
  wallet_id: string | null;
  data_dir: string;
  is_demo: boolean;
  paused_until: number | null;
  kindness: KindnessStatus;
  warnings: string[];
  model: ModelStatus | null;
  memory: MemoryStatus | null;
  run: RunStatus | null;
  peer_count: number; // other nodes of the run
  training: TrainingStatus;
  verification: VerificationStatus;
  diloco: DilocoStatus;
  data: DataStatus | null;
  checkpoints: CheckpointStatus;
  resources: ResourceStatus;
  network: NetworkStatus;
  pipeline: PipelineSummary | null; // null before the run's stages are known
  swarm: SwarmStatus | null; // null before the first look at the network
  contribution: Work | null; // since the record began, of every run; null: nothing yet
}

export interface LogRecord {
  sequence: number;
  time: number;
  level: string;
  logger: string;
  message: string;
}

/** The network's numbers, as /api/training/global adds them up. */
export interface GlobalView {
  training_nodes: number;
  global_loss: number | null;
  global_min_loss: number | null;
  total_steps: number;
  total_tokens: number;
  data_shards: number;
  data_shards_covered: number;
  is_converging: boolean;
}
