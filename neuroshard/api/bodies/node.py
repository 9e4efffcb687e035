"""Answers about this node: status, data, checkpoints, configuration and logs."""

from __future__ import annotations

from pydantic import Field

from neuroshard.api.bodies.base import Answer, Layers, Number, Text
from neuroshard.api.bodies.contribution import WorkBody
from neuroshard.api.bodies.data import DataBody
from neuroshard.api.bodies.network import NetworkBody, PeerBody, SwarmBody
from neuroshard.api.bodies.pipeline import PipelineSummary
from neuroshard.status.kindness import Action, NetworkAction
from neuroshard.status.snapshot import LossTrend, NodeState, StageState, Verdict
from neuroshard.types import Role


class ArchitectureBody(Answer):
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


class StartupStageBody(Answer):
    """One line of the start-up progress."""

    name: Text
    state: StageState
    detail: Text
    fraction: Number = Field(description="0..1 when it can be told")


class ModelBody(Answer):
    """The model this node holds, or its part of it."""

    architecture: ArchitectureBody
    parameter_count: int = Field(description="of the whole model")
    layers: Layers | None = Field(description="those that this node holds; null: none, or none yet")
    roles: list[Role]


class MemoryBody(Answer):
    """Memory tier and limits in MB of 10**6 bytes."""

    tier_mb: int
    limit_mb: int
    limit_source: Text
    need_mb: int
    resident_mb: int
    peak_mb: int


class RunBody(Answer):
    """The run this node serves."""

    run_id: str
    is_own: bool
    is_demo: bool
    explanation: Text


class HeldOutBody(Answer):
    """One evaluation on the pinned held-out sequences, nats a token."""

    step: int
    time: Number
    loss: Number
    improvement: Number
    standard_error: Number
    measured_by: tuple[Text, ...] = Field(description="other nodes that measured it and signed that; empty: this node")


class TrainingBody(Answer):
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


class VerificationBody(Answer):
    """Whether the model is really learning, in words."""

    training_verified: bool
    status: Verdict
    reason: Text
    action: Text
    loss_trend: LossTrend


class DilocoBody(Answer):
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


class CheckpointGenerationBody(Answer):
    """One restorable state on disk."""

    step: int
    outer_step: int
    time: Number
    loss: Number
    bytes: int
    path: Text


class CheckpointsBody(Answer):
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


class ThreadBody(Answer):
    """CPU use of one thread, in cores."""

    name: Text
    cores: Number


class ResourcesBody(Answer):
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


class PathsBody(Answer):
    """Where the node keeps what on its computer; the configuration file exists only when something was stored."""

    data_dir: Text
    config_file: Text
    data_cache: Text
    checkpoints: Text
    logs: Text
    node_key: Text
    api_secret: Text


class DecisionBody(Answer):
    """What training may do by the owner's rules, or by word."""

    action: Action
    reason: Text
    rule: Text = Field(description='the setting that decided, "user" for a pause by hand, "" when nothing holds it up')
    until: Number = Field(description="when this ends, seconds since the epoch; null: not known")
    share: Number = Field(description="of the time, in which training computes; 0 while it pauses")


class ReadingBody(Answer):
    """One thing that is looked at because a setting asks for it."""

    name: Text
    value: Text = Field(description="in words; why not, where it is not known")
    is_known: bool = Field(description="false: it never pauses or slows training down")


class NetworkDecisionBody(Answer):
    """What may pass the network by the owner's rules."""

    action: NetworkAction = Field(description="small_only: no tensors, states and shards")
    reason: Text
    rule: Text
    until: Number


class KindnessBody(Answer):
    """How training gives way to the owner of this computer."""

    decision: DecisionBody
    readings: list[ReadingBody]
    network: NetworkDecisionBody
    transferred_megabytes: int = Field(description="in this calendar month, sent and received")


class StatusBody(Answer):
    """GET /api/status: the whole snapshot but for the training curve."""

    version: str
    started_at: Number
    time: Number = Field(description="of this snapshot, seconds since the epoch")
    uptime_seconds: Number
    state: NodeState
    state_reason: Text
    is_standing_by: bool = Field(description="it could train, but nobody asks anything of its layers at present")
    startup: list[StartupStageBody]
    node_id: str | None
    wallet_id: str | None
    data_dir: Text
    paths: PathsBody
    is_demo: bool
    paused_until: Number
    kindness: KindnessBody
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


class HealthBody(Answer):
    """GET /health: the process answers."""

    status: str = Field(description='"ok", or "stale" when the node published nothing for 30 s')
    state: NodeState
    version: str
    snapshot_age_seconds: Number


class LogRecordBody(Answer):
    """One line of the log; `sequence` grows by one a line."""

    sequence: int
    time: Number
    level: str
    logger: str
    message: Text


class LogsBody(Answer):
    """GET /api/logs: lines after a sequence number, oldest first."""

    records: list[LogRecordBody]
    last_sequence: int = Field(description="give it as `after` in the next call")
