"""Networks of addresses: a full table gives a newcomer the place of the network that has most of them.

Names cost nothing, so places belong to networks: /24 and /64, and, with a smaller weight, /16 and /48. This file counts
and chooses; it opens no socket.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import Protocol, TypeVar

WIDE_SHARE = 4  # a /16 or /48 may hold this many times what a /24 or /64 holds before it is as greedy
_TRANSLATED = ip_network("64:ff9b::/96")  # IPv4 addresses behind a translator (RFC 6052)


def final_ip(ip: IPv4Address | IPv6Address) -> IPv4Address | IPv6Address:
    """The IPv4 address to which packets for an IPv6 address go in the end, or the address itself."""
    if isinstance(ip, IPv4Address):
        return ip
    return ip.ipv4_mapped or ip.sixtofour or (IPv4Address(int(ip) & 0xFFFFFFFF) if ip in _TRANSLATED else ip)


@lru_cache(maxsize=4096)
def network_of(host: str, bits_of_ipv4: int = 24, bits_of_ipv6: int = 64) -> str:
    """The network of an IP address. A name, or "" for all circuits through relays, is a network of its own."""
    try:
        ip = final_ip(ip_address(host))
    except ValueError:
        return host
    return str(ip_network((ip, bits_of_ipv4 if ip.version == 4 else bits_of_ipv6), strict=False))


def wide_network_of(ip: str) -> str:
    """The /16 or /48 of an IP address."""
    return network_of(ip, 16, 48)


class Crowd:
    """Totals of each host and each network: places, or bytes."""

    def __init__(self, ips: Iterable[str] = ()) -> None:
        self._hosts: Counter[str] = Counter()
        self._narrow: Counter[str] = Counter()
        self._wide: Counter[str] = Counter()
        for ip in ips:
            self.add(ip)

    def add(self, ip: str, amount: int = 1) -> None:
        """Count more of an address."""
        self._hosts[network_of(ip, 32)] += amount
        self._narrow[network_of(ip)] += amount
        self._wide[wide_network_of(ip)] += amount

    def of_host(self, ip: str) -> int:
        """The total of the host of an address (IPv6: the /64)."""
        return self._hosts[network_of(ip, 32)]

    def greed(self, ip: str, more: int = 0) -> float:
        """The total of the greedier network of an address, with `more` of its own."""
        return max(self._narrow[network_of(ip)] + more, (self._wide[wide_network_of(ip)] + more) / WIDE_SHARE)

    def is_greedy_beside(self, ip: str, newcomer_ip: str, more: int) -> bool:
        """Whether an address holds as much as a newcomer would with `more`; in one network their hosts count."""
        if network_of(ip) == network_of(newcomer_ip):
            return self.of_host(newcomer_ip) + more <= self.of_host(ip)
        return self.greed(newcomer_ip, more) <= self.greed(ip)


class Occupant(Protocol):
    """A socket that holds a place."""

    @property
    def ip(self) -> str:
        """IP address of the other side, "" through a relay."""
        ...

    @property
    def heard_at(self) -> float:
        """When it was used last."""
        ...


OccupantT = TypeVar("OccupantT", bound=Occupant)


def longest_silent(occupants: Sequence[OccupantT], newcomer_ip: str) -> OccupantT | None:
    """The socket that a newcomer replaces; None if no network is as greedy as the newcomer's would become."""
    crowd = Crowd(occupant.ip for occupant in occupants)
    greediest = max(crowd.greed(occupant.ip) for occupant in occupants)
    if crowd.greed(newcomer_ip, 1) > greediest:
        return None
    return min((one for one in occupants if crowd.greed(one.ip) == greediest), key=lambda one: one.heard_at)
