"""Lanes: a driver keeps one replica of each stage between two outer steps, drawn so that nobody can choose it. Pure.

A hostile replica spoils the work of the drivers whose lane it is, about one in as many as the stage has replicas, until
the next outer step draws anew; robust aggregation can remove as much.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from neuroshard.identity import hash_parts
from neuroshard.types import NodeId


def lane_order(root: bytes, driver: NodeId, stage: int, replicas: Iterable[NodeId]) -> tuple[NodeId, ...]:
    """The replicas of a stage in the order in which this driver tries them until the root changes.

    By H(root, driver, stage, replica), so that every order is equally likely, and one replica more or less changes
    nothing in the order of the others.
    """
    return tuple(sorted(set(replicas), key=lambda node: hash_parts("neuroshard/lane", root, driver, stage, node)))


def lane(root: bytes, driver: NodeId, stage: int, replicas: Iterable[NodeId]) -> NodeId:
    """The replica that a driver keeps. Raises ValueError for a stage without replicas."""
    order = lane_order(root, driver, stage, replicas)
    if not order:
        raise ValueError(f"stage {stage} has no replica")
    return order[0]


@dataclass(frozen=True)
class Lanes:
    """The lanes of one driver, from one root to the next. Who appears meanwhile comes last, whatever its hash."""

    driver: NodeId
    root: bytes  # the certified root of the last outer step
    orders: tuple[tuple[NodeId, ...], ...]  # of each stage, the lane first

    @classmethod
    def drawn(cls, driver: NodeId, root: bytes, replicas: Sequence[Iterable[NodeId]]) -> Lanes:
        """Lanes through the replicas of each stage."""
        return cls(driver, root, tuple(lane_order(root, driver, stage, each) for stage, each in enumerate(replicas)))

    def seen(self, root: bytes, replicas: Sequence[Iterable[NodeId]]) -> Lanes:
        """After a look at the swarm: drawn anew with another root, else changed only where the lane's replica is gone.

        A replica that was gone and comes back comes last.
        """
        if root != self.root or len(replicas) != len(self.orders):
            return Lanes.drawn(self.driver, root, replicas)
        orders = (self._kept(stage, set(present)) for stage, present in enumerate(replicas))
        return replace(self, orders=tuple(orders))

    def after_failure(self, stage: int, node: NodeId) -> Lanes:
        """The lanes when a replica has failed this driver: the next in the order takes over, the others stay."""
        order = self.orders[stage]
        if node not in order:
            return self
        changed = (*(other for other in order if other != node), node)
        return replace(self, orders=(*self.orders[:stage], changed, *self.orders[stage + 1 :]))

    def lane(self, stage: int) -> NodeId | None:
        """The replica to use; None while the stage has none."""
        order = self.orders[stage]
        return order[0] if order else None

    def _kept(self, stage: int, present: set[NodeId]) -> tuple[NodeId, ...]:
        kept = tuple(node for node in self.orders[stage] if node in present)
        return kept + lane_order(self.root, self.driver, stage, present.difference(kept))
