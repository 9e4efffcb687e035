"""Balanced routing: a microbatch goes to the replica of a stage that has had the least to do so far.

Stochastic wiring of SWARM parallelism (Ryabinin et al. 2023, section 3.2): a min-heap of virtual runtimes, to which
every turn of a replica adds the time that it takes on average. So a replica that is twice as fast gets twice as many.
Plain bookkeeping of one driver for one stage: time is an argument, nothing waits.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from heapq import heapify, heappop, heappush
from math import isfinite
from types import MappingProxyType

from neuroshard.identity import hash_parts
from neuroshard.types import NodeId

BAN_SECONDS = 30.0
MOST_TRIES = 3  # of one microbatch at a replica that asks for patience
SMOOTHING = 0.2  # weight of the newest time in the moving average
FIRST_GUESS_SECONDS = 1.0  # of a turn, while nothing was measured anywhere
LEAST_SECONDS = 1e-3  # nobody is so fast that it may have everything
_STALE_ENTRIES = 64


class Failure(StrEnum):
    """What may be done about a microbatch that a replica did not do."""

    RETRY_SAME = "retry_same"  # it is busy: ask it again a little later
    ELSEWHERE = "elsewhere"  # it cannot be reached or has nothing to offer: ask another one
    GIVE_UP = "give_up"  # the request itself is wrong


@dataclass(frozen=True)
class Turn:
    """One microbatch at one replica, from `pick` to `finished` or `failed`."""

    peer: NodeId
    number: int  # of all turns of this stage


@dataclass
class _Replica:
    runtime: float  # virtual seconds
    lot: bytes  # decides between equal runtimes, differently for every driver
    seconds: float | None = None  # a turn takes on average
    turns: dict[int, float] = field(default_factory=dict[int, float])  # under way: what was added for each


class BalancedRouting:
    """The replicas of one stage as one driver uses them."""

    def __init__(self, driver: NodeId, stage: int) -> None:
        self._driver = driver
        self._stage = stage
        self._replicas: dict[NodeId, _Replica] = {}
        self._banned: dict[NodeId, float] = {}  # until when
        self._heap: list[tuple[float, bytes, NodeId]] = []  # also entries that are no longer true
        self._turns = 0

    def update(self, replicas: Iterable[NodeId], now: float) -> None:
        """These are the replicas now. Who is new enters at the end; of who is gone only a ban is remembered."""
        present = set(replicas)
        self._end_bans(now)
        for peer in self._replicas.keys() - present:
            del self._replicas[peer]
        last = self._last_runtime()
        for peer in sorted(present - self._replicas.keys()):
            lot = hash_parts("neuroshard/balanced", self._driver, self._stage, peer)
            self._replicas[peer] = _Replica(last, lot)
            self._push(peer)

    def pick(self, now: float, avoid: Collection[NodeId] = ()) -> Turn | None:
        """A turn of the replica with the least runtime; None when all are banned or to be avoided.

        A replica that merely does not suit a microbatch has not failed: pick again and avoid it.
        """
        self._end_bans(now)
        aside: list[tuple[float, bytes, NodeId]] = []
        turn: Turn | None = None
        while self._heap and turn is None:
            entry = heappop(self._heap)
            runtime, _, peer = entry
            replica = self._replicas.get(peer)
            if replica is None or peer in self._banned or replica.runtime != runtime:
                continue  # no longer true
            if peer in avoid:
                aside.append(entry)
            else:
                turn = self._begin(peer, replica)
        for entry in aside:
            heappush(self._heap, entry)
        return turn

    def finished(self, turn: Turn, seconds: float) -> None:
        """The replica did its work in this time, from the request to the answer. Raises ValueError for no real time."""
        if not (isfinite(seconds) and seconds >= 0):
            raise ValueError(f"a turn takes a time of at least 0 seconds, got {seconds}")
        replica = self._replicas.get(turn.peer)
        if replica is None or turn.number not in replica.turns:
            return
        seconds = max(seconds, LEAST_SECONDS)
        before = replica.seconds
        replica.seconds = seconds if before is None else before + SMOOTHING * (seconds - before)
        replica.runtime += replica.seconds - replica.turns.pop(turn.number)
        self._push(turn.peer)

    def failed(self, turn: Turn, failure: Failure, now: float, tries: int = 1) -> Failure:
        """What to do after so many tries of one microbatch in this turn, which goes on only with RETRY_SAME.

        ELSEWHERE bans the replica. One that asks for patience too often is not banned, but not asked again either.
        """
        if failure is Failure.RETRY_SAME and tries < MOST_TRIES:
            return Failure.RETRY_SAME
        replica = self._replicas.get(turn.peer)
        if replica is not None:
            replica.turns.pop(turn.number, None)
        if failure is Failure.ELSEWHERE:
            self._banned[turn.peer] = now + BAN_SECONDS
        return Failure.ELSEWHERE if failure is Failure.RETRY_SAME else failure

    def banned(self, now: float) -> tuple[NodeId, ...]:
        """Peers that are not asked now."""
        return tuple(sorted(peer for peer, until in self._banned.items() if now < until))

    @property
    def next_return(self) -> float | None:
        """When the next ban ends; None without one."""
        return min(self._banned.values(), default=None)

    @property
    def runtimes(self) -> Mapping[NodeId, float]:
        """Virtual seconds of every replica."""
        return MappingProxyType({peer: replica.runtime for peer, replica in self._replicas.items()})

    def expected_seconds(self, peer: NodeId) -> float:
        """How long a turn of a replica takes on average; before the first one, what the others take."""
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

    def _end_bans(self, now: float) -> None:
        """Who comes back enters at the end, like a newcomer, so that it need not catch up with what it missed."""
        ended = sorted(peer for peer, until in self._banned.items() if now >= until)
        last = self._last_runtime()
        for peer in ended:
            del self._banned[peer]
            replica = self._replicas.get(peer)
            if replica is not None:
                replica.runtime = max(replica.runtime, last)
                self._push(peer)

    def _last_runtime(self) -> float:
        """The largest runtime of those that can be asked; of all when nobody can."""
        able = [replica.runtime for peer, replica in self._replicas.items() if peer not in self._banned]
        return max(able or [replica.runtime for replica in self._replicas.values()], default=0.0)

    def _push(self, peer: NodeId) -> None:
        if len(self._heap) > 4 * len(self._replicas) + _STALE_ENTRIES:
            self._heap = [self._entry(peer) for peer in self._replicas if peer not in self._banned]
            heapify(self._heap)
        elif peer not in self._banned:
            heappush(self._heap, self._entry(peer))

    def _entry(self, peer: NodeId) -> tuple[float, bytes, NodeId]:
        replica = self._replicas[peer]
        return replica.runtime, replica.lot, peer
