"""Nodes, reports and announcements that look like real ones, for tests of the swarm."""

from __future__ import annotations

import zlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from hashlib import sha256
from typing import Any

import trio
from trio.testing import MockClock

from neuroshard.identity import Delegation, NodeIdentity, NodeKey, SignedClaim, TokenSecret, Wallet
from neuroshard.membership.announcements import Announcement
from neuroshard.membership.claim_intake import Statement
from neuroshard.membership.reports import _DICTIONARY, HEAD_BYTES, TrainingReport, packed
from neuroshard.network import Network
from neuroshard.status.snapshot import NodeState
from neuroshard.types import LayerRange, NodeId, Role, RunId, ShardId

EPOCH = 1_700_000_000.0
DAY = 86_400.0
RUN = RunId(sha256(b"run").hexdigest())
OTHER_RUN = RunId(sha256(b"another run").hexdigest())
TOPIC = f"reports/{RUN}/0"

REPORT = TrainingReport(
    run_id=RUN,
    sequence=1,
    steps=1234,
    tokens=5_054_464,
    loss_ema=3.25,
    shard=ShardId(17),
    shards_seen=3,
    roles=(Role.DRIVER, Role.VALIDATOR),
    layers=LayerRange(0, 12),
    outer_step=2,
    state_hash=sha256(b"state").hexdigest(),
    successful_syncs=2,
    failed_syncs=1,
    tokens_per_second=1500.5,
    state=NodeState.TRAINING,
    started_at=EPOCH - 100,
    interval_seconds=10.0,
)


def identity_of(number: int, delegated_for: float = 30 * DAY) -> NodeIdentity:
    wallet = Wallet.from_secret(TokenSecret("hex", (number + 1).to_bytes(32, "big")))
    key = NodeKey.from_seed((number + 1).to_bytes(32, "little"))
    delegation = Delegation.issue(wallet, key.public_key, EPOCH + delegated_for)
    return NodeIdentity(wallet.wallet_id, key.node_id, key, delegation)


def packed_with(claim: SignedClaim, content: bytes) -> bytes:
    """A packed claim with any content under our format, deflated less well than we do."""
    deflate = zlib.compressobj(1, zlib.DEFLATED, -15, zdict=_DICTIONARY)
    return packed(claim)[:HEAD_BYTES] + deflate.compress(content) + deflate.flush()


def announcement_of(identity: NodeIdentity, **changes: Any) -> Announcement:
    announcement = Announcement(
        run_id=RUN,
        parameters_version=1,
        layers=LayerRange(0, 12),
        addresses=(f"/memory/p2p/{identity.node_id}",),
        pool="203.0.113.7:4002",
        started_at=EPOCH,
        memory_tier_mb=6500,
        is_relay=False,
        version="0.2.0",
    )
    return replace(announcement, **changes)


def said(number: int, sequence: int = 1, **changes: Any) -> Statement[TrainingReport]:
    """A verified report of a node whose id is its number, without the cost of keys."""
    report = replace(REPORT, sequence=sequence, **changes)
    node = NodeId(f"node {number}")
    wallet = identity_of(0).wallet_id
    return Statement(node, wallet, EPOCH + sequence, EPOCH + DAY, report)


def clock() -> float:
    """Seconds since the epoch, virtual."""
    return EPOCH + trio.current_time()


def run_virtually(scenario: Callable[[], Awaitable[None]]) -> None:
    trio.run(scenario, clock=MockClock(autojump_threshold=0))


def scores_of(network: Network, *nodes: NodeId) -> Mapping[NodeId, float]:
    return {node: network.reputation.score(node) for node in nodes}
