"""Places for handshakes and connections, and the budget of dials. This file counts and chooses; it opens no socket.

Half of the connections are for peers that this node dialled. Where the other places are all taken, a newcomer from a
network with few of them replaces one of the network with most of them (the model is Bitcoin Core,
`src/node/eviction.cpp`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import nlargest, nsmallest
from math import inf
from typing import Protocol

from neuroshard.network.crowds import Crowd, longest_silent, network_of, wide_network_of
from neuroshard.network.libp2p.addresses import PeerAddress, Scope, scope_of
from neuroshard.network.libp2p.peer_limits import ConnectionLimits
from neuroshard.network.libp2p.streams import RoundTrips

PROTECTED_NEAR = 8
PROTECTED_USEFUL = 8
USEFUL_AFTER_SECONDS = 60.0  # every new connection carries a few requests


class Handshake(Protocol):
    """A socket of a peer that is not authenticated yet."""

    heard_at: float  # when it sent something last

    @property
    def ip(self) -> str: ...

    def cut(self) -> None:
        """Close the socket."""
        ...


class Streams(Protocol):
    """The streams of a connection: they show its value."""

    used_at: float  # when one was opened last by either side, or a body was on its way
    round_trips: RoundTrips


@dataclass(eq=False)
class ConnectionPlace:
    """One connection of an authenticated peer."""

    ip: str  # "" through a relay
    identity: str
    is_chosen: bool  # this node dialled
    entered_at: float
    streams: Streams | None = None  # None: not negotiated yet


def least_needed(inbound: Sequence[ConnectionPlace], newcomer_ip: str) -> ConnectionPlace | None:
    """The connection that a newcomer replaces; None if no network is as greedy as the newcomer's would become.

    Protected are the connections with the shortest round trips, those that carried requests last, and the older half
    of the others. For age the first one of each network comes first, then the second ones: an attacker who filled all
    places before the others came does not keep them.
    """
    open_ones = [place for place in inbound if place.streams is not None]
    near = nsmallest(PROTECTED_NEAR, (place for place in open_ones if _round_trip(place) < inf), key=_round_trip)
    useful = nlargest(PROTECTED_USEFUL, (place for place in open_ones if _used_at(place) > -inf), key=_used_at)
    others = [place for place in open_ones if place not in near and place not in useful]
    young = _by_age(others)[len(others) // 2 :]
    crowd = Crowd(place.ip for place in inbound)
    greediest = max((crowd.greed(place.ip) for place in young), default=0.0)
    if crowd.greed(newcomer_ip, 1) > greediest:
        return None
    return max((place for place in young if crowd.greed(place.ip) == greediest), key=lambda place: place.entered_at)


def _round_trip(place: ConnectionPlace) -> float:
    least = None if place.streams is None else place.streams.round_trips.least
    return inf if least is None else least


def _used_at(place: ConnectionPlace) -> float:
    used_at = -inf if place.streams is None else place.streams.used_at
    return used_at if used_at > place.entered_at + USEFUL_AFTER_SECONDS else -inf


def _by_age(places: Iterable[ConnectionPlace]) -> list[ConnectionPlace]:
    """The oldest place of each network, oldest first, then the second oldest of each, and so on."""
    before: Counter[str] = Counter()
    ranked: list[tuple[int, ConnectionPlace]] = []
    for place in sorted(places, key=lambda place: place.entered_at):
        ranked.append((before[wide_network_of(place.ip)], place))
        before[wide_network_of(place.ip)] += 1
    return [place for _, place in sorted(ranked, key=lambda entry: entry[0])]


class NoPlaceError(Exception):
    """No place is left for a connection."""


class ConnectionAdmission:
    """Counts handshakes and connections, and chooses what a newcomer replaces."""

    def __init__(self, limits: ConnectionLimits | None = None) -> None:
        self.limits = limits or ConnectionLimits()
        self._handshakes: list[Handshake] = []
        self._places: dict[ConnectionPlace, None] = {}
        self.refused: Counter[str] = Counter()  # by reason

    @property
    def connections(self) -> int:
        """Number of established connections."""
        return len(self._places)

    @property
    def handshakes(self) -> int:
        """Number of handshakes."""
        return len(self._handshakes)

    def begin_handshake(self, newcomer: Handshake) -> bool:
        """Count a socket of another node. It may cut another one; False if it gets no place now or as a connection."""
        try:
            self._replaced_by(newcomer.ip, is_chosen=False)
        except NoPlaceError:
            return False  # before the handshake, which costs time
        if len(self._handshakes) >= self.limits.handshakes:
            silent = longest_silent(self._handshakes, newcomer.ip)
            if silent is None:
                self.refused["handshakes"] += 1
                return False
            self._handshakes.remove(silent)
            silent.cut()
        self._handshakes.append(newcomer)
        return True

    def end_handshake(self, handshake: Handshake) -> None:
        """End a handshake, successful or not. One that was cut is ended already."""
        if handshake in self._handshakes:
            self._handshakes.remove(handshake)

    def enter(self, newcomer: ConnectionPlace) -> ConnectionPlace | None:
        """Count a connection. Returns the one that it replaces, which must be closed. Raises NoPlaceError."""
        if sum(place.identity == newcomer.identity for place in self._places) >= self.limits.connections_of_peer:
            raise self._refusal("connections of peer")
        replaced = self._replaced_by(newcomer.ip, is_chosen=newcomer.is_chosen)
        if replaced is not None:
            self.leave(replaced)
        self._places[newcomer] = None
        return replaced

    def opened(self, place: ConnectionPlace, streams: Streams) -> None:
        """Note that a connection is open: from now on a newcomer may replace it."""
        place.streams = streams

    def leave(self, place: ConnectionPlace) -> None:
        """Remove a connection that was closed. One that was replaced is removed already."""
        self._places.pop(place, None)

    def _replaced_by(self, newcomer_ip: str, *, is_chosen: bool) -> ConnectionPlace | None:
        """The connection that a newcomer replaces, None if a place is free. Raises NoPlaceError."""
        same = [place for place in self._places if place.is_chosen is is_chosen]
        half = self.limits.connections // 2
        if len(same) < (half if is_chosen else self.limits.connections - half):
            return None
        replaced = None if is_chosen else least_needed(same, newcomer_ip)
        if replaced is None:
            raise self._refusal("connections")
        return replaced

    def _refusal(self, reason: str) -> NoPlaceError:
        self.refused[reason] += 1
        return NoPlaceError(f"no place is left ({reason})")


DIAL_WINDOW_SECONDS = 60.0
WORKED_SECONDS = 3600.0
MAX_TARGETS = 4096
MAX_TRUSTED = 1024


class DialBudget:
    """Limits the dials that have not succeeded, for each host (IPv6: /64) and each network (/24, /48).

    So other nodes cannot aim this one at a victim.

    Free are dials to an address from the owner, and to one that worked recently. Times are those of one monotonic
    clock.
    """

    def __init__(self, limits: ConnectionLimits | None = None) -> None:
        self._limits = limits or ConnectionLimits()
        # by host and by network: dials under way and failed ones; the one that was dialled last is the last one
        self._dials: dict[str, list[tuple[float, PeerAddress]]] = {}
        self._free_until: dict[PeerAddress, float] = {}

    def take(self, address: PeerAddress, now: float) -> bool:
        """Count one dial if its host may be dialled."""
        if self._is_free(address, now):
            return True
        recent: dict[str, list[tuple[float, PeerAddress]]] = {}
        for target, most in self._targets(address.host).items():
            recent[target] = [dial for dial in self._dials.get(target, ()) if now - dial[0] < DIAL_WINDOW_SECONDS]
            if len(recent[target]) >= most or not (target in self._dials or self._has_room(now)):
                return False
        for target, dials in recent.items():
            self._dials.pop(target, None)
            self._dials[target] = [*dials, (now, address)]
        return True

    def trust(self, address: PeerAddress) -> None:
        """Note an address from the owner."""
        self._free(address, inf)

    def note_worked(self, address: PeerAddress, now: float) -> None:
        """Return the dials that led to a connection."""
        for target in self._targets(address.host):
            left = [dial for dial in self._dials.pop(target, ()) if dial[1] != address]
            if left:
                self._dials[target] = left
        self._free(address, max(now + WORKED_SECONDS, self._free_until.get(address, -inf)))

    def note_failed(self, address: PeerAddress) -> None:
        """Count the next dials to an address that worked before."""
        if self._free_until.get(address, inf) < inf:
            del self._free_until[address]

    def _targets(self, host: str) -> dict[str, int]:
        """The networks of a host, with the most dials to each; a name has only one."""
        limits = self._limits
        return {network_of(host, 24, 48): limits.dials_of_network, network_of(host, 32): limits.dials_of_host}

    def _is_free(self, address: PeerAddress, now: float) -> bool:
        is_here = self._limits.is_loopback_free and scope_of(address.host) is Scope.COMPUTER
        return is_here or now < self._free_until.get(address, -inf)

    def _free(self, address: PeerAddress, until: float) -> None:
        self._free_until.pop(address, None)
        self._free_until[address] = until
        if len(self._free_until) > MAX_TRUSTED:
            del self._free_until[next(iter(self._free_until))]

    def _has_room(self, now: float) -> bool:
        """Whether one more target can be counted. If not, it is not dialled: otherwise its count could be lost."""
        while self._dials:
            oldest = next(iter(self._dials))
            if now - self._dials[oldest][-1][0] < DIAL_WINDOW_SECONDS:
                break
            del self._dials[oldest]
        return len(self._dials) < MAX_TARGETS - 1  # both of a dial
