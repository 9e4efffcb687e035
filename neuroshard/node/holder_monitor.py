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
from neuroshard.waiting import sleep_to_tick

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class MonitorTimes:
    """Times of the monitor. A node is asked if it is suspicious or due, and is lost after two unanswered questions."""

    look_seconds: float = 1.0
    silent_seconds: float = 15.0  # since its last report
    again_seconds: float = 2.0  # between two questions to the same node about one stage
    denial_seconds: float = 20.0  # a node that moved to other stages may be asked before its new report arrives
    forgotten_seconds: float = 120.0  # a denial this old with no other after it no longer counts
    mute_seconds: float = 60.0  # how long a node lost again with no answer in between is ignored; doubles each time
    few: int = 2  # a stage with at most this number of holders is rare; of others this number is verified


@dataclass
class HolderMonitor:
    """Asks holders of every stage for its status, and marks nodes lost that are silent or deny it.

    A node that a request of this one waits for is asked, too: otherwise a computer that sleeps or hangs would hold up
    its microbatches until their time limit.
    """

    swarm: StageSwarm
    times: MonitorTimes = field(default_factory=MonitorTimes)
    now: Callable[[], float] = time.time  # wall clock, as in the membership's `last_seen`

    def __post_init__(self) -> None:
        # questions without an answer, and the bytes that had come from the node when the first one ended so
        self._unanswered: dict[tuple[NodeId, int], tuple[int, int]] = {}
        self._losses: dict[NodeId, int] = {}  # times a node was lost since its last answer
        self._asked_at: dict[tuple[NodeId, int], float] = {}
        self._denied_at: dict[tuple[NodeId, int], float] = {}  # time of the first denial

    async def run(self) -> None:
        """Look every `look_seconds` until cancelled."""
        while True:
            await self.look()
            await sleep_to_tick(self.times.look_seconds)

    async def look(self) -> None:
        """Ask the suspicious holders and those whose last confirmation is too old."""
        watched = self._watched()
        self._unanswered = {key: count for key, count in self._unanswered.items() if key in watched}
        self._forget_old(anyio.current_time())
        members = self.swarm.membership.view.members
        self._losses = {node: count for node, count in self._losses.items() if node in members}
        self.swarm.confirmed.keep_only(members)
        confirmed = list[tuple[NodeId, int]]()
        async with anyio.create_task_group() as tasks:
            for (node, stage), is_needed in watched.items():
                if self._is_due(node, stage, is_needed=is_needed):
                    tasks.start_soon(self._ask, node, stage, confirmed)
        for node, stage in confirmed:  # at once: otherwise one of two replicas would briefly look alone
            self.swarm.confirmed.add(node, stage)

    def _forget_old(self, now: float) -> None:
        self._asked_at = {key: at for key, at in self._asked_at.items() if now - at < ASK_AGAIN_SECONDS}
        self._denied_at = {key: at for key, at in self._denied_at.items() if now - at < self.times.forgotten_seconds}

    def _watched(self) -> dict[tuple[NodeId, int], bool]:
        """Map other nodes and their stages to whether the node is needed; of a stage with many holders, take a few.

        A few holders of every stage are verified. Otherwise false reports could hide that a stage has one holder.
        """
        coverage, few = self.swarm.coverage(), self.times.few
        watched = dict[tuple[NodeId, int], bool]()
        for stage in range(coverage.stage_count):
            holders = coverage.replicas_of(stage)
            is_rare = len(holders) <= few
            others = [node for node in holders if node != self.swarm.node_id]
            first = others if is_rare else sorted(others, key=partial(self._turn, stage))[:few]
            watched |= {(node, stage): is_rare for node in first}
            watched |= {(node, stage): True for node in others if self.swarm.awaits(node)}
        return watched

    def _turn(self, stage: int, node: NodeId) -> tuple[bool, float, bytes]:
        """Sort key of a holder: confirmed ones first, then those asked longest ago; ties differ from node to node."""
        is_new = not self.swarm.confirmed.was_reported_within(ASK_AGAIN_SECONDS, node, stage)
        lot = hash_parts("neuroshard/holder-watch", self.swarm.node_id, node)
        return is_new, self._asked_at.get((node, stage), -1.0), lot

    def _is_due(self, node: NodeId, stage: int, *, is_needed: bool) -> bool:
        member = self.swarm.membership.view.members.get(node)
        asked_at = self._asked_at.get((node, stage))
        if member is None or (asked_at is not None and anyio.current_time() - asked_at < self.times.again_seconds):
            return False
        is_silent = self.now() - member.last_seen > self.times.silent_seconds
        is_suspicious = is_needed and (is_silent or not self.swarm.is_connected(node))
        return is_suspicious or not self.swarm.confirmed.was_reported_within(ASK_AGAIN_SECONDS, node, stage)

    async def _ask(self, node: NodeId, stage: int, confirmed: list[tuple[NodeId, int]]) -> None:
        self._asked_at[node, stage] = anyio.current_time()
        try:
            status = await query_status(self.swarm.asking, self.swarm.name_of(stage), node)
        except DonorError:
            self._does_not_answer(node, stage)
            return
        self._unanswered.pop((node, stage), None)
        self._losses.pop(node, None)
        if status is not None and status.is_live:
            self._denied_at.pop((node, stage), None)
            confirmed.append((node, stage))
        else:
            self._does_not_hold(node, stage)

    def _does_not_answer(self, node: NodeId, stage: int) -> None:
        count, received = self._unanswered.get((node, stage), (0, self.swarm.received_bytes(node)))
        count += 1
        self._unanswered[node, stage] = count, received
        if count < 2 or node in self.swarm.lost:
            return
        _LOG.info("Node %s no longer answers: its layers count as missing.", node)
        self.swarm.confirmed.remove(node, stage)  # so that it is asked as soon as it reports again
        self.swarm.lost.add(node)
        if self.swarm.received_bytes(node) == received:  # otherwise its line may be full of the answer
            self.swarm.end_requests(node)
        losses = self._losses[node] = self._losses.get(node, 0) + 1
        # A node that reports but never answers would otherwise count again after each report, and the node that is
        # about to replace it would give up each time.
        if losses > 1:
            self.swarm.lost.disbelieve(node, min(DISBELIEF_SECONDS, self.times.mute_seconds * 2 ** (losses - 2)))

    def _does_not_hold(self, node: NodeId, stage: int) -> None:
        """Handle a node's denial of a stage that its report lists; it is penalised only after `denial_seconds`."""
        self.swarm.confirmed.remove(node, stage)
        now = anyio.current_time()
        if now - self._denied_at.setdefault((node, stage), now) >= self.times.denial_seconds:
            _LOG.warning("Node %s reports layers that it does not hold: it is not counted for a while.", node)
            del self._denied_at[node, stage]
            self.swarm.asking.report(node, ScoreReason.FALSE_REPORT)
            self.swarm.lost.disbelieve(node)
