"""What the streams of all peers hold unread in one node, and how far their windows may grow. Counting only."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Protocol

MIB = 1024 * 1024


class Unread(Protocol):
    """A stream, as far as its memory goes."""

    def abandon(self) -> None:
        """End it and forget what it holds."""
        ...


@dataclass(frozen=True)
class ReceiveLimits:
    """Bytes of one node."""

    unread: int = 128 * MIB
    growth: int = 64 * MIB  # of windows, above those with which streams begin
    growth_of_peer: int = 8 * MIB

    @classmethod
    def within(cls, unread: int) -> ReceiveLimits:
        """Those of a node whose streams may hold so many bytes."""
        return cls(unread, growth=unread // 2, growth_of_peer=min(unread // 8, cls.growth_of_peer))


@dataclass
class _Held:
    peer: object
    unread: int = 0
    growth: int = 0


class ReceiveMemory:
    """When too much waits to be read, the peer of which most waits loses the stream that holds most of it."""

    def __init__(self, limits: ReceiveLimits | None = None) -> None:
        self._limits = limits or ReceiveLimits()
        self._held: dict[Unread, _Held] = {}
        self._growth_of: Counter[object] = Counter()
        self.unread = 0

    def may_grow(self, stream: Unread, peer: object, byte_count: int) -> bool:
        """Whether a window may become so much larger; counted when it may."""
        of_peer, of_all = self._growth_of[peer], self._growth_of.total()
        if of_peer + byte_count > self._limits.growth_of_peer or of_all + byte_count > self._limits.growth:
            return False
        self._growth_of[peer] += byte_count
        self._held.setdefault(stream, _Held(peer)).growth += byte_count
        return True

    def arrived(self, stream: Unread, peer: object, byte_count: int) -> None:
        """Bytes wait to be read."""
        self._held.setdefault(stream, _Held(peer)).unread += byte_count
        self.unread += byte_count
        while self.unread > self._limits.unread:
            fullest = self._fullest()
            fullest.abandon()
            self.leave(fullest)

    def taken(self, stream: Unread, byte_count: int) -> None:
        """Bytes were read; those of a stream that has left count no more."""
        held = self._held.get(stream)
        if held is not None:
            held.unread -= byte_count
            self.unread -= byte_count

    def leave(self, stream: Unread) -> None:
        """A stream is over."""
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
