"""Nodes that get ready for longer than a download may take: nobody should wait for them any more."""

from __future__ import annotations

from collections.abc import Iterable

from neuroshard.membership.swarm_view import Member
from neuroshard.status.snapshot import NodeState
from neuroshard.types import NodeId

PATIENCE_SECONDS = 600.0  # for every hundredth of the state: a slow line is no reason to give a node up


class SlowStarts:
    """What this node has seen of others that get ready."""

    def __init__(self) -> None:
        self._furthest: dict[NodeId, tuple[int, float]] = {}  # percent, and when that was seen first

    def overdue(self, members: Iterable[Member]) -> frozenset[NodeId]:
        """Those of the members who have come no further for too long, at this look."""
        before, self._furthest = self._furthest, {}
        overdue = set[NodeId]()
        for member in members:
            if member.report.state is NodeState.STARTING and member.report.layers is not None:
                now, told = member.last_seen, member.report.ready_percent
                percent, since = before.get(member.node_id, (-1, now))
                self._furthest[member.node_id] = (told, now) if told > percent else (percent, since)
                if told <= percent and now - since > PATIENCE_SECONDS:
                    overdue.add(member.node_id)
        return frozenset(overdue)
