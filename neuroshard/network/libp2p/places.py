"""Who gets this node's dials, without sockets: they are counted by the host they lead to, since names cost nothing."""

from __future__ import annotations

from ipaddress import ip_address, ip_network
from math import inf

from neuroshard.network.libp2p.addresses import PeerAddress, Scope, final_ip, scope_of
from neuroshard.network.libp2p.peer_limits import ConnectionLimits

DIAL_WINDOW_SECONDS = 60.0
WORKED_SECONDS = 3600.0
MAX_TARGETS = 4096
MAX_TRUSTED = 1024


def network_of(host: str, bits_of_ipv4: int = 24, bits_of_ipv6: int = 64) -> str:
    """The network of an IP address; a name is a network of its own."""
    try:
        ip = final_ip(ip_address(host))
    except ValueError:
        return host
    return str(ip_network((ip, bits_of_ipv4 if ip.version == 4 else bits_of_ipv6), strict=False))


class DialBudget:
    """Limits the dials to each host (IPv6: /64) that have not succeeded, so that peers cannot aim this node at one.

    Free are dials to an address from the owner, and to one that worked recently. Times are those of one monotonic
    clock.
    """

    def __init__(self, limits: ConnectionLimits | None = None) -> None:
        self._limits = limits or ConnectionLimits()
        # by host: dials under way and failed ones; the host that was dialled last is the last one
        self._dials: dict[str, list[tuple[float, PeerAddress]]] = {}
        self._free_until: dict[PeerAddress, float] = {}

    def take(self, address: PeerAddress, now: float) -> bool:
        """Count one dial if its host may be dialled."""
        if self._is_free(address, now):
            return True
        target = network_of(address.host, 32)
        recent = [dial for dial in self._dials.get(target, ()) if now - dial[0] < DIAL_WINDOW_SECONDS]
        if len(recent) >= self._limits.dials_of_host or not (target in self._dials or self._has_room(now)):
            return False
        self._dials.pop(target, None)
        self._dials[target] = [*recent, (now, address)]
        return True

    def trust(self, address: PeerAddress) -> None:
        """Note an address from the owner."""
        self._free(address, inf)

    def note_worked(self, address: PeerAddress, now: float) -> None:
        """Return the dials that led to a connection."""
        target = network_of(address.host, 32)
        left = [dial for dial in self._dials.pop(target, ()) if dial[1] != address]
        if left:
            self._dials[target] = left
        self._free(address, max(now + WORKED_SECONDS, self._free_until.get(address, -inf)))

    def note_failed(self, address: PeerAddress) -> None:
        """Count the next dials to an address that worked before."""
        if self._free_until.get(address, inf) < inf:
            del self._free_until[address]

    def _is_free(self, address: PeerAddress, now: float) -> bool:
        is_here = self._limits.is_loopback_free and scope_of(address.host) is Scope.COMPUTER
        return is_here or now < self._free_until.get(address, -inf)

    def _free(self, address: PeerAddress, until: float) -> None:
        self._free_until.pop(address, None)
        self._free_until[address] = until
        if len(self._free_until) > MAX_TRUSTED:
            del self._free_until[next(iter(self._free_until))]

    def _has_room(self, now: float) -> bool:
        """Whether one more host can be counted. If not, it is not dialled: otherwise its count could be lost."""
        while self._dials:
            oldest = next(iter(self._dials))
            if now - self._dials[oldest][-1][0] < DIAL_WINDOW_SECONDS:
                break
            del self._dials[oldest]
        return len(self._dials) < MAX_TARGETS
