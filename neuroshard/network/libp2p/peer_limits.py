"""Limits on peers: streams and receive memory, and the containment of errors that their data causes.

The limits only count; no code here opens a socket. An error caused by a peer ends its connection or stream, not the
node.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Protocol, TypeVar


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits on the connections of one node."""

    connections: int = 512  # half of them for peers that this node dialled
    connections_of_peer: int = 4
    handshakes: int = 64  # of others, not yet authenticated
    dials_of_host: int = 10  # within a minute, without success
    dials_of_network: int = 40
    is_loopback_free: bool = True  # dials on this computer do not count
    streams: int = 2048  # opened by one peer
    streams_of_peer: int = 56


class StreamAdmission:
    """Counts the open streams of each peer over all its connections."""

    def __init__(self, limits: ConnectionLimits | None = None) -> None:
        self._limits = limits or ConnectionLimits()
        self._open: Counter[object] = Counter()
        self._total = 0
        self.refused = 0

    def enter(self, peer: object) -> bool:
        """Count one more stream of the peer if its limit allows it."""
        if self._total >= self._limits.streams or self._open[peer] >= self._limits.streams_of_peer:
            self.refused += 1
            return False
        self._open[peer] += 1
        self._total += 1
        return True

    def leave(self, peer: object) -> None:
        """Remove a stream that was closed."""
        self._total -= 1
        self._open[peer] -= 1
        if not self._open[peer]:
            del self._open[peer]

    def open_streams(self, peer: object) -> int:
        """Number of the peer's open streams."""
        return self._open[peer]


MIB = 1024 * 1024


class Unread(Protocol):
    """A stream with bytes that wait to be read."""

    def abandon(self) -> None:
        """End the stream and drop its bytes."""
        ...


@dataclass(frozen=True)
class ReceiveLimits:
    """Limits on the receive memory of one node, in bytes."""

    unread: int = 128 * MIB
    growth: int = 64 * MIB  # of windows, above their initial size
    growth_of_peer: int = 8 * MIB

    @classmethod
    def within(cls, unread: int) -> ReceiveLimits:
        """The limits of a node whose streams may take `total` bytes."""
        return cls(unread, growth=unread // 2, growth_of_peer=min(unread // 8, cls.growth_of_peer))


@dataclass
class _Held:
    peer: object
    unread: int = 0
    growth: int = 0


class ReceiveMemory:
    """Bounds unread bytes: above the limit, the peer with most of them loses its largest stream."""

    def __init__(self, limits: ReceiveLimits | None = None) -> None:
        self._limits = limits or ReceiveLimits()
        self._held: dict[Unread, _Held] = {}
        self._growth_of: Counter[object] = Counter()
        self.unread = 0

    def may_grow(self, stream: Unread, peer: object, byte_count: int) -> bool:
        """Count the growth of a window if the limits allow it."""
        of_peer, of_all = self._growth_of[peer], self._growth_of.total()
        if of_peer + byte_count > self._limits.growth_of_peer or of_all + byte_count > self._limits.growth:
            return False
        self._growth_of[peer] += byte_count
        self._held.setdefault(stream, _Held(peer)).growth += byte_count
        return True

    def arrived(self, stream: Unread, peer: object, byte_count: int) -> None:
        """Count bytes that wait to be read."""
        self._held.setdefault(stream, _Held(peer)).unread += byte_count
        self.unread += byte_count
        while self.unread > self._limits.unread:
            fullest = self._fullest()
            fullest.abandon()
            self.leave(fullest)

    def taken(self, stream: Unread, byte_count: int) -> None:
        """Count bytes that were read; those of a removed stream no longer count."""
        held = self._held.get(stream)
        if held is not None:
            held.unread -= byte_count
            self.unread -= byte_count

    def leave(self, stream: Unread) -> None:
        """Remove a stream."""
        held = self._held.pop(stream, None)
        if held is not None:
            self.unread -= held.unread
            self._growth_of[held.peer] -= held.growth
            if not self._growth_of[held.peer]:
                del self._growth_of[held.peer]

    def _fullest(self) -> Unread:
        by_peer: Counter[object] = Counter()
        for held in self._held.values():
            by_peer[held.peer] += held.unread
        ((peer, _),) = by_peer.most_common(1)
        return max((stream for stream, held in self._held.items() if held.peer == peer), key=self._unread_of)

    def _unread_of(self, stream: Unread) -> int:
        return self._held[stream].unread


_Result = TypeVar("_Result")
_LOG = logging.getLogger(__name__)


async def contain_errors(work: Awaitable[_Result], doing: str) -> _Result | Exception:
    """The value of `work`. An error is logged at debug level and returned."""
    try:
        return await work
    except Exception as error:  # noqa: BLE001 - the inbound-message handler: libp2p lets almost any error through
        _LOG.debug("%s failed.", doing, exc_info=True)
        return error
