"""Notices within seconds that a node which many depend on is gone, long before its silence would show it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import anyio

from neuroshard.node.stage_swarm import StageSwarm
from neuroshard.training.transfer.standings import standings_of
from neuroshard.types import NodeId

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WatchTimes:
    """A node is asked when something is suspicious about it, and lost when it does not answer twice."""

    look_seconds: float = 1.0
    silent_seconds: float = 15.0  # since its last report
    again_seconds: float = 2.0  # from one question to the next
    few: int = 2  # holders of a stage: only these are watched


@dataclass
class HolderWatch:
    """Watches the holders of stages that few nodes hold."""

    swarm: StageSwarm
    times: WatchTimes = field(default_factory=WatchTimes)
    now: Callable[[], float] = time.time  # as the membership counts

    def __post_init__(self) -> None:
        self._unanswered: dict[NodeId, int] = {}
        self._asked_at: dict[NodeId, float] = {}

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self.look()
            await anyio.sleep(self.times.look_seconds)

    async def look(self) -> None:
        """Ask those about whom something is suspicious."""
        watched = self._watched()
        self._unanswered = {node: count for node, count in self._unanswered.items() if node in watched}
        self._asked_at = {node: at for node, at in self._asked_at.items() if node in watched}
        async with anyio.create_task_group() as tasks:
            for node, stage in watched.items():
                if self._is_suspicious(node):
                    tasks.start_soon(self._ask, node, stage)

    def _watched(self) -> dict[NodeId, int]:
        """Others that hold a stage with few, each with such a stage."""
        coverage = self.swarm.coverage()
        return {
            node: stage
            for stage in range(coverage.stage_count)
            if len(holders := coverage.replicas_of(stage)) <= self.times.few
            for node in holders
            if node != self.swarm.node_id
        }

    def _is_suspicious(self, node: NodeId) -> bool:
        member = self.swarm.membership.view.members.get(node)
        now = anyio.current_time()
        if member is None or now - self._asked_at.get(node, -self.times.again_seconds) < self.times.again_seconds:
            return False
        is_silent = self.now() - member.last_seen > self.times.silent_seconds
        return is_silent or not self.swarm.is_connected(node)

    async def _ask(self, node: NodeId, stage: int) -> None:
        self._asked_at[node] = anyio.current_time()
        answers = await standings_of(self.swarm.asking, self.swarm.name_of(stage), [node])
        if answers:
            self._unanswered.pop(node, None)
            return
        self._unanswered[node] = self._unanswered.get(node, 0) + 1
        if self._unanswered[node] >= 2:
            log.info("Node %s does not answer any more: its layers count as missing.", node)
            self.swarm.lost.add(node)
