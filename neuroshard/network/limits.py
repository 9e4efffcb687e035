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
    """Allows a burst at once and a fixed rate per second in the long run."""

    def __init__(self, burst: float, per_second: float) -> None:
        self._burst = burst
        self._per_second = per_second
        self._left = burst
        self._at = -inf

    def take(self, now: float, amount: float = 1) -> bool:
        """Take tokens if enough are available at `now` (seconds of any monotonic clock). A refused call takes none."""
        self._left = min(self._burst, self._left + (now - self._at) * self._per_second)
        self._at = now
        if self._left < amount:
            return False
        self._left -= amount
        return True


DEFAULT_BYTES = 1024 * 1024 * 1024
PEER_SHARE = 4  # one peer gets 1/PEER_SHARE of all
CONTESTED_RATE = 64 * 1024  # bytes per second required of a peer that holds memory while others wait
CONTESTED_GRACE_SECONDS = 10.0
LONGEST_CONTESTED_SECONDS = 45.0  # so that a peer that waits up to one minute gets memory


class Reservation:
    """Bytes reserved for one message until `release`."""

    def __init__(self, budget: ByteBudget, peer: NodeId, byte_count: int) -> None:
        self._budget: ByteBudget | None = budget
        self.peer = peer
        self.byte_count = byte_count

    def release(self) -> None:
        """Return the bytes. A second call has no effect."""
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
    """A budget for a node whose messages may take `total` bytes."""
    return ByteBudget(total, total // PEER_SHARE)


def contested_seconds(byte_count: int) -> float:
    """How long a peer may hold memory for bytes that it has not sent yet, once others wait for it."""
    return min(LONGEST_CONTESTED_SECONDS, CONTESTED_GRACE_SECONDS + byte_count / CONTESTED_RATE)


class ByteBudget:
    """Limits memory to `total` bytes, and to `per_peer` bytes for one peer. Waiters are served in order.

    A peer that has used up its own share does not delay the peers behind it.
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
        """Number of messages that wait for memory."""
        return len(self._waiters)

    def used_by(self, peer: NodeId) -> int:
        """Bytes reserved now for one peer."""
        return self._used.get(peer, 0)

    def is_awaited_by_others(self, peer: NodeId) -> bool:
        """Whether another peer waits for memory, other than for its own share."""
        return any(waiter.peer != peer and not self._waits_for_itself(waiter) for waiter in self._waiters)

    def make_fit(self, byte_count: int) -> None:
        """Raise the shares so that one message of this size fits from now on."""
        self._per_peer = max(self._per_peer, byte_count)
        self._total = max(self._total, self._per_peer)
        self._serve_waiters()

    def check(self, byte_count: int) -> None:
        """Raise MessageTooLargeError for a message that can never fit."""
        if byte_count > self._per_peer:
            raise MessageTooLargeError(
                f"A message of {byte_count} bytes is above the limit of {self._per_peer} for one peer."
            )

    def try_reserve(self, peer: NodeId, byte_count: int) -> Reservation | None:
        """Reserve bytes if they are free and no other message waits; otherwise return None.

        Raises MessageTooLargeError.
        """
        self.check(byte_count)
        queued = [waiter for waiter in self._waiters if waiter.peer == peer or not self._waits_for_itself(waiter)]
        return None if queued or not self._fits(peer, byte_count) else self._take(peer, byte_count)

    async def reserve(self, peer: NodeId, byte_count: int) -> Reservation:
        """Reserve bytes, waiting until they are free. Raises MessageTooLargeError."""
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
        """Reserve bytes for the length of an `async with` block. Raises MessageTooLargeError."""
        reservation = await self.reserve(peer, byte_count)
        try:
            yield
        finally:
            reservation.release()

    def give_back(self, peer: NodeId, byte_count: int) -> None:
        """Return the bytes of a reservation; `Reservation.release` calls this."""
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
                return  # small messages must not starve a large one

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
    """Spreads bytes: within any T seconds at most rate x (T + burst_seconds) bytes + one portion leave.

    None means no limit. Waiters are served in order.
    """

    def __init__(self, bytes_per_second: float | None = None, burst_seconds: float = BURST_SECONDS) -> None:
        self._burst_seconds = burst_seconds
        self._rate = inf
        self._free_at = -inf  # time when everything granted so far has been paid for
        self.limit(bytes_per_second)

    @property
    def bytes_per_second(self) -> float | None:
        """The limit, or None."""
        return None if self._rate == inf else self._rate

    def limit(self, bytes_per_second: float | None) -> None:
        """Change the limit for everything sent from now on. Raises ValueError unless it is positive.

        Bytes that were granted but not yet paid for are paid for at the new rate.
        """
        if bytes_per_second is not None and not bytes_per_second > 0:
            raise ValueError(f"an upload limit must be positive, got {bytes_per_second}")
        rate = inf if bytes_per_second is None else bytes_per_second
        if self._free_at > -inf:  # otherwise nothing was spent, and there may be no event loop to ask for the time
            self._free_at = anyio.current_time() + self.seconds_behind() * (self._rate / rate)
        self._rate = rate

    def portion(self, byte_count: int) -> int:
        """The number of bytes to send at a time, so that the limit also applies over short times."""
        if self._rate == inf:
            return byte_count
        return min(byte_count, max(LEAST_PORTION_BYTES, int(self._rate * self._burst_seconds)))

    @property
    def is_rested(self) -> bool:
        """Whether a whole burst may leave, as at the beginning."""
        return self._free_at <= anyio.current_time() - self._burst_seconds

    def seconds_behind(self) -> float:
        """Seconds until the next byte may leave."""
        return max(0.0, self._free_at - anyio.current_time())

    async def spend(self, byte_count: int) -> None:
        """Wait until these bytes may leave. A caller that is cancelled while it waits has still spent them."""
        if self._rate == inf:
            return
        now = anyio.current_time()
        start = max(self._free_at, now - self._burst_seconds)
        self._free_at = start + byte_count / self._rate
        if start > now:
            await anyio.sleep_until(start)
