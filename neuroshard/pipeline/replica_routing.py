"""Two ways to pick a replica of a stage: a sticky route between two outer steps, or the least busy replica. Pure.

Sticky routes are drawn with a rendezvous hash, so no node can choose its drivers. A hostile replica spoils the work of
the drivers routed to it, about one in n with n replicas, until the stage's next outer step draws new routes; robust
aggregation can remove that share.

Balanced routing is the stochastic wiring of SWARM parallelism (Ryabinin et al. 2023, section 3.2): a min-heap of
virtual runtimes. Every turn adds the average time of the replica, so a replica that is twice as fast gets twice as
many microbatches. It is the bookkeeping of one driver for one stage: it never waits, and its caller excludes replicas
that failed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from math import isfinite
from types import MappingProxyType

from neuroshard.identity import hash_parts
from neuroshard.types import NodeId


def sticky_order(root: bytes, driver: NodeId, stage: int, replicas: Iterable[NodeId]) -> tuple[NodeId, ...]:
    """Order in which this driver tries the replicas of a stage until the root changes.

    Sorted by H(root, driver, stage, replica). Every order is equally likely, and adding or removing a replica does not
    change the order of the others.
    """
    return tuple(sorted(set(replicas), key=lambda node: hash_parts("neuroshard/lane", root, driver, stage, node)))


@dataclass(frozen=True)
class StickyRoute:
    """One driver's route through one stage between two roots. Replicas that appear meanwhile are last in the order."""

    driver: NodeId
    stage: int
    root: bytes  # root of the stage's last outer step
    order: tuple[NodeId, ...]  # the replicas; the first one is used

    @classmethod
    def drawn(cls, driver: NodeId, stage: int, root: bytes, replicas: Iterable[NodeId]) -> StickyRoute:
        """Draw a new route through one of the replicas."""
        return cls(driver, stage, root, sticky_order(root, driver, stage, replicas))

    def seen(self, root: bytes, replicas: Collection[NodeId]) -> StickyRoute:
        """Update the route to the present replicas: a new root draws a new route, otherwise the order is kept.

        A replica that was gone and returns is last in the order.
        """
        if root != self.root:
            return StickyRoute.drawn(self.driver, self.stage, root, replicas)
        present = set(replicas)
        kept = tuple(node for node in self.order if node in present)
        return replace(self, order=kept + sticky_order(root, self.driver, self.stage, present.difference(kept)))

    def after_failure(self, node: NodeId) -> StickyRoute:
        """Update the route after a failure of a replica for this driver: the next replica in the order is used."""
        if node not in self.order:
            return self
        return replace(self, order=(*(other for other in self.order if other != node), node))

    @property
    def node(self) -> NodeId | None:
        """Replica to use; None while the stage has none."""
        return self.order[0] if self.order else None


SMOOTHING = 0.2  # weight of the newest time in the moving average
FIRST_GUESS_SECONDS = 1.0  # of a turn, before any was measured
LEAST_SECONDS = 1e-3  # no replica counts as faster, so that none gets all the work
_STALE_ENTRIES = 64


@dataclass(frozen=True)
class Turn:
    """One microbatch at one replica, from `pick` to `finished` or `dropped`."""

    peer: NodeId
    number: int  # counts all turns of this stage


@dataclass
class _Replica:
    runtime: float  # virtual seconds
    lot: bytes  # breaks ties between equal runtimes; differs between drivers
    seconds: float | None = None  # mean duration of a turn
    turns: dict[int, float] = field(default_factory=dict[int, float])  # turns under way: seconds added for each


class BalancedRouting:
    """Choice of one driver among the replicas of one stage, by least virtual runtime."""

    def __init__(self, driver: NodeId, stage: int) -> None:
        self._driver = driver
        self._stage = stage
        self._replicas: dict[NodeId, _Replica] = {}
        self._heap: list[tuple[float, bytes, NodeId]] = []  # may contain outdated entries, which `pick` skips
        self._turns = 0

    def update(self, replicas: Iterable[NodeId]) -> None:
        """Set the present replicas. New and returning ones join at the end of the queue; missing ones are forgotten."""
        present = set(replicas)
        for peer in self._replicas.keys() - present:
            del self._replicas[peer]
        last = max((replica.runtime for replica in self._replicas.values()), default=0.0)
        for peer in sorted(present - self._replicas.keys()):
            lot = hash_parts("neuroshard/balanced", self._driver, self._stage, peer)
            self._replicas[peer] = _Replica(last, lot)
            self._push(peer)

    def pick(self) -> Turn | None:
        """Begin a turn of the replica with the least runtime; None without replicas."""
        while self._heap:
            runtime, _, peer = heappop(self._heap)
            replica = self._replicas.get(peer)
            if replica is not None and replica.runtime == runtime:  # otherwise the entry is outdated
                return self._begin(peer, replica)
        return None

    def finished(self, turn: Turn, seconds: float) -> None:
        """Record a turn's seconds from the request to the answer. Raises ValueError unless they are finite and >= 0."""
        if not (isfinite(seconds) and seconds >= 0):
            raise ValueError(f"a turn takes a time of at least 0 seconds, got {seconds}")
        replica = self._replicas.get(turn.peer)
        if replica is None or turn.number not in replica.turns:
            return
        seconds = max(seconds, LEAST_SECONDS)
        before = replica.seconds
        replica.seconds = seconds if before is None else before + SMOOTHING * (seconds - before)
        # `pick` added the expected seconds in advance. Replace them with the new average.
        replica.runtime += replica.seconds - replica.turns.pop(turn.number)
        self._push(turn.peer)

    def dropped(self, turn: Turn) -> None:
        """End a turn whose duration is unknown. The runtime added for it stays."""
        replica = self._replicas.get(turn.peer)
        if replica is not None:
            replica.turns.pop(turn.number, None)

    @property
    def runtimes(self) -> Mapping[NodeId, float]:
        """Virtual runtime of every replica in seconds."""
        return MappingProxyType({peer: replica.runtime for peer, replica in self._replicas.items()})

    def expected_seconds(self, peer: NodeId) -> float:
        """Mean duration of a replica's turns; before its first one, the mean of the other replicas."""
        replica = self._replicas.get(peer)
        if replica is not None and replica.seconds is not None:
            return replica.seconds
        known = [other.seconds for other in self._replicas.values() if other.seconds is not None]
        return sum(known) / len(known) if known else FIRST_GUESS_SECONDS

    def _begin(self, peer: NodeId, replica: _Replica) -> Turn:
        self._turns += 1
        added = self.expected_seconds(peer)
        replica.turns[self._turns] = added
        replica.runtime += added
        self._push(peer)
        return Turn(peer, self._turns)

    def _push(self, peer: NodeId) -> None:
        if len(self._heap) > 4 * len(self._replicas) + _STALE_ENTRIES:
            self._heap = [self._entry(peer) for peer in self._replicas]
            heapify(self._heap)
        else:
            heappush(self._heap, self._entry(peer))

    def _entry(self, peer: NodeId) -> tuple[float, bytes, NodeId]:
        replica = self._replicas[peer]
        return replica.runtime, replica.lot, peer
