"""Hides stale values: the API shows null for a rate whose source has stopped, never its last value. Pure."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace
from math import nan
from typing import TYPE_CHECKING, TypeVar

from neuroshard.status.snapshot import NetworkState, NodeState, NodeStatus, PeerStatus
from neuroshard.status.values import Stale, declarations

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

STALE_SECONDS = 30.0  # the node publishes several times per second; without a snapshot for this long, it hangs
T = TypeVar("T", bound="DataclassInstance")


def is_old(age_seconds: float) -> bool:
    """Whether a snapshot of this age is too old to describe the present. NaN is too old."""
    return not age_seconds <= STALE_SECONDS


def fresh(status: NodeStatus, age_seconds: float) -> NodeStatus:
    """The snapshot with NaN, which JSON shows as null, in place of every value that is stale by its declaration."""
    stale = stale_conditions(status, age_seconds)
    pipeline = status.pipeline
    if pipeline is not None and pipeline.flow is not None:
        pipeline = replace(pipeline, flow=hidden(pipeline.flow, stale))
    resources = hidden(status.resources, stale)
    return replace(
        status,
        training=hidden(status.training, stale),
        resources=replace(resources, threads=tuple(hidden(thread, stale) for thread in resources.threads)),
        network=hidden(status.network, stale),
        swarm=None if status.swarm is None else hidden(status.swarm, stale),
        pipeline=pipeline,
        peers=tuple(_fresh_peer(peer, stale) for peer in status.peers),
    )


def stale_conditions(status: NodeStatus, age_seconds: float) -> Set[Stale]:
    """The staleness conditions that apply to this node. IDLE_PEER also depends on the peer: `fresh` adds it."""
    if is_old(age_seconds):
        return frozenset(Stale)
    found: set[Stale] = set()
    if status.state is not NodeState.TRAINING:
        found.add(Stale.NOT_TRAINING)
    if status.network.state not in (NetworkState.ALONE, NetworkState.CONNECTED):
        found.add(Stale.NETWORK_DOWN)
    return found


def hidden(value: T, stale: Set[Stale]) -> T:
    """A status value with NaN in its fields that are stale under one of these conditions."""
    if not stale:
        return value
    names = [declared.name for declared in declarations(type(value)) if declared.stale_when in stale]
    return replace(value, **dict.fromkeys(names, nan))


def _fresh_peer(peer: PeerStatus, stale: Set[Stale]) -> PeerStatus:
    is_idle = peer.state not in ("", NodeState.TRAINING)  # empty: its first report is on the way
    return hidden(peer, {*stale, Stale.IDLE_PEER} if is_idle else stale)
