"""Nodes that count as gone although they report: they do not answer, or do not hold the layers they report."""

from __future__ import annotations

from typing import cast

import anyio

from neuroshard.membership.swarm_view import Membership
from neuroshard.types import NodeId

DISBELIEF_SECONDS = 600.0  # at most, whatever such a node reports meanwhile


class LostNodes:
    """`in` tells whether a node is lost."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._last_reports: dict[NodeId, int] = {}
        self._disbelieved: dict[NodeId, float] = {}  # until when, by the event loop's clock
        self.added = 0  # so far: between two of them only reports and time change anything

    def add(self, node_id: NodeId) -> None:
        """Count a node as gone until it reports again."""
        member = self._membership.view.members.get(node_id)
        if member is not None:
            self._last_reports[node_id] = member.report.sequence
            self.added += 1

    def now(self) -> frozenset[NodeId]:
        """All that are lost."""
        return frozenset(node for node in (*self._last_reports, *self._disbelieved) if node in self)

    def disbelieve(self, node_id: NodeId, seconds: float = DISBELIEF_SECONDS) -> None:
        """Count a node as gone for so long: what it reports is not true."""
        now = anyio.current_time()
        self._disbelieved = {node: until for node, until in self._disbelieved.items() if until > now}
        self._disbelieved[node_id] = now + seconds
        self.added += 1

    def __contains__(self, node: object) -> bool:
        node_id = cast("NodeId", node)
        if node_id in self._disbelieved and anyio.current_time() < self._disbelieved[node_id]:
            return True
        if node_id not in self._last_reports:
            return False
        member = self._membership.view.members.get(node_id)
        if member is None or member.report.sequence > self._last_reports[node_id]:
            del self._last_reports[node_id]
            return False
        return True
