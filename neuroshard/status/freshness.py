"""Hides stale values: the API shows null for a rate whose source has stopped, never its last value. Pure."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import is_dataclass, replace
from math import nan
from typing import Any, TypeVar, cast

from neuroshard.status.snapshot import NetworkState, NodeState, NodeStatus, PeerStatus
from neuroshard.status.values import Stale, perishable

STALE_SECONDS = 30.0  # the node publishes several times per second; without a snapshot for this long, it hangs
T = TypeVar("T")


def is_old(age_seconds: float) -> bool:
    """Whether a snapshot of this age is too old to describe the present. NaN is too old."""
    return not age_seconds <= STALE_SECONDS


def fresh(status: NodeStatus, age_seconds: float) -> NodeStatus:
    """The snapshot without the values that are stale by their declaration, at any depth."""
    return hidden(status, stale_conditions(status, age_seconds))


def stale_conditions(status: NodeStatus, age_seconds: float) -> Set[Stale]:
    """The staleness conditions that apply to this node. IDLE_PEER also depends on the peer: `hidden` adds it."""
    if is_old(age_seconds):
        return frozenset(Stale)
    found: set[Stale] = set()
    if status.state is not NodeState.TRAINING:
        found.add(Stale.NOT_TRAINING)
    if status.network.state not in (NetworkState.ALONE, NetworkState.CONNECTED):
        found.add(Stale.NETWORK_DOWN)
    return found


def hidden(value: T, stale: Set[Stale]) -> T:
    """The value without its parts that are stale under one of these conditions.

    A stale number becomes NaN, which JSON shows as null; a stale tuple becomes empty; anything else becomes None.
    """
    if isinstance(value, tuple):
        return cast("T", tuple(hidden(part, stale) for part in cast("tuple[object, ...]", value)))
    if not is_dataclass(value) or isinstance(value, type):
        return value
    if isinstance(value, PeerStatus) and value.state not in ("", NodeState.TRAINING):  # empty: no report yet
        stale = {*stale, Stale.IDLE_PEER}
    changes = dict[str, Any]()
    for name, condition in perishable(type(value)).items():
        part = getattr(value, name)
        changes[name] = _nothing_like(part) if condition in stale else hidden(part, stale)
    return replace(value, **changes) if changes else value


def _nothing_like(value: object) -> object:
    return nan if isinstance(value, float) else () if isinstance(value, tuple) else None
