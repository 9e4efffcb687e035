// The run's stages and the way of the microbatches; mirrors neuroshard/api/bodies/pipeline.py. Times in seconds.

export interface Layers {
  start: number;
  stop: number;
}

/** What every status tells. */
export interface PipelineSummary {
  stage_count: number;
  missing: string;
  missing_layers: Layers[];
}

export interface PipelineStage {
  stage: number; // counted from 0
  layers: Layers;
  roles: string[];
  holders: string[]; // this node first
  paused: string[]; // of the holders
  joining: string[]; // of the holders
  is_here: boolean;
  is_missing: boolean;
  is_resting: boolean;
  has_single_holder: boolean;
  has_copy: boolean | null; // of a single holder's state; null: not known
  copy_age_seconds: number | null;
}

export interface OwnStage {
  stage: number;
  layers: Layers;
  steps: number;
  loss: number | null;
  sequences_accumulated: number;
  sequences_wanted: number;
  open_microbatches: number;
  sessions: number;
  last_saved_step: number | null;
}

/** Where time goes at one stage. */
export interface StageTime {
  stage: number;
  compute_seconds: number | null;
  wait_seconds: number | null;
  wire_seconds: number | null;
}

export interface StageLoad extends StageTime {
  nodes: number;
}

/** Times of one stage's part, in the order of the stages. */
export interface Hop extends Omit<StageTime, "stage"> {
  node_id: string;
}

export interface Takeover {
  stage: number;
  before: string;
  after: string;
  is_exact: boolean;
}

/** One microbatch on its way through all stages, there and back. */
export interface Passage {
  session: number;
  microbatch: number;
  ended_at: number | null;
  seconds: number | null;
  other_seconds: number | null;
  tokens: number;
  hops: Hop[];
  takeovers: Takeover[];
  failures: number;
}

export interface Bottleneck {
  stage: number;
  node_id: string;
  seconds: number | null;
  share: number | null;
}

export interface PipelineFlow {
  window_seconds: number | null;
  microbatches: number;
  tokens_per_second: number | null;
  bubble_share: number | null;
  recompute_share: number | null;
  wire_bytes_per_token: number | null;
  loads: StageLoad[];
  bottleneck: Bottleneck | null;
  exact_takeovers: number;
  approximate_takeovers: number;
  failures: number;
  given_up: number;
  unanswered: number[]; // stages that microbatches wait for
  recent: Passage[]; // the newest last
}

export interface Pipeline extends PipelineSummary {
  stages: PipelineStage[];
  layer_count: number;
  own_stages: OwnStage[];
  flow: PipelineFlow | null; // null on a node that drives no microbatches
}
