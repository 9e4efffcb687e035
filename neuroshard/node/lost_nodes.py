"""Nodes that count as gone although their last report is young: they did not answer, and have not reported since."""

from __future__ import annotations

from typing import cast

from neuroshard.swarm.membership import Membership
from neuroshard.types import NodeId


class LostNodes:
    """`in` tells whether a node is lost."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._last_reports: dict[NodeId, int] = {}
        self.added = 0  # so far: between two of them only reports change anything

    def add(self, node_id: NodeId) -> None:
        """Count a node as gone until it reports again."""
        member = self._membership.view.members.get(node_id)
        if member is not None:
            self._last_reports[node_id] = member.report.sequence
            self.added += 1

    def now(self) -> frozenset[NodeId]:
        """All that are lost."""
        return frozenset(node for node in tuple(self._last_reports) if node in self)

    def __contains__(self, node: object) -> bool:
        node_id = cast("NodeId", node)
        if node_id not in self._last_reports:
            return False
        member = self._membership.view.members.get(node_id)
        if member is None or member.report.sequence > self._last_reports[node_id]:
            del self._last_reports[node_id]
            return False
        return True
