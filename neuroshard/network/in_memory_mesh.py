"""Who forwards gossip to whom in an in-memory network: a random mesh of about six neighbours for each listener."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random

from neuroshard.types import NodeId

DEGREE = 6  # neighbours of a node on average
NEW_NEIGHBOURS = DEGREE // 2  # a newcomer's; as many more come to it later
LEAST_DEGREE = 4  # with fewer after a neighbour left, a node looks for new ones
MOST_DEGREE = 12

Separated = Callable[[NodeId, NodeId], bool]


class Mesh:
    """The listeners of one topic and their neighbours. Connections go both ways."""

    def __init__(self, random: Random, are_separated: Separated) -> None:
        self._random = random
        self._are_separated = are_separated
        self._neighbours: dict[NodeId, list[NodeId]] = {}
        self._members: list[NodeId] = []

    def neighbours(self, node_id: NodeId) -> list[NodeId]:
        """To whom a node passes gossip on: its neighbours, or a random few listeners for one that does not listen."""
        if node_id in self._neighbours:
            return self._neighbours[node_id]
        others = self._random.sample(self._members, min(DEGREE, len(self._members)))
        return [other for other in others if not self._are_separated(node_id, other)]

    def add(self, node_id: NodeId) -> None:
        """A new listener."""
        self._neighbours[node_id] = []
        self._connect(node_id, NEW_NEIGHBOURS)
        self._members.append(node_id)

    def remove(self, node_id: NodeId) -> None:
        """A listener that is gone; its neighbours look for others when they have too few."""
        left = self._neighbours.pop(node_id, [])
        if node_id in self._members:
            self._members.remove(node_id)
        for other in left:
            self._neighbours[other].remove(node_id)
        for other in left:
            if len(self._neighbours[other]) < LEAST_DEGREE:
                self._connect(other, DEGREE)

    def rewire(self) -> None:
        """Draw all connections anew, after a partition came or went."""
        members = self._random.sample(self._members, len(self._members))
        self._neighbours, self._members = {}, []
        for node_id in members:
            self.add(node_id)

    def _connect(self, node_id: NodeId, degree: int) -> None:
        """Add random connections until a node has `degree` of them or nobody is left."""
        mine = self._neighbours[node_id]
        for other in self._candidates():
            if len(mine) >= degree:
                return
            theirs = self._neighbours[other]
            if other == node_id or other in mine or len(theirs) >= MOST_DEGREE:
                continue
            if not self._are_separated(node_id, other):
                mine.append(other)
                theirs.append(node_id)

    def _candidates(self) -> Iterator[NodeId]:
        """Members in random order, some of them twice: a few draws nearly always do, and all are tried if need be."""
        if self._members:
            yield from self._random.choices(self._members, k=4 * DEGREE)
            yield from self._random.sample(self._members, len(self._members))
