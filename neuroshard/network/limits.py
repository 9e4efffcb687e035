"""Limits on rates and memory: a token bucket, the owner's upload limit, and the byte budget for messages of peers.

A node reserves memory in the byte budget before it allocates it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from math import inf

import anyio

from neuroshard.network.transport import MessageTooLargeError
from neuroshard.types import NodeId


class TokenBucket:
    """So much at once, and so much a second in the long run."""

    def __init__(self, burst: float, per_second: float) -> None:
        self._burst = burst
        self._per_second = per_second
        self._left = burst
        self._at = -inf

    def take(self, now: float, amount: float = 1) -> bool:
        """Whether so much more is allowed now (seconds on any monotonic clock); what is refused costs nothing."""
        self._left = min(self._burst, self._left + (now - self._at) * self._per_second)
        self._at = now
        if self._left < amount:
            return False
        self._left -= amount
        return True


DEFAULT_BYTES = 1024 * 1024 * 1024
PEER_SHARE = 4  # of all, one part in so many for one peer
CONTESTED_RATE = 64 * 1024  # bytes a second of whoever holds memory that others wait for
CONTESTED_GRACE_SECONDS = 10.0
LONGEST_CONTESTED_SECONDS = 45.0  # so that whoever waits a minute at most gets it


class Reservation:
    """Bytes that one message may take, until `release`."""

    def __init__(self, budget: ByteBudget, peer: NodeId, byte_count: int) -> None:
        self._budget: ByteBudget | None = budget
        self.peer = peer
        self.byte_count = byte_count

    def release(self) -> None:
        """Give the bytes back; a second call does nothing."""
        budget, self._budget = self._budget, None
        if budget is not None:
            budget.give_back(self.peer, self.byte_count)


@dataclass(eq=False)
class _Waiter:
    peer: NodeId
    byte_count: int
    granted: anyio.Event = field(default_factory=anyio.Event)
    reservation: Reservation | None = None


def frame_budget(total: int = DEFAULT_BYTES) -> ByteBudget:
    """The budget of a node whose messages may take so many bytes."""
    return ByteBudget(total, total // PEER_SHARE)


def contested_seconds(byte_count: int) -> float:
    """How long a peer may hold so many bytes for what it has not sent yet, once others wait for them."""
    return min(LONGEST_CONTESTED_SECONDS, CONTESTED_GRACE_SECONDS + byte_count / CONTESTED_RATE)


class ByteBudget:
    """At most `total` bytes at once, at most `per_peer` of them for one peer; who waits is served in order.

    A peer that has used up its own share does not hold up the others behind it.
    """

    def __init__(self, total: int, per_peer: int) -> None:
        if not 0 < per_peer <= total:
            raise ValueError(f"a budget needs 0 < per_peer <= total, got {per_peer} and {total}")
        self._total = total
        self._per_peer = per_peer
        self._used: dict[NodeId, int] = {}
        self._used_in_all = 0
        self._waiters: list[_Waiter] = []

    @property
    def used(self) -> int:
        """Bytes reserved now."""
        return self._used_in_all

    @property
    def waiting(self) -> int:
        """How many messages wait for room."""
        return len(self._waiters)

    def used_by(self, peer: NodeId) -> int:
        """Bytes reserved now for one peer."""
        return self._used.get(peer, 0)

    def is_awaited_by_others(self, peer: NodeId) -> bool:
        """Whether somebody else waits for memory, and not only for its own share of it."""
        return any(waiter.peer != peer and not self._waits_for_itself(waiter) for waiter in self._waiters)

    def make_fit(self, byte_count: int) -> None:
        """Messages of this size are expected: one of them fits from now on, however small the shares were."""
        self._per_peer = max(self._per_peer, byte_count)
        self._total = max(self._total, self._per_peer)
        self._serve_waiters()

    def check(self, byte_count: int) -> None:
        """Raises MessageTooLargeError for what will never fit."""
        if byte_count > self._per_peer:
            raise MessageTooLargeError(
                f"A message of {byte_count} bytes is above the limit of {self._per_peer} for one peer."
            )

    def try_reserve(self, peer: NodeId, byte_count: int) -> Reservation | None:
        """The bytes if there is room now and nobody waits for them. Raises MessageTooLargeError."""
        self.check(byte_count)
        queued = [waiter for waiter in self._waiters if waiter.peer == peer or not self._waits_for_itself(waiter)]
        return None if queued or not self._fits(peer, byte_count) else self._take(peer, byte_count)

    async def reserve(self, peer: NodeId, byte_count: int) -> Reservation:
        """The bytes, as soon as there is room. Raises MessageTooLargeError."""
        reservation = self.try_reserve(peer, byte_count)
        if reservation is not None:
            return reservation
        waiter = _Waiter(peer, byte_count)
        self._waiters.append(waiter)
        try:
            await waiter.granted.wait()
        except BaseException:
            self._leave(waiter)
            raise
        assert waiter.reservation is not None
        return waiter.reservation

    @asynccontextmanager
    async def reserved(self, peer: NodeId, byte_count: int) -> AsyncGenerator[None]:
        """For `async with`: the bytes are reserved within the block. Raises MessageTooLargeError."""
        reservation = await self.reserve(peer, byte_count)
        try:
            yield
        finally:
            reservation.release()

    def give_back(self, peer: NodeId, byte_count: int) -> None:
        """Called by a reservation."""
        self._used_in_all -= byte_count
        left = self.used_by(peer) - byte_count
        if left:
            self._used[peer] = left
        else:
            self._used.pop(peer, None)
        self._serve_waiters()

    def _leave(self, waiter: _Waiter) -> None:
        if waiter.reservation is not None:
            waiter.reservation.release()
        else:
            self._waiters.remove(waiter)
            self._serve_waiters()

    def _serve_waiters(self) -> None:
        passed_over: set[NodeId] = set()  # a peer's own messages keep their order
        for waiter in tuple(self._waiters):
            if waiter.peer in passed_over:
                continue
            if self._fits(waiter.peer, waiter.byte_count):
                self._waiters.remove(waiter)
                waiter.reservation = self._take(waiter.peer, waiter.byte_count)
                waiter.granted.set()
            elif self._waits_for_itself(waiter):
                passed_over.add(waiter.peer)
            else:
                return  # small ones must not starve a large one

    def _waits_for_itself(self, waiter: _Waiter) -> bool:
        """Whether only the peer's own share is used up."""
        return self.used_by(waiter.peer) + waiter.byte_count > self._per_peer

    def _fits(self, peer: NodeId, byte_count: int) -> bool:
        return self._used_in_all + byte_count <= self._total and self.used_by(peer) + byte_count <= self._per_peer

    def _take(self, peer: NodeId, byte_count: int) -> Reservation:
        self._used_in_all += byte_count
        if byte_count:
            self._used[peer] = self.used_by(peer) + byte_count
        return Reservation(self, peer, byte_count)


BURST_SECONDS = 0.25
LEAST_PORTION_BYTES = 16 * 1024


class UploadPacer:
    """Spreads bytes so that within any T seconds at most rate x (T + BURST_SECONDS) bytes + one portion may leave.

    None means no limit. Who waits is served in order.
    """

    def __init__(self, bytes_per_second: float | None = None) -> None:
        self._rate = inf
        self._free_at = -inf  # when everything that was granted has been paid for
        self.limit(bytes_per_second)

    @property
    def bytes_per_second(self) -> float | None:
        """The limit."""
        return None if self._rate == inf else self._rate

    def limit(self, bytes_per_second: float | None) -> None:
        """Change the limit for everything that is sent from now on. Raises ValueError unless it is positive."""
        if bytes_per_second is not None and not bytes_per_second > 0:
            raise ValueError(f"an upload limit must be positive, got {bytes_per_second}")
        self._rate = inf if bytes_per_second is None else bytes_per_second

    def portion(self, byte_count: int) -> int:
        """How many of so many bytes to send at a time, so that the limit also holds over short times."""
        if self._rate == inf:
            return byte_count
        return min(byte_count, max(LEAST_PORTION_BYTES, int(self._rate * BURST_SECONDS)))

    def seconds_behind(self) -> float:
        """How long the next byte has to wait."""
        return max(0.0, self._free_at - anyio.current_time())

    async def spend(self, byte_count: int) -> None:
        """Wait until so many bytes may leave. Whoever is cancelled meanwhile has spent them all the same."""
        if self._rate == inf:
            return
        now = anyio.current_time()
        start = max(self._free_at, now - BURST_SECONDS)
        self._free_at = start + byte_count / self._rate
        if start > now:
            await anyio.sleep_until(start)
