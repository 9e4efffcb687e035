"""Detects within seconds that a node on which many depend is gone, or never held the stages that it reports."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import anyio

from neuroshard.identity import hash_parts
from neuroshard.membership.holder_health import ASK_AGAIN_SECONDS, DISBELIEF_SECONDS
from neuroshard.network import ScoreReason
from neuroshard.node.stage_swarm import StageSwarm
from neuroshard.state.replica_status import query_status
from neuroshard.state.transfer_messages import DonorError
from neuroshard.types import NodeId

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class MonitorTimes:
    """A node is asked when something is suspicious about it, and lost when it does not answer twice."""

    look_seconds: float = 1.0
    silent_seconds: float = 15.0  # since its last report
    again_seconds: float = 2.0  # from one question to the next
    denial_seconds: float = 20.0  # a node that has gone to other stages may be asked before its report comes
    forgotten_seconds: float = 120.0  # after an older denial that no other followed, the count starts anew
    mute_seconds: float = 60.0  # a node that reports and has not answered since it was lost before; then twice as long
    few: int = 2  # holders of a stage: so many are watched, and whether there are so many is made sure of


@dataclass
class HolderMonitor:
    """Watches the holders of stages that few nodes hold."""

    swarm: StageSwarm
    times: MonitorTimes = field(default_factory=MonitorTimes)
    now: Callable[[], float] = time.time  # as the membership counts

    def __post_init__(self) -> None:
        self._unanswered: dict[tuple[NodeId, int], int] = {}
        self._losses: dict[NodeId, int] = {}  # since its last answer
        self._asked_at: dict[tuple[NodeId, int], float] = {}
        self._denied_at: dict[tuple[NodeId, int], float] = {}  # for the first time

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self.look()
            await anyio.sleep(self.times.look_seconds)

    async def look(self) -> None:
        """Ask those about whom something is suspicious, and those who were not asked for long."""
        watched = self._watched()
        self._unanswered = {key: count for key, count in self._unanswered.items() if key in watched}
        self._forget_old(anyio.current_time())
        members = self.swarm.membership.view.members
        self._losses = {node: count for node, count in self._losses.items() if node in members}
        self.swarm.confirmed.keep_only(members)
        confirmed = list[tuple[NodeId, int]]()
        async with anyio.create_task_group() as tasks:
            for (node, stage), is_rare in watched.items():
                if self._is_due(node, stage, is_rare=is_rare):
                    tasks.start_soon(self._ask, node, stage, confirmed)
        for node, stage in confirmed:  # together: of two replicas that answer neither is alone for a moment
            self.swarm.confirmed.add(node, stage)

    def _forget_old(self, now: float) -> None:
        self._asked_at = {key: at for key, at in self._asked_at.items() if now - at < ASK_AGAIN_SECONDS}
        self._denied_at = {key: at for key, at in self._denied_at.items() if now - at < self.times.forgotten_seconds}

    def _watched(self) -> dict[tuple[NodeId, int], bool]:
        """Others and their stages, with whether few hold it; of a stage with many holders, a few of them.

        Else some false reports could hide that a stage has one holder.
        """
        coverage, few = self.swarm.coverage(), self.times.few
        watched = dict[tuple[NodeId, int], bool]()
        for stage in range(coverage.stage_count):
            holders = coverage.replicas_of(stage)
            is_rare = len(holders) <= few
            others = [node for node in holders if node != self.swarm.node_id]
            first = others if is_rare else sorted(others, key=partial(self._turn, stage))[:few]
            watched |= {(node, stage): is_rare for node in first}
        return watched

    def _turn(self, stage: int, node: NodeId) -> tuple[bool, float, bytes]:
        """Who has confirmed it comes first, then who was not asked for longest; every node asks others first."""
        is_new = not self.swarm.confirmed.told_within(ASK_AGAIN_SECONDS, node, stage)
        lot = hash_parts("neuroshard/holder-watch", self.swarm.node_id, node)
        return is_new, self._asked_at.get((node, stage), -1.0), lot

    def _is_due(self, node: NodeId, stage: int, *, is_rare: bool) -> bool:
        member = self.swarm.membership.view.members.get(node)
        asked_at = self._asked_at.get((node, stage))
        if member is None or (asked_at is not None and anyio.current_time() - asked_at < self.times.again_seconds):
            return False
        is_silent = self.now() - member.last_seen > self.times.silent_seconds
        is_suspicious = is_rare and (is_silent or not self.swarm.is_connected(node))
        return is_suspicious or not self.swarm.confirmed.told_within(ASK_AGAIN_SECONDS, node, stage)

    async def _ask(self, node: NodeId, stage: int, confirmed: list[tuple[NodeId, int]]) -> None:
        self._asked_at[node, stage] = anyio.current_time()
        try:
            standing = await query_status(self.swarm.asking, self.swarm.name_of(stage), node)
        except DonorError:
            self._does_not_answer(node, stage)
            return
        self._unanswered.pop((node, stage), None)
        self._losses.pop(node, None)
        if standing is not None and standing.is_live:
            self._denied_at.pop((node, stage), None)
            confirmed.append((node, stage))
        else:
            self._does_not_hold(node, stage)

    def _does_not_answer(self, node: NodeId, stage: int) -> None:
        count = self._unanswered[node, stage] = self._unanswered.get((node, stage), 0) + 1
        if count < 2 or node in self.swarm.lost:
            return
        log.info("Node %s does not answer any more: its layers count as missing.", node)
        self.swarm.confirmed.remove(node, stage)  # it is asked as soon as it reports again
        self.swarm.lost.add(node)
        losses = self._losses[node] = self._losses.get(node, 0) + 1
        if losses > 1:  # else it would count for some seconds with every report, and whoever fills its place give up
            self.swarm.lost.disbelieve(node, min(DISBELIEF_SECONDS, self.times.mute_seconds * 2 ** (losses - 2)))

    def _does_not_hold(self, node: NodeId, stage: int) -> None:
        """By its own word; its report says that it does, or did a moment ago."""
        self.swarm.confirmed.remove(node, stage)
        now = anyio.current_time()
        if now - self._denied_at.setdefault((node, stage), now) >= self.times.denial_seconds:
            log.warning("Node %s reports layers that it does not hold: it is not counted for a while.", node)
            del self._denied_at[node, stage]
            self.swarm.asking.report(node, ScoreReason.FALSE_REPORT)
            self.swarm.lost.disbelieve(node)
