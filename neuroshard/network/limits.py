"""Limits on rates and memory: a token bucket, the owner's upload limit, and the byte budget for messages of peers.

A node reserves memory in the byte budget before it allocates it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from math import inf

import anyio

from neuroshard.network.crowds import Crowd
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
CONTESTED_GRACE_SECONDS = 10.0  # after this time without a byte, memory goes to a waiting peer with a better right
LONGEST_CONTESTED_SECONDS = 45.0  # so that a peer that waits up to one minute gets memory


@dataclass(frozen=True)
class PeerStanding:
    """The facts that decide when a peer gets memory."""

    ip: str  # "" through a relay
    is_known: bool = False  # a member of the closed run


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
    number: int  # in the order of arrival
    granted: anyio.Event = field(default_factory=anyio.Event)
    reservation: Reservation | None = None


@dataclass(eq=False)
class _Account:
    """The bytes that one peer holds, and its messages that wait."""

    standing: PeerStanding
    used: int = 0
    waiters: deque[_Waiter] = field(default_factory=deque[_Waiter])


def frame_budget(total: int = DEFAULT_BYTES) -> ByteBudget:
    """A budget for a node whose messages may take `total` bytes."""
    return ByteBudget(total, total // PEER_SHARE)


def contested_seconds(byte_count: int) -> float:
    """How long a peer may hold memory for bytes that it has not sent yet, once others wait for it."""
    return min(LONGEST_CONTESTED_SECONDS, CONTESTED_GRACE_SECONDS + byte_count / CONTESTED_RATE)


class ByteBudget:
    """Limits memory to `total` bytes, and to `per_peer` bytes for one peer.

    Memory belongs to networks, as places do (`crowds.py`): the next one is a known peer, then the peer whose network
    holds least, of one network the peer whose host holds least, then the one that came first. A peer that has used up
    its own share does not delay others.
    """

    def __init__(self, total: int, per_peer: int) -> None:
        if not 0 < per_peer <= total:
            raise ValueError(f"a budget needs 0 < per_peer <= total, got {per_peer} and {total}")
        self._total = total
        self._per_peer = per_peer
        self._standing_of: Callable[[NodeId], PeerStanding] = PeerStanding  # each peer is a network of its own
        self._accounts: dict[NodeId, _Account] = {}
        self._used_in_all = 0
        self._numbers = count()
        self._next: _Waiter | None = None  # for which too little is free

    def share_by(self, standing_of: Callable[[NodeId], PeerStanding]) -> None:
        """Set what decides who is served first. It is asked whenever a peer wants memory."""
        self._standing_of = standing_of

    @property
    def used(self) -> int:
        """Bytes reserved now."""
        return self._used_in_all

    @property
    def waiting(self) -> int:
        """Number of messages that wait for memory."""
        return sum(len(account.waiters) for account in self._accounts.values())

    def used_by(self, peer: NodeId) -> int:
        """Bytes reserved now for one peer."""
        return self._accounts[peer].used if peer in self._accounts else 0

    def is_awaited_by_others(self, peer: NodeId) -> bool:
        """Whether another peer waits for memory, other than for its own share."""
        return any(waiter.peer != peer for waiter in self._candidates())

    def must_yield(self, peer: NodeId) -> bool:
        """Whether the next one that waits has a better right to memory than this peer, which holds some."""
        waiter, holder = self._next, self._accounts.get(peer)
        if waiter is None or holder is None or waiter.peer == peer:
            return False
        newcomer = self._accounts[waiter.peer]
        if newcomer.standing.is_known and holder.standing.is_known:
            return newcomer.used + waiter.byte_count <= holder.used
        if newcomer.standing.is_known or holder.standing.is_known:
            return newcomer.standing.is_known
        return self._crowd().is_greedy_beside(holder.standing.ip, newcomer.standing.ip, waiter.byte_count)

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
        """Reserve bytes if they are free and it is the peer's turn; otherwise return None.

        Raises MessageTooLargeError.
        """
        waiter = self._enter(peer, byte_count)
        if waiter.reservation is None:
            self._leave(waiter)
        return waiter.reservation

    async def reserve(self, peer: NodeId, byte_count: int) -> Reservation:
        """Reserve bytes, waiting until they are free. Raises MessageTooLargeError."""
        waiter = self._enter(peer, byte_count)
        if waiter.reservation is not None:
            return waiter.reservation
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
        if byte_count:
            self._accounts[peer].used -= byte_count
            self._forget_idle(peer)
        self._serve_waiters()

    def _enter(self, peer: NodeId, byte_count: int) -> _Waiter:
        """Add a waiter, and serve all that can be served."""
        self.check(byte_count)
        standing = self._standing_of(peer)
        account = self._accounts.setdefault(peer, _Account(standing))
        account.standing = standing
        waiter = _Waiter(peer, byte_count, next(self._numbers))
        account.waiters.append(waiter)
        self._serve_waiters()
        return waiter

    def _leave(self, waiter: _Waiter) -> None:
        if waiter.reservation is not None:
            waiter.reservation.release()
        else:
            self._accounts[waiter.peer].waiters.remove(waiter)
            self._forget_idle(waiter.peer)
            self._serve_waiters()

    def _forget_idle(self, peer: NodeId) -> None:
        account = self._accounts[peer]
        if not account.used and not account.waiters:
            del self._accounts[peer]

    def _serve_waiters(self) -> None:
        """Serve until the next one does not fit: small messages must not starve a large one."""
        while (waiter := self._next_waiter()) is not None and self._used_in_all + waiter.byte_count <= self._total:
            account = self._accounts[waiter.peer]
            account.waiters.popleft()
            account.used += waiter.byte_count
            self._used_in_all += waiter.byte_count
            self._forget_idle(waiter.peer)
            waiter.reservation = Reservation(self, waiter.peer, waiter.byte_count)
            waiter.granted.set()
        self._next = waiter

    def _candidates(self) -> list[_Waiter]:
        """The first waiter of each peer, except of those that wait for their own share."""
        firsts = [(account, account.waiters[0]) for account in self._accounts.values() if account.waiters]
        return [waiter for account, waiter in firsts if account.used + waiter.byte_count <= self._per_peer]

    def _next_waiter(self) -> _Waiter | None:
        candidates = self._candidates()
        if len(candidates) <= 1:
            return candidates[0] if candidates else None
        return min(candidates, key=partial(self._turn, self._crowd()))

    def _turn(self, crowd: Crowd, waiter: _Waiter) -> tuple[bool, float, int, int]:
        account = self._accounts[waiter.peer]
        standing = account.standing
        if standing.is_known:
            return False, account.used, 0, waiter.number
        return True, crowd.greed(standing.ip), crowd.of_host(standing.ip), waiter.number

    def _crowd(self) -> Crowd:
        """The bytes of each network of strangers."""
        crowd = Crowd()
        for account in self._accounts.values():
            if not account.standing.is_known:
                crowd.add(account.standing.ip, account.used)
        return crowd


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
            behind = 0.0 if self._rate == inf else self.seconds_behind() * (self._rate / rate)
            self._free_at = anyio.current_time() + behind
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
