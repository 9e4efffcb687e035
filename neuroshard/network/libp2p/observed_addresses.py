"""Where others see this node's port: what its router made of its own address. They say so when they are met."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import anyio
from libp2p.abc import INetConn
from multiaddr import Multiaddr

from neuroshard.network.libp2p.muxer import BoundedMuxer

MAX_OBSERVERS = 64
KEPT_SECONDS = 3600.0  # after the observer's connection ended
CONFIRMED_BY = 2  # observers, before an address is told to everybody


@dataclass
class _Observation:
    text: str
    muxer: BoundedMuxer  # while it lives, the address holds
    made_at: float
    held_at: float  # when the address was known to hold


class ObservedAddresses:
    """The newest word of each observer, by its IP address."""

    def __init__(self, when_moved: Callable[[], None] = lambda: None) -> None:
        """`when_moved` is told of an IP address at which nobody saw this node before."""
        self._when_moved = when_moved
        self._by_observer: dict[str, _Observation] = {}

    def record(self, muxer: BoundedMuxer, observed: Multiaddr, local: Iterable[Multiaddr]) -> None:
        """A peer saw this node at `observed`; it counts when the connection left from the port that listens."""
        address, text = muxer.get_remote_address(), str(observed)
        if not muxer.is_from_listening_port or address is None:
            return
        known = self._current()
        self._by_observer.pop(address[0], None)
        if text in {str(one) for one in local}:
            return
        while len(self._by_observer) >= MAX_OBSERVERS:
            del self._by_observer[min(self._by_observer, key=lambda ip: self._by_observer[ip].held_at)]
        now = anyio.current_time()
        self._by_observer[address[0]] = _Observation(text, muxer, made_at=now, held_at=now)
        if known and _ip_of(text) not in {_ip_of(one.text) for one in known}:
            self._when_moved()

    def remove_conn(self, conn: INetConn) -> None:
        """A connection ended; what was seen stays true for a while."""

    def addrs(self) -> list[Multiaddr]:
        """Addresses that several saw: the router gives everybody the same."""
        seen = [one.text for one in self._current()]
        return [Multiaddr(text) for text in self.likely() if seen.count(text) >= CONFIRMED_BY]

    def likely(self) -> list[str]:
        """All that were seen: first by those who are connected still, by most of them, then the newest."""
        by_text: dict[str, list[_Observation]] = {}
        for one in self._current():
            by_text.setdefault(one.text, []).append(one)

        def rank(text: str) -> tuple[int, float]:
            return sum(not one.muxer.is_closed for one in by_text[text]), max(one.made_at for one in by_text[text])

        return sorted(by_text, key=rank, reverse=True)

    def _current(self) -> list[_Observation]:
        now = anyio.current_time()
        for one in self._by_observer.values():
            if not one.muxer.is_closed:
                one.held_at = now
        self._by_observer = {ip: one for ip, one in self._by_observer.items() if now - one.held_at < KEPT_SECONDS}
        return list(self._by_observer.values())


def _ip_of(text: str) -> str:
    return "/".join(text.split("/")[:3])
