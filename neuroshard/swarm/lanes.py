"""Lanes: a driver keeps one replica of each stage between two outer steps, drawn so that nobody can choose it. Pure.

A hostile replica spoils the work of the drivers whose lane it is, about one in as many as the stage has replicas, until
the stage's next outer step draws anew; robust aggregation can remove as much.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from neuroshard.identity import hash_parts
from neuroshard.types import NodeId


def lane_order(root: bytes, driver: NodeId, stage: int, replicas: Iterable[NodeId]) -> tuple[NodeId, ...]:
    """The replicas of a stage in the order in which this driver tries them until the root changes.

    By H(root, driver, stage, replica), so that every order is equally likely, and one replica more or less changes
    nothing in the order of the others.
    """
    return tuple(sorted(set(replicas), key=lambda node: hash_parts("neuroshard/lane", root, driver, stage, node)))


@dataclass(frozen=True)
class Lane:
    """One driver's way through one stage, from one root to the next. Who appears meanwhile comes last in the order."""

    driver: NodeId
    stage: int
    root: bytes  # of the stage's last outer step
    order: tuple[NodeId, ...]  # the replicas, first the one to use

    @classmethod
    def drawn(cls, driver: NodeId, stage: int, root: bytes, replicas: Iterable[NodeId]) -> Lane:
        """A lane through one of the replicas."""
        return cls(driver, stage, root, lane_order(root, driver, stage, replicas))

    def seen(self, root: bytes, replicas: Collection[NodeId]) -> Lane:
        """After a look at the swarm: drawn anew with another root, else changed only when the lane's replica is gone.

        A replica that was gone and comes back comes last.
        """
        if root != self.root:
            return Lane.drawn(self.driver, self.stage, root, replicas)
        present = set(replicas)
        kept = tuple(node for node in self.order if node in present)
        return replace(self, order=kept + lane_order(root, self.driver, self.stage, present.difference(kept)))

    def after_failure(self, node: NodeId) -> Lane:
        """The lane when a replica has failed this driver: the next in the order takes over."""
        if node not in self.order:
            return self
        return replace(self, order=(*(other for other in self.order if other != node), node))

    @property
    def node(self) -> NodeId | None:
        """The replica to use; None while the stage has none."""
        return self.order[0] if self.order else None
