"""Routing among the nodes of a swarm: who can do a stage now, who is left alone for a while, and what is missing."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import anyio

from neuroshard.training.microbatch import StageBusyError, StageError, StagePausedError
from neuroshard.training.pipeline import Hop
from neuroshard.training.replica_choice import ReplicaChoice
from neuroshard.types import NodeId

_LOG = logging.getLogger(__name__)

LOOK_SECONDS = 0.1
BAN_SECONDS = 30.0  # of a replica that failed, while there are others
PAUSED_SECONDS = 10.0  # the same of one that is paused; by then its report says so, or that it works
RETRY_SECONDS = 1.0  # while there are none
MOST_HOPS = 256  # that are kept ready
BUSY_SECONDS = 10.0  # a stage that takes nothing for so long is what microbatches wait for
HEARD_SECONDS = 3.0  # the last refusal is not older


@dataclass(frozen=True)
class _Busy:
    """What a stage says that cannot take microbatches."""

    since: float
    heard: float
    sentence: str

    def is_long(self, now: float) -> bool:
        return now - self.heard <= HEARD_SECONDS and now - self.since >= BUSY_SECONDS


class SwarmRouting:
    """See Routing. A replica that failed is not asked again for 30 seconds, unless it is the only one.

    One that is busy or paused has not failed: others are preferred, and it is asked as soon as it is its turn.
    """

    def __init__(
        self,
        stage_count: int,
        workers: Callable[[int], Sequence[NodeId]],
        connect: Callable[[int, NodeId], Hop],
        choice: ReplicaChoice,
        missing: Callable[[], str] = lambda: "",
    ) -> None:
        """`workers` tells who can do a stage now, `connect` makes hops, `missing` says what the swarm lacks."""
        self._stage_count = stage_count
        self._workers = workers
        self._connect = connect
        self._choice = choice
        self._missing = missing
        self._hops: OrderedDict[tuple[int, NodeId], Hop] = OrderedDict()
        self._failed_at: dict[tuple[int, NodeId], float] = {}
        self._paused_at: dict[tuple[int, NodeId], float] = {}  # when they said so
        self._busy: dict[int, _Busy] = {}  # by stage
        self._waiting = 0
        self.failures = 0

    @property
    def stage_count(self) -> int:
        """See Routing."""
        return self._stage_count

    @property
    def obstacle(self) -> str | None:
        """Why microbatches wait for a stage at present; None while they do not."""
        if not self._waiting:
            now = anyio.current_time()
            busy = [told for told in self._busy.values() if told.is_long(now)]
            return busy[0].sentence if busy else None
        does = "are paused or fail" if self._paused_at else "fail"
        return self._missing() or f"All nodes that hold a stage {does}; they are tried again."

    async def hop(self, stage: int) -> Hop:
        """See Routing."""
        replica = self._pick(stage)
        if replica is None:
            replica = await self._awaited(stage)
        return self._hop(stage, replica)

    def finished(self, stage: int, hop: Hop, seconds: float) -> None:
        """See Routing."""
        self._busy.pop(stage, None)
        self._choice.took(stage, hop.node_id, seconds)

    def left(self, stage: int, hop: Hop) -> None:
        """See Routing."""
        self._choice.left(stage, hop.node_id)

    def busy(self, stage: int, hop: Hop, error: StageError) -> None:
        """See Routing."""
        now, told = anyio.current_time(), self._busy.get(stage)
        since = now if told is None or now - told.heard > HEARD_SECONDS else told.since
        self._busy[stage] = _Busy(since, now, f"Stage {stage + 1} is waited for: {error.message}")

    def failed(self, stage: int, hop: Hop, error: StageError) -> None:
        """See Routing."""
        self._choice.lost(stage, hop.node_id)
        if isinstance(error, StagePausedError):
            self._paused_at[stage, hop.node_id] = anyio.current_time()
        if isinstance(error, StageBusyError):
            return
        if (stage, hop.node_id) not in self._failed_at:  # one line, however many microbatches find out
            self.failures += 1
            _LOG.info("Stage %d is asked elsewhere for a while: %s", stage + 1, error)
        self._failed_at[stage, hop.node_id] = anyio.current_time()
        self._hops.pop((stage, hop.node_id), None)

    def forgiven(self, stage: int, hop: Hop) -> None:
        """See Routing."""
        self._failed_at.pop((stage, hop.node_id), None)

    def _pick(self, stage: int) -> NodeId | None:
        now = anyio.current_time()
        self._failed_at = {key: time for key, time in self._failed_at.items() if now - time < BAN_SECONDS}
        self._paused_at = {key: time for key, time in self._paused_at.items() if now - time < PAUSED_SECONDS}
        asked_at = self._failed_at | self._paused_at
        workers = self._workers(stage)
        free = [node for node in workers if (stage, node) not in asked_at]
        if not free:
            free = [node for node in workers if now - asked_at[stage, node] >= RETRY_SECONDS]
        return self._choice.pick(stage, free) if free else None

    async def _awaited(self, stage: int) -> NodeId:
        self._waiting += 1
        try:
            while True:  # seldom while somebody is paused, who may be this node itself
                await anyio.sleep(RETRY_SECONDS if self._paused_at else LOOK_SECONDS)
                replica = self._pick(stage)
                if replica is not None:
                    return replica
        finally:
            self._waiting -= 1

    def _hop(self, stage: int, replica: NodeId) -> Hop:
        key = stage, replica
        hop = self._hops.pop(key, None) or self._connect(stage, replica)
        self._hops[key] = hop
        if len(self._hops) > MOST_HOPS:
            self._hops.popitem(last=False)
        return hop
