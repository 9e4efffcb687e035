"""How many connections, identities and streams strangers may have here. Counting only: no sockets."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from ipaddress import ip_address
from typing import TypeVar

_Peer = TypeVar("_Peer")


@dataclass(frozen=True)
class ConnectionLimits:
    """Bounds of one node."""

    connections: int = 512
    connections_of_peer: int = 4
    handshakes: int = 64  # not yet authenticated, all together
    handshakes_of_ip: int = 16
    identities_of_ip: int = 64
    identities_of_loopback: int = 1024
    streams: int = 2048  # opened by others
    streams_of_peer: int = 32


class StreamAdmission:
    """Streams that others have opened and not closed, counted by peer over all its connections."""

    def __init__(self, limits: ConnectionLimits | None = None) -> None:
        self._limits = limits or ConnectionLimits()
        self._open: Counter[object] = Counter()
        self._total = 0
        self.refused = 0

    def enter(self, peer: object) -> bool:
        """Whether the peer may have one stream more; counted when it may."""
        if self._total >= self._limits.streams or self._open[peer] >= self._limits.streams_of_peer:
            self.refused += 1
            return False
        self._open[peer] += 1
        self._total += 1
        return True

    def leave(self, peer: object) -> None:
        """A stream that entered is closed."""
        self._total -= 1
        self._open[peer] -= 1
        if not self._open[peer]:
            del self._open[peer]

    def open_streams(self, peer: object) -> int:
        """Streams the peer has open now."""
        return self._open[peer]


class ConnectionAdmission:
    """Connections to and from others, by IP address and by identity."""

    def __init__(self, limits: ConnectionLimits | None = None) -> None:
        self.limits = limits or ConnectionLimits()
        self._handshakes: Counter[str] = Counter()
        self._established: Counter[tuple[str, str]] = Counter()  # (ip, identity)
        self.refused: Counter[str] = Counter()  # by reason

    @property
    def connections(self) -> int:
        """Established connections."""
        return self._established.total()

    def may_shake_hands(self, ip: str) -> bool:
        """Whether a connection from this address may begin its handshake; counted when it may."""
        is_full = self.connections + self._handshakes.total() >= self.limits.connections
        is_crowded = self._handshakes.total() >= self.limits.handshakes or (
            self._handshakes[ip] >= self.limits.handshakes_of_ip and not is_loopback(ip)
        )
        if is_full or is_crowded:
            self.refused["connections" if is_full else "handshakes"] += 1
            return False
        self._handshakes[ip] += 1
        return True

    def end_handshake(self, ip: str) -> None:
        """A handshake that began is over, well or not."""
        _decrease(self._handshakes, ip)

    def enter(self, ip: str, identity: str) -> bool:
        """Whether this identity may connect from this address; counted when it may."""
        reason = self._obstacle(ip, identity)
        if reason is not None:
            self.refused[reason] += 1
            return False
        self._established[ip, identity] += 1
        return True

    def leave(self, ip: str, identity: str) -> None:
        """A connection that entered is closed."""
        _decrease(self._established, (ip, identity))

    def _obstacle(self, ip: str, identity: str) -> str | None:
        if self.connections >= self.limits.connections:
            return "connections"
        if sum(count for (_, who), count in self._established.items() if who == identity) >= (
            self.limits.connections_of_peer
        ):
            return "connections of peer"
        others = sum(1 for (where, who) in self._established if where == ip and who != identity)
        most = self.limits.identities_of_loopback if is_loopback(ip) else self.limits.identities_of_ip
        return "identities of address" if others >= most else None


def is_loopback(ip: str) -> bool:
    """Whether an IP address (or an empty text, for an unknown one) is this computer's own."""
    try:
        return ip_address(ip).is_loopback
    except ValueError:
        return False


def _decrease(counts: Counter[_Peer], key: _Peer) -> None:
    counts[key] -= 1
    if counts[key] <= 0:
        del counts[key]
