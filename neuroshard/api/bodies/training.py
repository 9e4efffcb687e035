"""Answers about training: the verdict, the network's numbers and the curve."""

from __future__ import annotations

from pydantic import Field

from neuroshard.api.bodies.base import Answer, Layers, Number, Text
from neuroshard.status.snapshot import LossTrend, NodeState, Verdict
from neuroshard.types import Role


class VerifyBody(Answer):
    """GET /api/training/verify: is the model really learning?"""

    training_verified: bool
    status: Verdict
    reason: Text
    action: Text
    loss_trend: LossTrend
    hash_agreement_rate: Number = Field(description="0..1; 1 when alone")
    sync_success_rate: Number = Field(description="0..1; null when there is nobody to synchronise with")
    global_loss: Number
    local_loss: Number
    initial_loss: Number
    steps: int
    held_out_loss: Number
    held_out_initial_loss: Number
    unigram_entropy: Number = Field(description="loss that knowing only word frequencies gives")


class DilocoProgress(Answer):
    """Progress towards the next outer step."""

    inner_step: int
    inner_steps_total: int
    progress: Number = Field(description="0..1")
    outer_steps: int
    last_sync: Number
    members: int
    lone_outer: str
    strategy: str = Field(description="diloco, streaming, sparta or averaging; empty while it is not known")
    part: str = Field(description='what the next round is about, in words: "all weights", "quarter 2 of 4"')
    codec: str = Field(description="how contributions to it are encoded")
    explanation: Text


class NetworkNode(Answer):
    """One node of the network."""

    node_id: str
    wallet_id: str | None
    roles: list[Role]
    role: str = Field(description='roles joined by "+", for people')
    layers: Layers | None
    loss: Number
    tokens_per_second: Number
    last_seen: Number
    is_local: bool


class LocalNode(Answer):
    """This node's own part of the network's numbers."""

    node_id: str | None
    state: NodeState
    roles: list[Role]
    layers: Layers | None
    loss: Number
    loss_ema: Number
    steps: int
    tokens: int
    tokens_per_second: Number
    skipped_steps: int


class GlobalBody(Answer):
    """GET /api/training/global: the network's numbers."""

    training_nodes: int
    global_loss: Number
    global_min_loss: Number
    total_steps: int
    total_tokens: int
    data_shards: int
    data_shards_covered: int
    tokens_per_second: Number
    hash_agreement_rate: Number
    model_hashes: dict[str, str]
    loss_trend: LossTrend
    training_verified: bool
    is_converging: bool
    successful_syncs: int
    failed_syncs: int
    sync_success_rate: Number
    diloco: DilocoProgress
    nodes: list[NetworkNode]
    local: LocalNode


class HistoryPoint(Answer):
    """One point of the curve; loss in nats a token."""

    step: int
    time: Number
    loss: Number
    lr: Number
    tokens: int


class HistoryHeldOut(Answer):
    """One held-out evaluation beside the curve."""

    step: int
    time: Number
    loss: Number


class HistoryBody(Answer):
    """GET /api/training/history: at most 1,000 points, oldest first."""

    points: list[HistoryPoint]
    held_out: list[HistoryHeldOut]
