"""Answers about the network: this node's connections, the run's numbers, and every other node."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from neuroshard.api.bodies.base import Answer, Layers, Number, Text
from neuroshard.status.snapshot import ConnectionKind, NetworkState
from neuroshard.types import Role


class Standing(StrEnum):
    """A peer's score in a word."""

    GOOD = "good"
    NEUTRAL = "neutral"
    DOUBTFUL = "doubtful"
    BAD = "bad"
    BANNED = "banned"


class PeerBody(Answer):
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
    standing: Standing


class NetworkBody(Answer):
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


class SwarmBody(Answer):
    """All nodes of the run together, this one included; totals never fall when nodes leave."""

    nodes: int
    training_nodes: int
    global_loss: Number
    min_loss: Number
    total_steps: int
    total_tokens: int
    shards_covered: int
    tokens_per_second: Number


class PeersBody(Answer):
    """GET /api/peers."""

    count: int
    network: NetworkBody
    swarm: SwarmBody | None
    peers: list[PeerBody]
