"""Bodies about this node: status, data, network, contribution, checkpoints, configuration and logs."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal, TypeAlias

from pydantic import Field

from neuroshard.api.bodies.training import PipelineSummary
from neuroshard.api.rendering import Layers, Number, ResponseBody, Text
from neuroshard.status.data import RefreshState, ShardOrigin, ShardUse
from neuroshard.status.owner_policy import NetworkAction, TrainingAction
from neuroshard.status.snapshot import (
    ConnectionKind,
    LearningVerdict,
    LossTrend,
    NetworkState,
    NodeState,
    StartupStepState,
)
from neuroshard.types import Role

SpanName: TypeAlias = Literal["day", "week", "all"]


class WorkBody(ResponseBody):
    """What was done in a stretch of time."""

    start: Number = Field(description="seconds since the epoch")
    tokens: int
    steps: int
    bytes_sent: int
    bytes_received: int
    training_seconds: Number
    loss: Number = Field(description="nats a token, mean over the tokens; null where none was told")


class WorkHistoryBody(ResponseBody):
    """GET /api/contribution: of every run that the data folder has served."""

    span: SpanName
    width_seconds: Number = Field(description="of each stretch; it doubles as all of time gets longer")
    points: list[WorkBody] = Field(description="oldest first; stretches without anything are left out")
    total: WorkBody | None = Field(description="since the beginning, whatever the span; null: nothing was done yet")


class SampleBody(ResponseBody):
    """What the model wrote at one moment, always choosing the likeliest token."""

    step: int = Field(description="when it began to write")
    last_step: int = Field(description="when it had written everything: training goes on meanwhile")
    time: Number
    seconds: Number = Field(description="that the writing took")
    texts: list[Text] = Field(description="one for each prompt, without it")


class SamplesBody(ResponseBody):
    """GET /api/samples: texts of the model in training at sparse steps of the run, oldest first."""

    prompts: list[Text]
    samples: list[SampleBody]
    next_step: int | None = Field(description="when the next one is due; null: none is")
    explanation: Text = Field(description="why none are written; empty where they are")


class DownloadBody(ResponseBody):
    """What the data client is fetching."""

    name: Text
    bytes_done: int
    bytes_total: int | None
    bytes_per_second: Number
    attempt: int
    error: Text | None
    retry_at: Number


class ShardRangeBody(ResponseBody):
    """Shards start, start + 1, ... stop - 1."""

    start: int
    stop: int


class ShardBody(ResponseBody):
    """One shard that this node has or will need."""

    shard: int
    use: ShardUse
    bytes: int | None = Field(description="in the cache; null when it is not there")
    origin: ShardOrigin | None
    verified: bool = Field(description="compared with the digest in the signed manifest since the start")


class RefreshBody(ResponseBody):
    """What the last look at the source has shown."""

    state: RefreshState
    explanation: Text
    checked_at: Number
    next_at: Number
    newest_shards: int | None
    newest_tokens: int | None
    newest_ids: int | None = Field(description="of the newest tokenizer table")
    updated_at: Text


class CoverageBody(ResponseBody):
    """Which shards the nodes of the run say they can give, this one included."""

    nodes: int = Field(description="nodes that have any")
    shards: int = Field(description="shards that somebody has")
    copies: list[float] = Field(description="mean number of copies in equal stretches of the data set, at most 128")


class DataBody(ResponseBody):
    """Genesis data on this node."""

    source: Text
    verified: bool
    explanation: Text
    is_demo: bool
    total_shards: int
    total_tokens: int
    held_out_shards: int
    shard: int | None
    shard_windows_done: int
    shard_windows_total: int
    passes: int
    shards_seen: int
    rotations: int
    last_rotation_reason: Text
    cached_shards: int
    cached_bytes: int
    cache_limit_bytes: int
    next_shard_ready: bool
    downloads: list[DownloadBody]
    shared: list[ShardRangeBody] = Field(description="shards that other nodes can get from here")
    files_from_nodes: int = Field(description="files that other nodes gave because the source failed")
    shards: list[ShardBody] = Field(description="in the order of their use, then those that were read; at most 24")
    refresh: RefreshBody
    coverage: CoverageBody | None = Field(description="null before the node is in a swarm")


class DataAnswer(ResponseBody):
    """GET /api/data; `data` is null until the manifest was read."""

    data: DataBody | None


class PeerRating(StrEnum):
    """A peer's score in a word."""

    GOOD = "good"
    NEUTRAL = "neutral"
    DOUBTFUL = "doubtful"
    BAD = "bad"
    BANNED = "banned"


class PeerBody(ResponseBody):
    """Another node of the run, as its last verified report and announcement describe it."""

    node_id: str
    wallet_id: str
    roles: list[Role]
    role: str = Field(description='roles joined by "+", for people')
    layers: Layers | None = Field(description="null: it holds no part of the model, or none yet")
    state: Text = Field(description="as /api/status has it; empty before the first report")
    loss_ema: Number
    tokens_per_second: Number
    steps: int
    tokens: int
    shard: int | None
    outer_step: int
    state_hash: str
    version: Text
    started_at: Number
    first_seen: Number
    last_seen: Number
    connection: ConnectionKind | None = Field(description="null: known only through others")
    address: Text
    rtt_seconds: Number
    bytes_sent: int = Field(description="by this node to the peer")
    bytes_received: int = Field(description="by this node from the peer")
    score: Number = Field(description="0 is neutral; below it the peer misbehaved")
    standing: PeerRating


class NetworkBody(ResponseBody):
    """This node's connections; bytes since the start, rates in bytes a second."""

    state: NetworkState
    explanation: Text
    peers: int = Field(description="other nodes of the run")
    connections: int
    addresses: list[Text] = Field(description="where others can reach this node")
    join_line: Text = Field(description="what others type to join this run through this node; may be empty")
    bytes_sent: int
    bytes_received: int
    upload_rate: Number
    download_rate: Number
    upload_limit: Number = Field(description="null: none")
    banned_peers: int
    refused: dict[Text, int] = Field(description="how often something a peer sent was refused, by reason")


class SwarmBody(ResponseBody):
    """All nodes of the run together, this one included; totals never fall when nodes leave."""

    nodes: int
    training_nodes: int
    global_loss: Number
    min_loss: Number
    total_steps: int
    total_tokens: int
    shards_covered: int
    tokens_per_second: Number


class PeersBody(ResponseBody):
    """GET /api/peers."""

    count: int
    network: NetworkBody
    swarm: SwarmBody | None
    peers: list[PeerBody]


class ArchitectureBody(ResponseBody):
    """Shape of the Llama-like model."""

    hidden_size: int
    layer_count: int
    head_count: int
    key_value_head_count: int
    feed_forward_size: int
    vocabulary_size: int
    sequence_length: int
    rope_theta: Number
    norm_epsilon: Number


class StartupStepBody(ResponseBody):
    """One line of the start-up progress."""

    name: Text
    state: StartupStepState
    detail: Text
    fraction: Number = Field(description="0..1 when it can be told")


class ModelBody(ResponseBody):
    """The model this node holds, or its part of it."""

    architecture: ArchitectureBody
    parameter_count: int = Field(description="of the whole model")
    layers: Layers | None = Field(description="those that this node holds; null: none, or none yet")
    roles: list[Role]


class MemoryBody(ResponseBody):
    """Memory tier and limits in MB of 10**6 bytes."""

    tier_mb: int
    limit_mb: int
    limit_source: Text
    need_mb: int
    resident_mb: int
    peak_mb: int


class RunBody(ResponseBody):
    """The run this node serves."""

    run_id: str
    is_own: bool
    is_demo: bool
    explanation: Text


class HeldOutBody(ResponseBody):
    """One evaluation on the pinned held-out sequences, nats a token."""

    step: int
    time: Number
    loss: Number
    improvement: Number
    standard_error: Number
    measured_by: tuple[Text, ...] = Field(description="other nodes that measured it and signed that; empty: this node")


class TrainingBody(ResponseBody):
    """Progress of the inner steps on this node."""

    steps: int
    tokens: int
    loss: Number
    loss_ema: Number
    lr: Number
    tokens_per_second: Number
    step_seconds: Number
    batch_size: int
    sequences_per_step: int
    skipped_steps: int
    precision: str
    held_out: list[HeldOutBody]
    held_out_sequences: int
    unigram_entropy: Number


class VerificationBody(ResponseBody):
    """Whether the model is really learning, in words."""

    training_verified: bool
    status: LearningVerdict
    reason: Text
    action: Text
    loss_trend: LossTrend


class DilocoBody(ResponseBody):
    """Outer steps of this node."""

    inner_step: int
    inner_steps_total: int
    outer_steps: int
    last_sync: Number
    members: int
    lone_outer: str
    strategy: str = Field(description="diloco, streaming, sparta or averaging; empty while it is not known")
    part: str = Field(description='what the next round is about, in words: "all weights", "quarter 2 of 4"')
    codec: str = Field(description="how contributions to it are encoded")
    explanation: Text
    state_root: str
    certified_root: str
    successful_syncs: int
    failed_syncs: int


class CheckpointGenerationBody(ResponseBody):
    """One restorable state on disk."""

    step: int
    outer_step: int
    time: Number
    loss: Number
    bytes: int
    path: Text


class CheckpointsBody(ResponseBody):
    """What is safe on disk and what a kill at this moment could lose."""

    folder: Text
    generations: list[CheckpointGenerationBody]
    last_saved_step: int | None
    last_saved_time: Number
    interval_seconds: Number
    could_lose: Text
    could_lose_steps: int
    could_lose_seconds: Number
    last_write_seconds: Number
    last_stall_seconds: Number
    alarm: Text | None
    restored: Text | None


class ThreadBody(ResponseBody):
    """CPU use of one thread, in cores."""

    name: Text
    cores: Number


class ResourcesBody(ResponseBody):
    """What the node uses of this computer."""

    device: str
    device_name: Text
    cpu_cores: Number
    cpu_threads_limit: int
    disk_free_bytes: int
    disk_used_bytes: int
    gpu_memory_bytes: int | None
    gpu_memory_total_bytes: int | None
    gpu_utilisation: Number
    threads: list[ThreadBody]


class PathsBody(ResponseBody):
    """Where the node keeps what on its computer; the configuration file exists only when something was stored."""

    data_dir: Text
    config_file: Text
    data_cache: Text
    checkpoints: Text
    logs: Text
    node_key: Text
    api_secret: Text


class DecisionBody(ResponseBody):
    """What training may do by the owner's rules, or by word."""

    action: TrainingAction
    reason: Text
    rule: Text = Field(description='the setting that decided, "user" for a pause by hand, "" when nothing holds it up')
    until: Number = Field(description="when this ends, seconds since the epoch; null: not known")
    share: Number = Field(description="of the time, in which training computes; 0 while it pauses")


class ReadingBody(ResponseBody):
    """One thing that is looked at because a setting asks for it."""

    name: Text
    value: Text = Field(description="in words; why not, where it is not known")
    is_known: bool = Field(description="false: it never pauses or slows training down")


class NetworkDecisionBody(ResponseBody):
    """What may pass the network by the owner's rules."""

    action: NetworkAction = Field(description="small_only: no tensors, states and shards")
    reason: Text
    rule: Text
    until: Number


class OwnerPolicyBody(ResponseBody):
    """How training gives way to the owner of this computer."""

    decision: DecisionBody
    readings: list[ReadingBody]
    network: NetworkDecisionBody
    transferred_megabytes: int = Field(description="in this calendar month, sent and received")


class StatusBody(ResponseBody):
    """GET /api/status: the whole snapshot but for the training curve."""

    version: str
    started_at: Number
    time: Number = Field(description="of this snapshot, seconds since the epoch")
    uptime_seconds: Number
    state: NodeState
    state_reason: Text
    is_standing_by: bool = Field(description="it could train, but nobody asks anything of its layers at present")
    startup: list[StartupStepBody]
    node_id: str | None
    wallet_id: str | None
    data_dir: Text
    paths: PathsBody
    is_demo: bool
    paused_until: Number
    kindness: OwnerPolicyBody
    warnings: list[Text]
    roles: list[Role]
    layers: Layers | None
    device: str
    architecture: ArchitectureBody | None
    model: ModelBody | None
    memory: MemoryBody | None
    run: RunBody | None
    training: TrainingBody
    verification: VerificationBody
    diloco: DilocoBody
    data: DataBody | None
    checkpoints: CheckpointsBody
    resources: ResourcesBody
    network: NetworkBody
    pipeline: PipelineSummary | None = Field(description="the run's stages in short; null before they are known")
    swarm: SwarmBody | None = Field(description="all nodes of the run together; null before the first look around")
    contribution: WorkBody | None = Field(description="what this computer did since the beginning; null: nothing")
    peers: list[PeerBody] = Field(description="the first 32; all of them are at /api/peers")


class HealthBody(ResponseBody):
    """GET /health: the process answers."""

    status: str = Field(description='"ok", or "stale" when the node published nothing for 30 s')
    state: NodeState
    version: str
    snapshot_age_seconds: Number


class LogRecordBody(ResponseBody):
    """One line of the log; `sequence` grows by one a line."""

    sequence: int
    time: Number
    level: str
    logger: str
    message: Text


class LogsBody(ResponseBody):
    """GET /api/logs: lines after a sequence number, oldest first."""

    records: list[LogRecordBody]
    last_sequence: int = Field(description="give it as `after` in the next call")
