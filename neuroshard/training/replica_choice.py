"""Which of a stage's replicas a driver asks: always the same one between two outer steps, or the least busy one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal, Protocol, assert_never

from neuroshard.swarm.balanced_routing import BalancedRouting, Turn
from neuroshard.swarm.lanes import Lane
from neuroshard.types import NodeId


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
            return LaneChoice(driver, root)
        case "balanced":
            return BalancedChoice(driver)
        case _:
            assert_never(routing)


class LaneChoice:
    """See ReplicaChoice: one lane a stage, drawn anew when the stage's root changes. A driver's own stage is its lane.

    The roots are those that replicas report, uncertified.
    """

    def __init__(self, driver: NodeId, root: Callable[[int], bytes]) -> None:
        self._driver = driver
        self._root = root
        self._lanes: dict[int, Lane] = {}

    def pick(self, stage: int, replicas: Sequence[NodeId]) -> NodeId:
        """See ReplicaChoice."""
        if self._driver in replicas:
            return self._driver
        root, known = self._root(stage), self._lanes.get(stage)
        lane = Lane.drawn(self._driver, stage, root, replicas) if known is None else known.seen(root, replicas)
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
