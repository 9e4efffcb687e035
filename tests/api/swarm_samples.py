"""Snapshots of a node among others."""

from __future__ import annotations

from dataclasses import replace

from fake_node import STARTED, training_status

from neuroshard.status.snapshot import (
    ConnectionKind,
    NetworkState,
    NetworkStatus,
    NodeState,
    NodeStatus,
    PeerStatus,
    SwarmStatus,
)
from neuroshard.types import LayerRange, NodeId, Role, ShardId, WalletId

JOIN_LINE = "neuroshard --run abab --peer /ip4/192.0.2.7/tcp/4001/p2p/12D3KooWtest"


def peer(number: int) -> PeerStatus:
    """A peer that trains everything it is asked to, reached directly."""
    return PeerStatus(
        node_id=NodeId(f"12D3KooWpeer{number:04}"),
        wallet_id=WalletId(f"{number:016x}"),
        roles=(Role.DRIVER, Role.VALIDATOR),
        layers=LayerRange(0, 4),
        loss_ema=5.0 + number / 1_000,
        tokens_per_second=1_000.0 + number,
        last_seen=STARTED + 59,
        steps=100 + number,
        tokens=51_200,
        shard=ShardId(number),
        outer_step=2,
        state_hash="aa" * 32,
        state=NodeState.TRAINING,
        started_at=STARTED - 100,
        first_seen=STARTED + 1,
        version="0.0.1",
        connection=ConnectionKind.DIRECT,
        address=f"/ip4/192.0.2.{number % 250}/tcp/4001",
        rtt_seconds=0.012,
        bytes_sent=1_000,
        bytes_received=2_000,
        score=3.0,
    )


def among(count: int) -> NodeStatus:
    """A node that trains with `count` others."""
    network = NetworkStatus(
        state=NetworkState.CONNECTED,
        explanation="Connected.",
        addresses=("/ip4/192.0.2.7/tcp/4001/p2p/12D3KooWtest",),
        connections=count,
        bytes_sent=10_000,
        bytes_received=20_000,
        upload_rate=100.0,
        download_rate=200.0,
        upload_limit=1e6,
        banned_peers=1,
        refused=(("bad_signature", 2), ("oversized", 1)),
        join_line=JOIN_LINE,
    )
    swarm = SwarmStatus(
        nodes=count + 1,
        training_nodes=count + 1,
        global_loss=5.5,
        min_loss=4.5,
        total_steps=9_000,
        total_tokens=4_608_000,
        shards_covered=9,
        tokens_per_second=5_000.0,
        model_hashes=((NodeId("12D3KooWpeer0000"), "aa" * 32),),
    )
    peers = tuple(peer(number) for number in range(count))
    return replace(training_status(), network=network, swarm=swarm, peers=peers)
