"""Routing of microbatches: the choice among a stage's replicas, and the nodes that are avoided for a while."""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, assert_never

import anyio

from neuroshard.pipeline.microbatch import (
    DisputedTensorError,
    StageBusyError,
    StageError,
    StagePausedError,
    UnwantedTensorError,
)
from neuroshard.pipeline.replica_routing import BalancedRouting, StickyRoute, Turn
from neuroshard.pipeline.stage_client import StageClient
from neuroshard.types import NodeId

FIXED_RETRY_SECONDS = 0.5


class Routing(Protocol):
    """Knows who holds the stages of a run, and chooses among them."""

    @property
    def stage_count(self) -> int:
        """Of the run: a whole model, never a shorter one."""
        ...

    @property
    def obstacle(self) -> str | None:
        """Why microbatches wait for a stage at present; None while they do not."""
        ...

    async def hop(self, stage: int) -> StageClient:
        """Whoever shall do a microbatch in this stage; waits while nobody can. One of the other calls ends that."""
        ...

    def finished(self, stage: int, hop: StageClient, seconds: float) -> None:
        """It did the stage's work for the microbatch; its answers took so long altogether."""
        ...

    def left(self, stage: int, hop: StageClient) -> None:
        """It was needed for something else, or not to the end, and did not fail."""
        ...

    def busy(self, stage: int, hop: StageClient, error: StageError) -> None:
        """It is there and cannot do the work yet; it will be asked again soon."""
        ...

    def failed(self, stage: int, hop: StageClient, error: StageError) -> None:
        """It cannot be used now; the next `hop` of this stage names another one if there is one."""
        ...

    def forgiven(self, stage: int, hop: StageClient) -> None:
        """It failed for no fault of its own, and may be used again."""
        ...


class FixedRouting:
    """One hop for each stage, for good. One that failed is named again after a while."""

    def __init__(self, route: Sequence[StageClient]) -> None:
        self._route = tuple(route)
        self._not_before = [0.0] * len(route)

    @property
    def stage_count(self) -> int:
        """See Routing."""
        return len(self._route)

    @property
    def obstacle(self) -> str | None:
        """See Routing."""
        return None

    async def hop(self, stage: int) -> StageClient:
        """See Routing."""
        if self._not_before[stage]:
            await anyio.sleep_until(self._not_before[stage])
            self._not_before[stage] = 0.0
        return self._route[stage]

    def finished(self, stage: int, hop: StageClient, seconds: float) -> None:
        """See Routing."""

    def left(self, stage: int, hop: StageClient) -> None:
        """See Routing."""

    def busy(self, stage: int, hop: StageClient, error: StageError) -> None:
        """See Routing."""

    def failed(self, stage: int, hop: StageClient, error: StageError) -> None:
        """See Routing."""
        self._not_before[stage] = anyio.current_time() + FIXED_RETRY_SECONDS

    def forgiven(self, stage: int, hop: StageClient) -> None:
        """See Routing."""


class Dispute:
    """About one tensor of a stage: who refuses it first is left alone for a while, unless the next one agrees.

    Otherwise a tensor that is wrong would cost one replica after the other its work.
    """

    def __init__(self, routing: Routing, stage: int) -> None:
        self._routing = routing
        self._stage = stage
        self._first: StageClient | None = None

    def note(self, hop: StageClient, error: StageError) -> None:
        """Count what went wrong. Raises UnwantedTensorError when the tensor was refused twice."""
        if not isinstance(error, DisputedTensorError):
            return
        if self._first is None:
            self._first = hop
            return
        self._routing.forgiven(self._stage, self._first)
        raise UnwantedTensorError(f"What goes to stage {self._stage + 1} was refused twice. {error.message}") from error


class ReplicaChoice(Protocol):
    """How one of several replicas is chosen; every pick ends in one of the other calls."""

    def pick(self, stage: int, replicas: Sequence[NodeId]) -> NodeId:
        """One of them, for a microbatch; there is at least one."""
        ...

    def took(self, stage: int, replica: NodeId, seconds: float) -> None:
        """It did all its work for a microbatch, and its answers came after so long altogether."""
        ...

    def left(self, stage: int, replica: NodeId) -> None:
        """It did something else, or not to the end, without having failed."""
        ...

    def lost(self, stage: int, replica: NodeId) -> None:
        """It failed."""
        ...


def replica_choice(
    routing: Literal["lanes", "balanced"], driver: NodeId, root: Callable[[int], bytes]
) -> ReplicaChoice:
    """The way that a run's parameters name; `root` tells the root of a stage's last outer step."""
    match routing:
        case "lanes":
            return StickyReplicaChoice(driver, root)
        case "balanced":
            return BalancedChoice(driver)
        case _:
            assert_never(routing)


class StickyReplicaChoice:
    """See ReplicaChoice: one lane a stage, drawn anew when the stage's root changes. A driver's own stage is its lane.

    The roots are those that replicas report, uncertified.
    """

    def __init__(self, driver: NodeId, root: Callable[[int], bytes]) -> None:
        self._driver = driver
        self._root = root
        self._lanes: dict[int, StickyRoute] = {}

    def pick(self, stage: int, replicas: Sequence[NodeId]) -> NodeId:
        """See ReplicaChoice."""
        if self._driver in replicas:
            return self._driver
        root, known = self._root(stage), self._lanes.get(stage)
        lane = StickyRoute.drawn(self._driver, stage, root, replicas) if known is None else known.seen(root, replicas)
        self._lanes[stage] = lane
        if lane.node is None:
            raise ValueError("there is no replica to choose from")
        return lane.node

    def took(self, stage: int, replica: NodeId, seconds: float) -> None:
        """See ReplicaChoice."""

    def left(self, stage: int, replica: NodeId) -> None:
        """See ReplicaChoice."""

    def lost(self, stage: int, replica: NodeId) -> None:
        """See ReplicaChoice."""
        lane = self._lanes.get(stage)
        if lane is not None:
            self._lanes[stage] = lane.after_failure(replica)


class BalancedChoice:
    """See ReplicaChoice: the replica with the least virtual runtime. Turns of one replica are alike: the first ends."""

    def __init__(self, driver: NodeId) -> None:
        self._driver = driver
        self._stages: dict[int, BalancedRouting] = {}
        self._turns: dict[tuple[int, NodeId], deque[Turn]] = {}

    def pick(self, stage: int, replicas: Sequence[NodeId]) -> NodeId:
        """See ReplicaChoice."""
        routing = self._stages.setdefault(stage, BalancedRouting(self._driver, stage))
        routing.update(replicas)
        turn = routing.pick()
        if turn is None:
            raise ValueError("there is no replica to choose from")
        self._turns.setdefault((stage, turn.peer), deque()).append(turn)
        return turn.peer

    def took(self, stage: int, replica: NodeId, seconds: float) -> None:
        """See ReplicaChoice."""
        turn = self._ended(stage, replica)
        if turn is not None:
            self._stages[stage].finished(turn, seconds)

    def left(self, stage: int, replica: NodeId) -> None:
        """See ReplicaChoice."""
        turn = self._ended(stage, replica)
        if turn is not None:
            self._stages[stage].dropped(turn)

    def lost(self, stage: int, replica: NodeId) -> None:
        """See ReplicaChoice; it is not among the replicas of the next pick, so that it enters at the end later."""
        self.left(stage, replica)

    def _ended(self, stage: int, replica: NodeId) -> Turn | None:
        turns = self._turns.get((stage, replica))
        if not turns:
            return None
        turn = turns.popleft()
        if not turns:
            del self._turns[stage, replica]
        return turn


class ChoiceInTurn:
    """See ReplicaChoice: this node itself where it can, else one replica after the other."""

    def __init__(self, own: NodeId) -> None:
        self._own = own
        self._turns: dict[int, int] = {}

    def pick(self, stage: int, replicas: Sequence[NodeId]) -> NodeId:
        """See ReplicaChoice."""
        if self._own in replicas:
            return self._own
        turn = self._turns[stage] = self._turns.get(stage, -1) + 1
        return replicas[turn % len(replicas)]

    def took(self, stage: int, replica: NodeId, seconds: float) -> None:
        """See ReplicaChoice."""

    def left(self, stage: int, replica: NodeId) -> None:
        """See ReplicaChoice."""

    def lost(self, stage: int, replica: NodeId) -> None:
        """See ReplicaChoice."""


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
        connect: Callable[[int, NodeId], StageClient],
        choice: ReplicaChoice,
        missing: Callable[[], str] = lambda: "",
    ) -> None:
        """`workers` tells who can do a stage now, `connect` makes hops, `missing` says what the swarm lacks."""
        self._stage_count = stage_count
        self._workers = workers
        self._connect = connect
        self._choice = choice
        self._missing = missing
        self._hops: OrderedDict[tuple[int, NodeId], StageClient] = OrderedDict()
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

    async def hop(self, stage: int) -> StageClient:
        """See Routing."""
        replica = self._pick(stage)
        if replica is None:
            replica = await self._awaited(stage)
        return self._hop(stage, replica)

    def finished(self, stage: int, hop: StageClient, seconds: float) -> None:
        """See Routing."""
        self._busy.pop(stage, None)
        self._choice.took(stage, hop.node_id, seconds)

    def left(self, stage: int, hop: StageClient) -> None:
        """See Routing."""
        self._choice.left(stage, hop.node_id)

    def busy(self, stage: int, hop: StageClient, error: StageError) -> None:
        """See Routing."""
        now, told = anyio.current_time(), self._busy.get(stage)
        since = now if told is None or now - told.heard > HEARD_SECONDS else told.since
        self._busy[stage] = _Busy(since, now, f"Stage {stage + 1} is waited for: {error.message}")

    def failed(self, stage: int, hop: StageClient, error: StageError) -> None:
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

    def forgiven(self, stage: int, hop: StageClient) -> None:
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

    def _hop(self, stage: int, replica: NodeId) -> StageClient:
        key = stage, replica
        hop = self._hops.pop(key, None) or self._connect(stage, replica)
        self._hops[key] = hop
        if len(self._hops) > MOST_HOPS:
            self._hops.popitem(last=False)
        return hop
