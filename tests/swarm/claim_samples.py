"""Nodes, reports and announcements that look like real ones, for tests of the swarm."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from hashlib import sha256
from typing import Any

import msgspec
import trio
from msgspec.structs import replace
from trio.testing import MockClock

from neuroshard.identity import Delegation, NodeIdentity, NodeKey, TokenSecret, Wallet
from neuroshard.membership.announcements import Announcement
from neuroshard.membership.claim_intake import Statement
from neuroshard.membership.reports import TrainingReport
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


def altered(claim: bytes, change: Callable[[list[Any]], object]) -> bytes:
    """A claim with another content under the same signature.

    `change` gets payload, time, and body and signature of the delegation.
    """
    body, signature = msgspec.msgpack.decode(claim)
    content = msgspec.msgpack.decode(body)
    change(content)
    return msgspec.msgpack.encode([msgspec.msgpack.encode(content), signature])


def in_other_bytes(claim: bytes) -> bytes:
    """The same claim with a longer length field before its signature."""
    return claim[:-66] + b"\xc5\x00\x40" + claim[-64:]


def told(report: TrainingReport, **fields: Any) -> list[Any]:
    """A report as it travels, with any values in some fields."""
    values = msgspec.to_builtins(report)
    return [fields.pop(name, value) for name, value in zip(report.__struct_fields__, values, strict=True)] + [*fields]


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
