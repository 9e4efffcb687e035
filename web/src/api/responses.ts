// The other responses of the API, generated from the declarations in neuroshard/status and neuroshard/api. Do not edit.
// After a change there: python -m neuroshard.api.typescript web/src/api

import type {
  DataStatus,
  DilocoStatus,
  FeedEvent,
  HeldOutPoint,
  LayerRange,
  LearningVerdict,
  LossTrend,
  NetworkStatus,
  NodeState,
  PeerStatus,
  Role,
  SwarmStatus,
  TrainingStatus,
  WorkDone,
} from "./status";

/** Class of the reason for which this node abandoned a round. */
export type AbandonReason = "no_answer" | "objection" | "contributions" | "node";

/** The stage at which microbatches spend most time, and the slowest of its nodes. */
export interface Bottleneck {
  stage: number; // stage at which microbatches spend most time, counted from 0
  node_id: string; // slowest node of this stage
  seconds: number | null; // mean time of a microbatch at this stage, compute and wait [s]
  share: number | null; // share of the time at all stages [0..1]
}

/** The certificate that ended a round. */
export interface CertificateStatus {
  value: string; // first 16 hex digits of the digest that was voted on
  votes: number; // number of votes to commit
  voters: number; // number of voters of the step
  sequences: number; // sequences for which it credits each accepted member
}

/** 202: the result of a command. */
export interface CommandBody {
  state: string; // state of the node afterwards
  message: string;
  details: Record<string, JsonValue> | null;
}

/** GET /api/data: Genesis data, cache and downloads. */
export interface DataSummary {
  data: DataStatus | null; // null until the manifest was read
}

/** GET /api/feed: the events of the node and its run since this start. */
export interface FeedSummary {
  events: FeedEvent[]; // newest first, at most 50
}

/** GET /health: the process answers, and the age of its newest snapshot. */
export interface Health {
  status: string; // "ok", or "stale" when the node has published nothing for 30 s
  state: NodeState;
  version: string;
  snapshot_age_seconds: number | null; // [s]
}

/** Times of one stage's part of one microbatch, forward and backward pass together. */
export interface HopTimes {
  node_id: string; // node that completed it
  compute_seconds: number | null; // compute time, as the stage reports it [s]
  wait_seconds: number | null; // wait at the stage for other work or its optimizer step [s]
  wire_seconds: number | null; // encoding and transfer in both directions; 0 on this node [s]
  recompute_seconds: number | null; // part of the compute time: the forward pass repeated for the backward pass [s]
  bytes_sent: number; // tensors that the driver sent [bytes]
  bytes_received: number; // tensors that the driver received [bytes]
  bytes_handed: number; // tensors that the stage sent to the stages before and after it, as it reports [bytes]
}

export type JsonValue = unknown;

/** GET /api/training/verify: the verdict on learning, and the numbers behind it. */
export interface LearningSummary {
  training_verified: boolean; // held-out data shows that the model learns
  status: LearningVerdict;
  reason: string;
  action: string; // what the user can do
  loss_trend: LossTrend;
  hash_agreement_rate: number | null; // 1 when alone [0..1]
  sync_success_rate: number | null; // null without a round with others [0..1]
  global_loss: number | null; // of the run [nats/token]
  local_loss: number | null; // of this node, smoothed [nats/token]
  initial_loss: number | null; // mean of the run's first steps [nats/token]
  steps: number;
  held_out_loss: number | null; // last evaluation [nats/token]
  held_out_initial_loss: number | null; // first evaluation [nats/token]
  unigram_entropy: number | null; // held-out loss of a model that knows token frequencies only [nats/token]
}

/** One formatted log record. Sequence numbers start at 1 and have no gaps. */
export interface LogLine {
  sequence: number;
  time: number;
  level: string;
  logger: string;
  message: string;
}

/** GET /api/logs: lines after a sequence number, oldest first. */
export interface LogLines {
  records: LogLine[];
  last_sequence: number; // give it as `after` in the next call
}

/** GET /api/training/history: the training curve and the evaluations, at most 1,000 points each, oldest first. */
export interface LossHistory {
  points: LossPoint[];
  held_out: HeldOutPoint[];
}

/** One point of the training curve. */
export interface LossPoint {
  step: number;
  time: number; // [s since 1970]
  loss: number | null; // [nats/token]
  lr: number | null;
  tokens: number; // [tokens]
}

/** A machine of the owner's wallet, as this one knows it. */
export interface Machine {
  node_id: string;
  is_here: boolean; // this computer
  is_reachable: boolean; // it has answered the last question
  seen_at: number | null; // time of its status; null: it has never answered [s since 1970]
  status: MachineStatus | null; // its last report; null: it has never answered
  has_obeyed: boolean | null; // whether it paused or resumed in this call; null: it got no command in this call
  message: string; // its answer to the command of this call, or the reason why there is none
}

/** GET /api/machines: the nodes of this node's wallet, this computer first. */
export interface MachineList {
  machines: Machine[];
  message: string; // the outcome of the command in a sentence; empty for a list
}

/** The report of one machine to the other machines of its wallet. The bounds apply to reports that arrive. */
export interface MachineStatus {
  name: string; // host name of the computer
  version: string; // of NeuroShard
  state: NodeState;
  reason: string; // reason for the state, in a sentence
  run_id: string; // run that it serves; empty: none yet
  parameters: number; // parameters of the whole model; 0: not known yet
  tokens_per_second: number; // present rate of training [tokens/s]
  tokens_in_a_day: number; // tokens that it trained on in the last 24 hours [tokens]
}

/** Outcome of a member's contribution. */
export type MemberPart = "accepted" | "refused" | "abstained" | "absent" | "unjudged";

/** One microbatch on its way through all stages and back. */
export interface MicrobatchTrace {
  session: number; // session of the driver at the stages
  microbatch: number; // number of the microbatch in its session
  ended_at: number; // time of the last answer [s since 1970]
  seconds: number | null; // from the first request to the last answer [s]
  tokens: number; // tokens of the microbatch [tokens]
  hops: HopTimes[]; // one for each stage, in order
  takeovers: Takeover[]; // replacements of a replica in the middle of it
  failures: number; // requests after which another node was asked
  other_seconds: number | null; // time outside the stages: routing, repeated requests, lost work [s]
}

/** GET /api/peers: this node's connections, and every other node of the run. */
export interface PeersSummary {
  count: number; // other nodes of the run
  network: NetworkStatus;
  swarm: SwarmStatus | null;
  peers: PeerStatus[];
}

/** Durations of a round's phases on this node, over all its views. */
export interface PhaseSeconds {
  gather: number | null; // time until a proposal named the members [s]
  exchange: number | null; // exchange of slices, verdict, and exchange of the aggregate [s]
  vote: number | null; // check of the aggregate and the two votes [s]
}

/** The microbatches that this node drove: rates of the last minute, and counts since the start. */
export interface PipelineFlow {
  /** period that the rates cover; at most 60 [s]; null: the node does not train, or the snapshot is older than 30 s */
  window_seconds: number | null;
  /** microbatches that ended in this period; null: the node does not train, or the snapshot is older than 30 s */
  microbatches: number | null;
  tokens: number | null; // tokens of those microbatches [tokens]; null: the node does not train, or the snapshot is older than 30 s
  /** 1 - compute seconds / (computers x window): the share of their time in which the computers of the stages did nothing for this driver; null without microbatches [0..1]; null: the node does not train, or the snapshot is older than 30 s */
  bubble_share: number | null;
  /** share of the compute time spent on repeated forward passes, which save memory [0..1]; null: the node does not train, or the snapshot is older than 30 s */
  recompute_share: number | null;
  /** bytes of tensors that this driver sent and received per token [bytes/token]; null: the node does not train, or the snapshot is older than 30 s */
  wire_bytes_per_token: number | null;
  /** bytes of tensors per token that the node with most of them sends, the driver or a stage [bytes/token]; null: the node does not train, or the snapshot is older than 30 s */
  busiest_upload_per_token: number | null;
  /** one for each stage; empty without microbatches; empty: the node does not train, or the snapshot is older than 30 s */
  loads: StageLoad[];
  /** slowest stage; null with one stage, and without microbatches; null: the node does not train, or the snapshot is older than 30 s */
  bottleneck: Bottleneck | null;
  exact_takeovers: number; // takeovers between equal weights, since the start
  approximate_takeovers: number; // takeovers between weights not known to be equal, since the start
  failures: number; // requests after which another node was asked, since the start
  given_up: number; // microbatches dropped for good, since the start
  unanswered: number[]; // stages for which microbatches wait now because every holder fails
  star_edges: StarEdge[]; // neighbours that cannot hand tensors to each other now: the driver passes theirs on
  recent: MicrobatchTrace[]; // at most 32 microbatches, the newest last
  /** rate of this driver over the last minute [tokens/s]; null: the node does not train, or the snapshot is older than 30 s */
  tokens_per_second: number | null;
}

/** GET /api/pipeline: every stage of the run's plan, and the flow of the microbatches through them. */
export interface PipelineSummary {
  stage_count: number;
  missing: string; // layers that no node has at hand, in a sentence, counted from 1; may be empty
  missing_layers: LayerRange[]; // the same layers as ranges counted from 0
  stages: RunStage[];
  layer_count: number;
  layers_covered: number; // layers whose weights at least one node has at hand
  coverage: number | null; // share of the layers that at least one node has at hand [0..1]
  complete: boolean; // no stage is missing
  own_stages: StageStatus[]; // stages that this node holds
  flow: PipelineFlow | null; // null on a node that drives no microbatches
}

/** One member's part in a round. */
export interface RoundContribution {
  node_id: string; // libp2p peer id of the member
  wallet_id: string; // public name of the member's wallet
  /** outcome of its contribution; abstained: too little work to count; absent: called, but sent nothing; unjudged: the round ended before a decision */
  part: MemberPart;
  refusal: string; // class of the reason for a refusal, as in /metrics; empty if it was not refused
  reason: string; // reason for a refusal, in a sentence; empty if it was not refused
}

/** GET /api/rounds: the rounds in which this node has taken part since its start. */
export interface RoundsSummary {
  rounds: RunRound[]; // the last 20 of each stage, the newest first
  completed: number;
  abandoned: Partial<Record<AbandonReason, number>>; // by class of the reason
  accepted: number; // contributions to completed rounds
  refused: Record<string, number>; // contributions to completed rounds, by class of the reason
  bytes_sent: number; // [bytes]
  bytes_received: number; // [bytes]
  skipped_audits: number; // audits of results that this node skipped because a member did not send its blocks in 5 s
  hash_agreement_rate: number | null; // 1 when alone [0..1]
  sync_success_rate: number | null; // null without a round with others [0..1]
  contributors: RunContributor[]; // most rounds first
  voters: StageVoter[]; // the seats of each stage, in order of seating
}

/** A node's parts in completed rounds, added up over all stages of this node. */
export interface RunContributor {
  node_id: string;
  wallet_id: string;
  accepted: number;
  refused: number;
  absent: number; // rounds to which it was called without a contribution
  sequences: number; // sequences for which certificates credit it
  is_here: boolean; // this node
  rounds: number; // rounds with a contribution from it
}

/** One node of the run, this node or a peer. */
export interface RunNode {
  node_id: string;
  wallet_id: string | null;
  roles: Role[];
  role: string; // roles joined by "+", for people
  layers: LayerRange | null;
  loss: number | null; // smoothed [nats/token]
  tokens_per_second: number | null; // [tokens/s]; null: the peer does not train, or the snapshot is older than 30 s
  last_seen: number | null; // [s since 1970]
  is_local: boolean; // this node
}

/** One round, with its stage. */
export interface RunRound {
  outer_step: number; // number of the outer step that the round decided
  ended_at: number; // time at which the round ended [s since 1970]
  phases: PhaseSeconds; // durations of the phases
  members: RoundContribution[]; // called members and their contributions
  bytes_sent: number; // sent in messages of rounds since the previous record [bytes]
  bytes_received: number; // received in messages of rounds since the previous record [bytes]
  strategy: string; // strategy of the run: diloco, streaming, sparta or averaging
  part: string; // exchanged part of the state: "all weights", "quarter 2 of 4", "slice 7 of 20", "gradient"
  codec: string; // encoding of the contributions, as the run's file names it
  aggregator: string; // rule that combined the contributions, as the run's file names it
  views: number; // number of attempts, each with another proposer
  skipped_audits: number; // audits of the result that this node skipped because a member did not send its blocks in 5 s
  certificate: CertificateStatus | null; // proof of the result; null: the round was abandoned
  is_late: boolean; // the round completed after training had continued; an earlier record shows it as abandoned
  abandoned_for: AbandonReason | null; // class of the reason why it was abandoned; null: the round completed
  reason: string; // reason why the round was abandoned, in a sentence; empty if it completed
  stage: number; // number of the stage, counted from 0
  layers: LayerRange; // layers of the stage
  result: string; // "completed" or "abandoned"
  seconds: number | null; // time from the start of the round to its end [s]
}

/** One stage of the run's plan and its holders, seen from this node. */
export interface RunStage {
  stage: number; // number of the stage, counted from 0
  layers: LayerRange; // layers of the stage
  roles: Role[]; // roles of a node that holds this stage alone
  holders: string[]; // all nodes of the stage: this node first, then the nodes that can work on it now
  paused: string[]; // holders that have its weights and are paused
  joining: string[]; // holders that prepare for it and have no weights yet
  is_here: boolean; // this node is one of the holders
  is_missing: boolean; // no node has its weights, so nothing is trained
  is_resting: boolean; // all nodes with its weights are paused, so nothing is trained
  has_single_holder: boolean; // only one node has its weights
  has_copy: boolean | null; // another node keeps a copy of a single holder's state; null: not known
  copy_age_seconds: number | null; // age of that copy, the work that would be lost with the holder; null without a copy [s]
}

/** GET /api/training/global: totals over all nodes of the run, each node's numbers, and this node's own status. */
export interface RunSummary {
  training_nodes: number;
  global_loss: number | null; // mean weighted by tokens [nats/token]
  global_min_loss: number | null; // lowest loss of the run [nats/token]
  total_steps: number;
  total_tokens: number; // [tokens]
  data_shards: number;
  data_shards_covered: number;
  /** sum over the training nodes with the first layers [tokens/s]; null: the snapshot is older than 30 s */
  tokens_per_second: number | null;
  hash_agreement_rate: number | null; // 1 when alone [0..1]
  loss_trend: LossTrend;
  training_verified: boolean;
  is_converging: boolean;
  successful_syncs: number;
  failed_syncs: number;
  sync_success_rate: number | null; // null without a round with others [0..1]
  diloco: DilocoStatus;
  model_hashes: Record<string, string>; // state root of each node that reported one
  nodes: RunNode[];
  local: TrainingStatus;
}

/** Texts of the model in training at sparse steps of the run, oldest first. */
export interface SamplesStatus {
  prompts: string[];
  samples: TextSample[];
  next_step: number | null; // step of the next sample; null: none will be written
  explanation: string; // reason why none are written; empty where they are
}

/** The session of the dashboard, with the token that it needs to send commands. */
export interface SessionBody {
  csrf_token: string; // value of the X-NeuroShard-CSRF header
  setup: boolean; // true: the node waits to be set up; only the wizard's routes answer
}

/** Mean times of one stage for a microbatch, over all its nodes. */
export interface StageLoad {
  stage: number; // number of the stage, counted from 0
  compute_seconds: number | null; // mean compute time of a microbatch [s]
  wait_seconds: number | null; // mean wait for other work or an optimizer step [s]
  wire_seconds: number | null; // mean time for encoding and transfer in both directions [s]
  nodes: number; // nodes that worked on it
}

/** One stage that this node holds; stages advance on their own clocks. */
export interface StageStatus {
  stage: number; // counted from 0
  layers: LayerRange;
  steps: number; // optimizer steps of a stage that this node holds
  outer_step: number;
  loss: number | null; // last step; null in the middle of the pipeline [nats/token]
  grad_norm: number | null; // last step, before clipping
  sequences_accumulated: number; // sequences of the step in progress
  sequences_wanted: number; // for one step
  open_microbatches: number; // microbatches between their forward and their backward pass
  sessions: number; // open sessions of drivers
  state_root: string; // hash of the stage's replicated state after the last outer step
  last_saved_step: number | null;
  /** tokens that pass through it, forward and backward [tokens/s]; null: the node does not train, or the snapshot is older than 30 s */
  tokens_per_second: number | null;
}

/** A seat of a stage that this node holds. */
export interface StageVoter {
  node_id: string;
  wallet_id: string;
  is_owner: boolean; // the seat of the run's owner
  is_online: boolean; // this node, or one that has answered lately
  stage: number; // index of the run's stage, counted from 0
  is_here: boolean; // this node
}

/** Two nodes with neighbouring stages that cannot hand tensors to each other now. The driver passes theirs on. */
export interface StarEdge {
  one: string;
  other: string;
}

/** A stage of a microbatch whose work another replica took over in the middle of it. */
export interface Takeover {
  stage: number; // number of the stage, counted from 0
  before: string; // node that began
  after: string; // node that completed it
  is_exact: boolean; // both reported equal weights
}

/** Texts that the model wrote at one step, always with the likeliest token. */
export interface TextSample {
  step: number; // step at which writing began
  last_step: number; // step at which writing ended; training continues meanwhile
  time: number; // [s since 1970]
  seconds: number; // duration of the writing [s]
  texts: string[]; // one for each prompt, without the prompt
}

/** GET /api/contribution: work of this computer for every run that the data folder has served. */
export interface WorkSummary {
  span: "day" | "week" | "all";
  width_seconds: number; // width of each period; it doubles as the record gets longer [s]
  points: WorkDone[]; // oldest first; periods without work are left out
  total: WorkDone | null; // since the beginning of the record; null: no work yet
}
