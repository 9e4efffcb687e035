// The node's status, generated from the declarations in neuroshard/status and neuroshard/api. Do not edit.
// After a change there: python -m neuroshard.api.typescript web/src/api

/** Speed of training on this computer's device, in figures that compare devices. Pauses, evaluations and waits for data do not count as time. */
export interface AccelerationStatus {
  device: string; // name of the device that computes
  precision: string; // number format of its matrix products: fp32 or bf16
  /** floating-point operations per token, forward and backward, of the layers that this node holds; forward passes that are repeated to save memory do not count [FLOP/token] */
  flops_per_token: number;
  peak_flops: number | null; // highest speed of its matrix products [FLOP/s]
  /** table: NVIDIA's figure for dense products in bf16; measured: products at the start, in this precision */
  peak_source: "table" | "measured";
  ranks: number; // processes that compute, each on a device of its own; 1: this node has no site
  /** replicate: each rank has all weights of the layers; shard: a part of each tensor; null: no site */
  mode: "replicate" | "shard" | null;
  compile: CompilationStatus;
  /** tokens that pass through its layers, forward and backward; null before the first step [tokens/s]; null: the node does not train, or the snapshot is older than 30 s */
  tokens_per_second: number | null;
  /** computing speed of training: tokens per second x operations per token [FLOP/s]; null: the node does not train, or the snapshot is older than 30 s */
  flops_per_second: number | null;
  /** model FLOPs utilisation: the share of the peak that training uses [0..1]; null: the node does not train, or the snapshot is older than 30 s */
  mfu: number | null;
}

/** Work of this computer that certificates of rounds accepted since the start of the node. */
export interface AcceptedWork {
  rounds: number; // certified rounds that accepted this computer's work
  refused: number; // certified rounds that refused this computer's work
  tokens: number; // tokens for which certificates credit this computer [tokens]
  share: number | null; // this computer's share of all work that these certificates credit [0..1]
}

/** Shape of one Llama-like model; equal values mean interchangeable weights. */
export interface Architecture {
  hidden_size: number;
  layer_count: number;
  head_count: number;
  key_value_head_count: number;
  feed_forward_size: number;
  vocabulary_size: number;
  sequence_length: number;
  rope_theta: number;
  norm_epsilon: number;
  qk_norm: "none" | "head" | "width";
  norm_reorder: boolean;
  trainable_rmsnorm: boolean;
  initialisation: "fan_in" | "depth";
  subspace_rank: number;
  free_blocks: number;
}

/** One restorable state on disk. */
export interface CheckpointGeneration {
  step: number;
  outer_step: number;
  time: number; // [s since 1970]
  loss: number | null; // [nats/token]
  bytes: number; // [bytes]
  path: string;
}

/** State that is safe on disk, and the loss that a kill at this moment would cause. */
export interface CheckpointStatus {
  folder: string;
  generations: CheckpointGeneration[]; // newest first
  last_saved_step: number | null;
  last_saved_time: number | null; // [s since 1970]
  interval_seconds: number; // [s]
  could_lose: string; // work that a kill now would lose
  could_lose_steps: number; // steps that a kill now would lose
  could_lose_seconds: number; // [s]
  last_write_seconds: number; // duration of the last write [s]
  last_stall_seconds: number; // time for which the last write stopped training [s]
  alarm: string | null; // visible trouble, such as a full disk
  restored: string | null; // checkpoint that the start found
}

/** Progress of the compilation of the model's blocks. */
export type CompilationState = "off" | "waiting" | "compiling" | "used" | "refused";

/** Whether training runs compiled blocks. */
export interface CompilationStatus {
  state: CompilationState; // waiting: for the first step; used: the compiled form is right, and faster
  reason: string; // why it is off or refused
}

/** Kind of path over which a peer is reached. */
export type ConnectionKind = "direct" | "punched" | "relayed" | "in_memory";

/** Shards that the nodes of the run offer, this node included. */
export interface DataCoverage {
  nodes: number; // nodes that have any shard
  shards: number; // shards that at least one node has
  copies: number[]; // mean number of copies in equal parts of the data set, in order; at most 128 parts
}

/** Genesis data on this node. */
export interface DataStatus {
  source: string; // URL or folder
  verified: boolean; // every shard is checked against a digest in the signed manifest
  explanation: string;
  is_demo: boolean;
  total_shards: number; // shards of the data set, as the run pins it
  total_tokens: number; // tokens of the data set [tokens]
  held_out_shards: number;
  shard: number | null; // shard in use
  shard_windows_done: number;
  shard_windows_total: number;
  passes: number; // complete passes over the shards assigned to this node
  shards_seen: number; // distinct shards trained on
  rotations: number; // changes of the shard
  last_rotation_reason: string;
  cached_shards: number; // shards in the cache
  cached_bytes: number; // size of the cache [bytes]
  cache_limit_bytes: number; // limit that the owner set [bytes]
  next_shard_ready: boolean; // the next shard is in the cache
  downloads: DownloadStatus[]; // files that are being fetched
  shared: ShardRange[]; // shards that other nodes can get from this node
  files_from_nodes: number; // files that other nodes gave because the source failed
  shards: ShardStatus[]; // in the order of use, then those that were read; at most 24
  refresh: RefreshStatus;
  coverage: DataCoverage | null; // null before the node is in a swarm
  downloads_waiting: number; // files whose source failed; each is tried again
}

/** Outer steps of this node, and the progress towards the next one. */
export interface DilocoStatus {
  inner_step: number; // inner steps since the last outer step
  inner_steps_total: number; // inner steps between two outer steps
  outer_steps: number; // outer steps
  last_sync: number | null; // [s since 1970]
  members: number; // nodes of the last round, this node included
  lone_outer: string;
  strategy: string; // of the next round: diloco, streaming, sparta or averaging; empty: not known yet
  part: string; // part of the state in the next round: "all weights", "quarter 2 of 4"
  codec: string; // encoding of the contributions to the next round
  explanation: string;
  state_root: string; // hash of the replicated state after the last outer step
  certified_root: string; // root that the certificate of this outer step names; without one, equal to state_root
  successful_syncs: number; // rounds that completed
  failed_syncs: number; // rounds that were aborted
  version: number; // newest version of the run's parameters that its owner has signed
  version_from: number | null; // outer step from which that version applies; null: the chain does not have it yet
  progress: number; // progress towards the next outer step [0..1]
}

/** A file that the data client fetches. */
export interface DownloadStatus {
  name: string; // file name, such as "shard_17.bin"
  bytes_done: number; // [bytes]
  bytes_total: number | null; // null: not known [bytes]
  bytes_per_second: number | null; // [bytes/s]; null: the snapshot is older than 30 s
  attempt: number;
  error: string | null; // last failure
  retry_at: number | null; // time of the next attempt [s since 1970]
}

/** One event of the node or its run, in a sentence. */
export interface FeedEvent {
  time: number; // time at which it happened or began [s since 1970]
  tone: FeedTone;
  sentence: string;
  subject: string; // what it is about; a later event of the same subject continues an open one
  is_open: boolean; // a later event can take its place
  first_round: number; // first of the rounds that it stands for; 0: none
}

/** Meaning of an event for the owner. */
export type FeedTone = "good" | "warn" | "bad";

/** One evaluation on the pinned held-out sequences. */
export interface HeldOutPoint {
  step: number;
  time: number; // [s since 1970]
  loss: number | null; // mean loss on text that the model never trains on [nats/token]
  improvement: number | null; // mean paired improvement over the first evaluation [nats/token]
  standard_error: number | null; // of the improvement [nats/token]
  measured_by: string[]; // other nodes that signed it; empty: this node measured it itself
}

/** Layers start, start + 1, ... stop - 1 of a model. */
export interface LayerRange {
  start: number; // first layer, counted from 0
  stop: number; // number of the last layer + 1
}

/** Answer to the question whether the model learns. */
export type LearningVerdict = "verified" | "improving" | "insufficient_data" | "stalled" | "diverged" | "not_training";

/** Direction of the recent loss. */
export type LossTrend = "improving" | "stable" | "needs_attention" | "insufficient_data";

/** Memory tier and limits of this node. */
export interface MemoryStatus {
  tier_mb: number; // [MB]
  limit_mb: number; // memory limit [MB]
  limit_source: string; // what set the limit
  need_mb: number; // need of this model and batch by the formula [MB]
  resident_mb: number; // resident memory [MB]
  peak_mb: number; // [MB]
}

/** The model, and the part of it that this node holds. */
export interface ModelStatus {
  architecture: Architecture;
  parameter_count: number; // of the whole model
  layers: LayerRange | null; // layers that this node holds; null: none, or none yet
  roles: Role[];
}

/** Kinds of messages that the owner's rules let the network carry now. */
export type NetworkAction = "open" | "small_only" | "off";

/** Effect of the owner's rules on the network. */
export interface NetworkDecision {
  action: NetworkAction; // what the network may carry; small_only: no tensors, states and shards
  reason: string; // reason for the action, in a sentence
  rule: string; // setting that decided; empty when nothing limits the network
  until: number | null; // time at which this ends; null: not known [s since 1970]
}

/** State of this node's connection to the run's network. */
export type NetworkState = "off" | "starting" | "alone" | "connected" | "failed";

/** This node's connections. Traffic counts from the start. */
export interface NetworkStatus {
  state: NetworkState; // state of this node's network
  explanation: string; // the state in a sentence
  addresses: string[]; // addresses at which others can reach this node
  connections: number; // open connections to other nodes
  bytes_sent: number; // sent to other nodes since the start [bytes]
  bytes_received: number; // received from other nodes since the start [bytes]
  upload_rate: number | null; // upload rate [bytes/s]; null: the network does not run, or the snapshot is older than 30 s
  download_rate: number | null; // download rate [bytes/s]; null: the network does not run, or the snapshot is older than 30 s
  upload_limit: number | null; // upload limit that the owner set; null: none [bytes/s]
  line_upload: number | null; // measured upload speed of the line; null: not measured yet [bytes/s]
  line_measured_at: number | null; // time at which the line was measured; null: not yet [s since 1970]
  banned_peers: number; // peers that are banned now
  refused: Record<string, number>; // refused messages of peers, by reason
  join_line: string; // command with which others join this run through this node; may be empty
  reachable: boolean | null; // whether the organiser of the run reached this node at its public address; null: not checked
}

/** Activity of the node; `NodeStatus.state_reason` gives the reason. */
export type NodeState = "starting" | "waiting_for_data" | "waiting_for_stages" | "training" | "paused" | "not_training" | "failed" | "stopping";

/** Everything that the API reports about this node. A snapshot is published as a whole and never changed. */
export interface NodeStatus {
  version: string;
  started_at: number; // [s since 1970]
  time: number; // time of this snapshot [s since 1970]
  state: NodeState;
  state_reason: string;
  is_standing_by: boolean; // it could train, but no node uses its layers now
  startup: StartupStep[];
  node_id: string | null;
  wallet_id: string | null;
  data_dir: string;
  paths: PathsStatus;
  is_demo: boolean;
  paused_until: number | null; // [s since 1970]
  owner_policy: OwnerPolicyStatus;
  warnings: string[];
  model: ModelStatus | null;
  memory: MemoryStatus | null;
  run: RunStatus | null;
  training: TrainingStatus;
  verification: VerificationStatus;
  diloco: DilocoStatus;
  data: DataStatus | null; // null before the manifest was read
  checkpoints: CheckpointStatus;
  pipeline: PipelineStatus | null; // null before the run and its stages are known
  resources: ResourceStatus;
  acceleration: AccelerationStatus | null; // null while this node holds no layers
  peers: PeerStatus[]; // the first 32; /api/peers has all
  feed: FeedEvent[]; // newest first; /api/feed has all
  network: NetworkStatus;
  swarm: SwarmStatus | null; // null before the first look at the network
  contribution: WorkDone | null; // since the beginning of the record; null: no work yet
  uptime_seconds: number; // at this snapshot, by a clock that does not jump [s]
  peer_count: number; // other nodes of the run
  peer_connections: Record<string, number>; // other nodes of the run by the path over which they are reached
  roles: Role[]; // roles of this node
  layers: LayerRange | null; // layers that this node holds; null: none, or none yet
  device: string; // compute device
  architecture: Architecture | null; // shape of the run's model; null before it is known
  accepted: AcceptedWork; // this computer's work that certificates accepted
}

/** The decisions in effect and the readings behind them. */
export interface OwnerPolicyStatus {
  decision: TrainingDecision;
  readings: SensorReading[]; // what the sensors show
  network: NetworkDecision;
  transferred_megabytes: number; // sent and received in this calendar month [MB]
}

/** Places of the node's files on this computer. */
export interface PathsStatus {
  data_dir: string;
  config_file: string; // exists only when a setting was stored
  data_cache: string;
  checkpoints: string; // of all wallets, runs and stages
  logs: string;
  node_key: string;
  api_secret: string;
}

/** A peer's score in a word. */
export type PeerRating = "good" | "neutral" | "doubtful" | "bad" | "banned";

/** Another node of the run, from its last verified report and announcement. */
export interface PeerStatus {
  node_id: string; // libp2p peer id of the node
  wallet_id: string; // public name of the wallet that vouches for the node
  roles: Role[]; // roles that follow from its layers
  layers: LayerRange | null; // layers that it holds; null: none, or none yet
  loss_ema: number | null; // smoothed training loss [nats/token]
  tokens_per_second: number | null; // training rate [tokens/s]; null: the peer does not train, or the snapshot is older than 30 s
  last_seen: number; // last time at which it was known to be alive [s since 1970]
  steps: number; // inner steps that it made
  tokens: number; // tokens that it trained on [tokens]
  shard: number | null; // shard in use
  outer_step: number; // outer steps that its state contains
  state_hash: string; // root of its replicated state after the last outer step
  state: string; // its state, as in /api/status; empty before the first report
  started_at: number | null; // time at which the node started [s since 1970]
  first_seen: number | null; // time at which this node first saw it [s since 1970]
  version: string; // version of its program
  connection: ConnectionKind | null; // path over which it is reached; null: known only through others
  address: string; // address of that connection
  rtt_seconds: number | null; // round-trip time [s]
  bytes_sent: number; // sent from this node to the peer [bytes]
  bytes_received: number; // received from the peer [bytes]
  score: number | null; // reputation at this node; 0 is neutral, misbehaviour lowers it
  role: string; // roles joined by "+", for people
  rating: PeerRating; // the score in a word
}

/** Summary of the run's stages; /api/pipeline returns all of them. */
export interface PipelineStatus {
  missing: string; // layers that no node has at hand, in a sentence, counted from 1; may be empty
  stage_count: number; // stages of the run's plan
  missing_stages: number; // stages that no node has
  single_stages: number; // stages that only one node has
  missing_layers: LayerRange[]; // the same layers as ranges counted from 0, neighbouring stages as one
}

/** Result of the last check of the data source. Training continues in every state. */
export type RefreshState = "pending" | "current" | "grown" | "older" | "incomplete" | "refused" | "unreachable";

/** The newest description of the data that its source gave. */
export interface RefreshStatus {
  state: RefreshState; // result of the last check of the data source
  explanation: string;
  checked_at: number | null; // time of the last check [s since 1970]
  next_at: number | null; // time of the next check [s since 1970]
  newest_shards: number | null; // shards in the newest manifest that can be trusted
  newest_tokens: number | null; // tokens in that manifest [tokens]
  newest_ids: number | null; // entries in its tokenizer table
  updated_at: string; // publication time, as the publisher states it
}

/** Use of this computer by the node. */
export interface ResourceStatus {
  device: string;
  device_name: string;
  cpu_cores: number | null; // CPU use of this process [cores]; null: the snapshot is older than 30 s
  cpu_threads_limit: number;
  disk_free_bytes: number; // free space of the data folder's disk [bytes]
  disk_used_bytes: number; // used by the data folder [bytes]
  gpu_memory_bytes: number | null; // [bytes]
  gpu_memory_total_bytes: number | null; // [bytes]
  gpu_utilisation: number | null; // [0..1]; null: the snapshot is older than 30 s
  threads: ThreadShare[];
}

/** A node's work in the pipeline; it follows from the layers it holds. */
export type Role = "driver" | "worker" | "validator";

/** The run that this node serves, and the reason. */
export interface RunStatus {
  run_id: string;
  is_own: boolean;
  is_demo: boolean;
  explanation: string; // one sentence
}

/** Current reading of a sensor that a setting uses, such as the battery. */
export interface SensorReading {
  name: string; // for people, such as "keyboard and mouse"
  value: string; // such as "idle for 3 minutes", or the reason why it is not known
  is_known: boolean; // an unknown reading never pauses or slows training
}

/** Source of a shard's contents. */
export type ShardOrigin = "source" | "node" | "earlier";

/** Shards start, start + 1, ... stop - 1 of a data set. The bounds apply to ranges that peers send. */
export interface ShardRange {
  start: number;
  stop: number;
}

/** One shard that this node has or will need. */
export interface ShardStatus {
  shard: number;
  use: ShardUse;
  bytes: number | null; // size in the cache; null: not in the cache [bytes]
  origin: ShardOrigin | null; // null: not known
  verified: boolean; // compared with the digest in the signed manifest since the start
}

/** Purpose of a shard on this node. */
export type ShardUse = "in_use" | "next" | "assigned" | "held_out" | "read";

/** One line of the start-up progress, which the dashboard shows from the first second. */
export interface StartupStep {
  name: string; // for people, such as "Reading the Genesis manifest"
  state: StartupStepState;
  detail: string;
  fraction: number | null; // progress; null: not known [0..1]
}

/** State of one step of the start-up. */
export type StartupStepState = "pending" | "running" | "done" | "failed";

/** All nodes of the run together, this node included. Totals never fall when nodes leave. */
export interface SwarmStatus {
  nodes: number; // nodes of the run
  training_nodes: number; // nodes of the run that train
  global_loss: number | null; // mean loss of the nodes, weighted by tokens [nats/token]
  min_loss: number | null; // lowest loss that a node reported [nats/token]
  total_steps: number; // inner steps of all nodes
  total_tokens: number; // tokens that the run has trained on [tokens]
  shards_covered: number; // shards that some node has read
  /** sum over the training nodes with the first layers [tokens/s]; null: the snapshot is older than 30 s */
  tokens_per_second: number | null;
}

/** CPU use of one thread since the previous snapshot. */
export interface ThreadShare {
  name: string; // name of the thread
  cores: number | null; // CPU use of a thread [cores]; null: the snapshot is older than 30 s
}

/** Effect of the owner's rules: whether training may run at full speed, run slowly, or must pause. */
export type TrainingAction = "run" | "throttle" | "pause";

/** Effect of the owner's rules on training. */
export interface TrainingDecision {
  action: TrainingAction; // what training may do
  reason: string; // reason for the action, in a sentence
  rule: string; // setting that decided; "user" for a pause by hand; empty when nothing limits training
  until: number | null; // time at which this ends; null: not known [s since 1970]
  share: number | null; // share of the time for training; 0 during a pause [0..1]
}

/** Progress of the inner steps on this node. */
export interface TrainingStatus {
  steps: number; // inner steps
  tokens: number; // tokens trained on [tokens]
  inherited_steps: number; // part of the steps: made by others before this node took over
  inherited_tokens: number; // part of the tokens: seen by others before [tokens]
  loss: number | null; // last step [nats/token]
  loss_ema: number | null; // smoothed training loss [nats/token]
  initial_loss: number | null; // mean of the run's first steps [nats/token]
  lr: number | null; // inner learning rate
  tokens_per_second: number | null; // training rate [tokens/s]; null: the node does not train, or the snapshot is older than 30 s
  step_seconds: number | null; // duration of an inner step [s]; null: the node does not train, or the snapshot is older than 30 s
  batch_size: number;
  sequences_per_step: number;
  skipped_steps: number; // steps skipped for a non-finite loss or gradient
  precision: string;
  held_out: HeldOutPoint[];
  held_out_sequences: number;
  unigram_entropy: number | null; // held-out loss of a model that knows token frequencies only [nats/token]
  held_out_loss: number | null; // loss of the last evaluation on the pinned held-out sequences [nats/token]
}

/** Verdict on learning from held-out data, in words that a user can act on. */
export interface VerificationStatus {
  training_verified: boolean; // held-out data shows that the model learns
  status: LearningVerdict;
  reason: string;
  action: string; // what the user can do
  loss_trend: LossTrend;
}

/** Work of this computer in one period. */
export interface WorkDone {
  start: number; // begin of the period [s since 1970]
  tokens: number; // tokens that this computer trained on [tokens]
  steps: number; // learning steps of this computer
  bytes_sent: number; // [bytes]
  bytes_received: number; // [bytes]
  training_seconds: number; // time in which this computer trained [s]
  loss: number | null; // mean over the tokens; null: no loss was reported [nats/token]
}
