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
    """Routes microbatches: chooses among the nodes that hold each stage of a run."""

    @property
    def stage_count(self) -> int:
        """Number of stages of the whole model."""
        ...

    @property
    def obstacle(self) -> str | None:
        """Reason why microbatches wait for a stage now, as a sentence; None while none does."""
        ...

    async def hop(self, stage: int) -> StageClient:
        """Choose a replica of a stage for a microbatch; waits while there is none. End with one of the other calls."""
        ...

    def finished(self, stage: int, hop: StageClient, seconds: float) -> None:
        """Report that the replica did the stage's work for a microbatch; `seconds` is the total time of its answers."""
        ...

    def left(self, stage: int, hop: StageClient) -> None:
        """Report that the replica was used for other work, or not to the end, without having failed."""
        ...

    def busy(self, stage: int, hop: StageClient, error: StageError) -> None:
        """Report that the replica is reachable but cannot do the work yet. It will be asked again soon."""
        ...

    def failed(self, stage: int, hop: StageClient, error: StageError) -> None:
        """Report that the replica cannot be used now. The next `hop` returns another one if there is one."""
        ...

    def cleared(self, stage: int, hop: StageClient) -> None:
        """Report that a failure was not the replica's fault. It may be used again."""
        ...


class FixedRouting:
    """Routing with one fixed replica per stage. A replica that failed is used again after FIXED_RETRY_SECONDS."""

    def __init__(self, route: Sequence[StageClient]) -> None:
        self.stage_count = len(route)
        self._route = tuple(route)
        self._not_before = [0.0] * len(route)

    @property
    def obstacle(self) -> str | None:
        return None

    async def hop(self, stage: int) -> StageClient:
        if self._not_before[stage]:
            await anyio.sleep_until(self._not_before[stage])
            self._not_before[stage] = 0.0
        return self._route[stage]

    def finished(self, stage: int, hop: StageClient, seconds: float) -> None:
        """Do nothing: a fixed route keeps no statistics."""

    def left(self, stage: int, hop: StageClient) -> None:
        """Do nothing: a fixed route keeps no statistics."""

    def busy(self, stage: int, hop: StageClient, error: StageError) -> None:
        """Do nothing: the caller waits and asks the same replica again."""

    def failed(self, stage: int, hop: StageClient, error: StageError) -> None:
        self._not_before[stage] = anyio.current_time() + FIXED_RETRY_SECONDS

    def cleared(self, stage: int, hop: StageClient) -> None:
        """Do nothing: the replica is used again anyway."""


class BlameRule:
    """Decides who is wrong when a stage refuses a tensor: the tensor is, if a second replica refuses it as well.

    Until then the replica that refused first is avoided for a while. Otherwise one wrong tensor would make one replica
    after the other count as failed.
    """

    def __init__(self, routing: Routing, stage: int) -> None:
        self._routing = routing
        self._stage = stage
        self._first: StageClient | None = None

    def note(self, hop: StageClient, error: StageError) -> None:
        """Note an error of a replica. Raises UnwantedTensorError when a tensor was refused twice."""
        if not isinstance(error, DisputedTensorError):
            return
        if self._first is None:
            self._first = hop
            return
        # The second refusal clears the first replica: the tensor is wrong, so its refusal was right.
        self._routing.cleared(self._stage, self._first)
        raise UnwantedTensorError(f"A tensor for stage {self._stage + 1} was refused twice. {error.message}") from error


class ReplicaChoice(Protocol):
    """Policy that chooses one of several replicas. Every `pick` ends with one of the other calls."""

    def pick(self, stage: int, replicas: Sequence[NodeId]) -> NodeId:
        """Choose one of the replicas, of which there is at least one, for a microbatch."""
        ...

    def took(self, stage: int, replica: NodeId, seconds: float) -> None:
        """Report that the replica did all its work for a microbatch; `seconds` is the total time of its answers."""
        ...

    def left(self, stage: int, replica: NodeId) -> None:
        """Report that the replica did other work, or not all of it, without having failed."""
        ...

    def lost(self, stage: int, replica: NodeId) -> None:
        """Report that the replica failed."""
        ...


def replica_choice(
    routing: Literal["lanes", "balanced"], driver: NodeId, root: Callable[[int], bytes]
) -> ReplicaChoice:
    """Create the policy that the run's parameters name; `root` returns the root of a stage's last outer step."""
    match routing:
        case "lanes":
            return StickyReplicaChoice(driver, root)
        case "balanced":
            return BalancedChoice(driver)
        case _:
            assert_never(routing)


class StickyReplicaChoice:
    """Uses this driver's own stage, or one sticky route per stage that is drawn again when the root changes.

    The roots are those that replicas report, uncertified.
    """

    def __init__(self, driver: NodeId, root: Callable[[int], bytes]) -> None:
        self._driver = driver
        self._root = root
        self._lanes: dict[int, StickyRoute] = {}

    def pick(self, stage: int, replicas: Sequence[NodeId]) -> NodeId:
        if self._driver in replicas:
            return self._driver
        root, known = self._root(stage), self._lanes.get(stage)
        lane = StickyRoute.drawn(self._driver, stage, root, replicas) if known is None else known.seen(root, replicas)
        self._lanes[stage] = lane
        if lane.node is None:
            raise ValueError("there is no replica to choose from")
        return lane.node

    def took(self, stage: int, replica: NodeId, seconds: float) -> None:
        """Do nothing: sticky routes ignore the duration."""

    def left(self, stage: int, replica: NodeId) -> None:
        """Do nothing: only a failure changes a sticky route."""

    def lost(self, stage: int, replica: NodeId) -> None:
        lane = self._lanes.get(stage)
        if lane is not None:
            self._lanes[stage] = lane.after_failure(replica)


class BalancedChoice:
    """Picks the replica with the least virtual runtime. Of a replica's equivalent turns, the oldest ends first."""

    def __init__(self, driver: NodeId) -> None:
        self._driver = driver
        self._stages: dict[int, BalancedRouting] = {}
        self._turns: dict[tuple[int, NodeId], deque[Turn]] = {}

    def pick(self, stage: int, replicas: Sequence[NodeId]) -> NodeId:
        routing = self._stages.setdefault(stage, BalancedRouting(self._driver, stage))
        routing.update(replicas)
        turn = routing.pick()
        if turn is None:
            raise ValueError("there is no replica to choose from")
        self._turns.setdefault((stage, turn.peer), deque()).append(turn)
        return turn.peer

    def took(self, stage: int, replica: NodeId, seconds: float) -> None:
        turn = self._ended(stage, replica)
        if turn is not None:
            self._stages[stage].finished(turn, seconds)

    def left(self, stage: int, replica: NodeId) -> None:
        turn = self._ended(stage, replica)
        if turn is not None:
            self._stages[stage].dropped(turn)

    def lost(self, stage: int, replica: NodeId) -> None:
        """End the turn. The next pick is without this replica, so it joins at the end of the queue when it returns."""
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
    """Picks this node itself where possible, and otherwise one replica after the other."""

    def __init__(self, own: NodeId) -> None:
        self._own = own
        self._turns: dict[int, int] = {}

    def pick(self, stage: int, replicas: Sequence[NodeId]) -> NodeId:
        if self._own in replicas:
            return self._own
        turn = self._turns[stage] = self._turns.get(stage, -1) + 1
        return replicas[turn % len(replicas)]

    def took(self, stage: int, replica: NodeId, seconds: float) -> None:
        """Do nothing: the next replica in turn is picked anyway."""

    def left(self, stage: int, replica: NodeId) -> None:
        """Do nothing: the next replica in turn is picked anyway."""

    def lost(self, stage: int, replica: NodeId) -> None:
        """Do nothing: the next replica in turn is picked anyway."""


_LOG = logging.getLogger(__name__)

LOOK_SECONDS = 0.1
BAN_SECONDS = 30.0  # a failed replica is avoided for this time, while there are others
PAUSED_SECONDS = 10.0  # the same for a paused replica; by then its status report is up to date
RETRY_SECONDS = 1.0  # before a failed or paused replica is tried again when there is no other
MOST_HOPS = 256  # stage clients that are kept ready
BUSY_SECONDS = 10.0  # a stage that accepts nothing for this time is reported as the obstacle
HEARD_SECONDS = 3.0  # unless its last refusal is older than this


@dataclass(frozen=True)
class _Busy:
    """Reason of a stage that accepts no microbatches, with the times of its first and its last refusal."""

    since: float
    heard: float
    sentence: str

    def is_long(self, now: float) -> bool:
        return now - self.heard <= HEARD_SECONDS and now - self.since >= BUSY_SECONDS


class SwarmRouting:
    """Routing over the nodes of a swarm. A failed replica is avoided for BAN_SECONDS, unless it is the only one.

    A busy or paused replica has not failed: others are preferred, and it is used again as soon as it is its turn.
    """

    def __init__(
        self,
        stage_count: int,
        workers: Callable[[int], Sequence[NodeId]],
        connect: Callable[[int, NodeId], StageClient],
        choice: ReplicaChoice,
        missing: Callable[[], str] = lambda: "",
    ) -> None:
        """`workers` returns the nodes that can do a stage now; `missing` describes the layers that no node holds.

        `connect` creates stage clients.
        """
        self._stage_count = stage_count
        self._workers = workers
        self._connect = connect
        self._choice = choice
        self._missing = missing
        self._hops: OrderedDict[tuple[int, NodeId], StageClient] = OrderedDict()
        self._failed_at: dict[tuple[int, NodeId], float] = {}
        self._paused_at: dict[tuple[int, NodeId], float] = {}  # when they reported the pause
        self._busy: dict[int, _Busy] = {}  # by stage
        self._waiting = 0
        self.failures = 0

    @property
    def stage_count(self) -> int:
        return self._stage_count

    @property
    def obstacle(self) -> str | None:
        if not self._waiting:
            now = anyio.current_time()
            busy = [delay for delay in self._busy.values() if delay.is_long(now)]
            return busy[0].sentence if busy else None
        does = "are paused or fail" if self._paused_at else "fail"
        return self._missing() or f"All nodes that hold a stage {does}; this node tries them again."

    async def hop(self, stage: int) -> StageClient:
        replica = self._pick(stage)
        if replica is None:
            replica = await self._awaited(stage)
        return self._hop(stage, replica)

    def finished(self, stage: int, hop: StageClient, seconds: float) -> None:
        self._busy.pop(stage, None)
        self._choice.took(stage, hop.node_id, seconds)

    def left(self, stage: int, hop: StageClient) -> None:
        self._choice.left(stage, hop.node_id)

    def busy(self, stage: int, hop: StageClient, error: StageError) -> None:
        now, delay = anyio.current_time(), self._busy.get(stage)
        since = now if delay is None or now - delay.heard > HEARD_SECONDS else delay.since
        self._busy[stage] = _Busy(since, now, f"Stage {stage + 1} makes microbatches wait: {error.message}")

    def failed(self, stage: int, hop: StageClient, error: StageError) -> None:
        self._choice.lost(stage, hop.node_id)
        if isinstance(error, StagePausedError):
            self._paused_at[stage, hop.node_id] = anyio.current_time()
        if isinstance(error, StageBusyError):
            return
        if (stage, hop.node_id) not in self._failed_at:  # one log line, even if many microbatches fail at once
            self.failures += 1
            _LOG.info("Stage %d: another node is used for a while: %s", stage + 1, error)
        self._failed_at[stage, hop.node_id] = anyio.current_time()
        self._hops.pop((stage, hop.node_id), None)

    def cleared(self, stage: int, hop: StageClient) -> None:
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
            while True:  # look seldom while a replica is paused, which may be this node itself
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
