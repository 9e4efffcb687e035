"""Health of the nodes that report stages: confirmed by an answer, lost although they report, or slow to start."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import cast

import anyio

from neuroshard.membership.swarm_view import Member, Membership
from neuroshard.status.snapshot import NodeState
from neuroshard.types import NodeId

ASK_AGAIN_SECONDS = 60.0
VALID_SECONDS = 150.0  # time for two unanswered queries


class ConfirmedHolders:
    """Records when each node last confirmed that it trains a stage. One object for each node."""

    def __init__(self) -> None:
        self._confirmed_at: dict[tuple[NodeId, int], float] = {}  # by the event loop's clock

    def add(self, node_id: NodeId, stage: int) -> None:
        """Record that a node has just confirmed that it trains a stage."""
        self._confirmed_at[node_id, stage] = anyio.current_time()

    def remove(self, node_id: NodeId, stage: int) -> None:
        """Record that a node has just denied that it trains a stage."""
        self._confirmed_at.pop((node_id, stage), None)

    def keep_only(self, nodes: Container[NodeId]) -> None:
        """Forget the confirmations of all other nodes."""
        self._confirmed_at = {key: at for key, at in self._confirmed_at.items() if key[0] in nodes}

    def was_reported_within(self, seconds: float, node_id: NodeId, stage: int) -> bool:
        """Return whether the node confirmed the stage within this time."""
        at = self._confirmed_at.get((node_id, stage))
        return at is not None and anyio.current_time() - at < seconds


DISBELIEF_SECONDS = 600.0  # for which the reports of such a node do not count


class LostNodes:
    """The nodes that count as gone although reports name them. `node in lost_nodes` tests one of them."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._last_reports: dict[NodeId, int] = {}
        self._disbelieved: dict[NodeId, float] = {}  # until when, by the event loop's clock
        self.added = 0  # number of additions: while it is equal, only reports and time change the result

    def add(self, node_id: NodeId) -> None:
        """Count a node as gone until it reports again."""
        member = self._membership.view.members.get(node_id)
        if member is not None:
            self._last_reports[node_id] = member.report.sequence
            self.added += 1

    def now(self) -> frozenset[NodeId]:
        """Return all nodes that are lost now."""
        return frozenset(node for node in (*self._last_reports, *self._disbelieved) if node in self)

    def disbelieve(self, node_id: NodeId, seconds: float = DISBELIEF_SECONDS) -> None:
        """Count a node as gone for this time, whatever it reports: its reports are false."""
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


PATIENCE_SECONDS = 600.0  # for each percent of the state, because a slow line is not a failure


class SlowStarts:
    """Watches how far starting nodes have got, by the ready percentages of their reports."""

    def __init__(self) -> None:
        self._furthest: dict[NodeId, tuple[int, float]] = {}  # percent, and when it was first seen

    def overdue(self, members: Iterable[Member]) -> frozenset[NodeId]:
        """Return the starting members without progress for PATIENCE_SECONDS; call it regularly."""
        before, self._furthest = self._furthest, {}
        overdue = set[NodeId]()
        for member in members:
            if member.report.state is NodeState.STARTING and member.report.layers is not None:
                now, reported = member.last_seen, member.report.ready_percent
                percent, since = before.get(member.node_id, (-1, now))
                self._furthest[member.node_id] = (reported, now) if reported > percent else (percent, since)
                if reported <= percent and now - since > PATIENCE_SECONDS:
                    overdue.add(member.node_id)
        return frozenset(overdue)
