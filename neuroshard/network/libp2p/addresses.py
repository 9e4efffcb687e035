"""Multiaddrs: the addresses of nodes, their scope, and the addresses of this computer. Names are not resolved here."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

import psutil

from neuroshard.config.multiaddr import checked_multiaddr
from neuroshard.errors import UsageError
from neuroshard.identity import public_key_of
from neuroshard.network.crowds import final_ip
from neuroshard.types import NodeId


@dataclass(frozen=True)
class PeerAddress:
    """A node and one address of it, direct or through a relay."""

    peer: NodeId
    host: str  # IP address or name; the relay's if there is one
    port: int
    relay: NodeId | None = None
    text: str = ""

    @property
    def is_relayed(self) -> bool:
        return self.relay is not None

    def of_relay(self) -> PeerAddress:
        """The relay's own address. Raises ValueError for a direct address."""
        if self.relay is None:
            raise ValueError(f"{self.text} is not an address through a relay")
        return PeerAddress(self.relay, self.host, self.port, None, self.text.partition("/p2p-circuit")[0])


def parse_address(text: str) -> PeerAddress:
    """Parse a multiaddr that ends with /p2p/<node id>. Raises UsageError that says what is wrong."""
    try:
        parts = checked_multiaddr(text).split("/")  # "", protocol, host, "tcp", port, "p2p", node id, ...
        nodes = [NodeId(part) for part in (parts[6], *parts[9:])]
        for node in nodes:
            public_key_of(node)
    except ValueError as error:
        raise UsageError(f"An address cannot be used: {error}.") from None
    return PeerAddress(nodes[-1], parts[2], int(parts[4]), nodes[0] if len(nodes) > 1 else None, text)


class Scope(IntEnum):
    """The area in which an address means the same place."""

    WORLD = 0
    NETWORK = 1  # a private network, or the shared one of a provider
    COMPUTER = 2  # this computer, or unknown, as for a name
    NOWHERE = 3  # link-local (with the metadata service of clouds), multicast, reserved


_PRIVATE = tuple(
    ip_network(text)
    for text in (
        "10.0.0.0/8",
        "172.16.0.0/12",
        "192.168.0.0/16",
        "100.64.0.0/10",
        "192.0.0.0/24",
        "198.18.0.0/15",
        "fc00::/7",
        "fec0::/10",
    )
)


def scope_of(host: str) -> Scope:
    """The scope of an IP address or name."""
    try:
        ip = final_ip(ip_address(host))
    except ValueError:
        return Scope.COMPUTER
    if ip.is_loopback:
        return Scope.COMPUTER
    is_this_network = isinstance(ip, IPv4Address) and int(ip) >> 24 == 0
    if ip.is_unspecified or ip.is_link_local or ip.is_multicast or ip.is_reserved or is_this_network:
        return Scope.NOWHERE
    return Scope.NETWORK if any(ip in network for network in _PRIVATE) else Scope.WORLD


def may_be_reported(host: str, teller: str | None) -> bool:
    """Whether the word of a peer at the IP address `teller` (None: unknown) may make this node dial `host`.

    | host | reported from far away | from a private network | from this computer |
    | --- | --- | --- | --- |
    | public | yes | yes | yes |
    | private or shared | no | yes | yes |
    | this computer, a name | no | no | yes |
    | link-local, multicast, reserved | no | no | no |
    """
    of_teller = Scope.WORLD if teller is None else scope_of(teller)
    return scope_of(host) <= (Scope.NETWORK if of_teller is Scope.NOWHERE else of_teller)


def is_near(ip: str) -> bool:
    """Whether an address belongs to this computer or to a network that it is directly in."""
    try:
        address = ip_address(ip)
    except ValueError:
        return True  # unknown, as through a relay
    if address.is_loopback or address.is_link_local:
        return True
    return any(address in network for network in _interface_networks())


def _interface_networks() -> Iterator[IPv4Network | IPv6Network]:
    for addresses in psutil.net_if_addrs().values():
        for entry in addresses:
            if entry.family in {socket.AF_INET, socket.AF_INET6} and entry.netmask:
                with suppress(ValueError):
                    netmask = entry.netmask if entry.family == socket.AF_INET else _prefix_length(entry.netmask)
                    yield ip_network(f"{entry.address.partition('%')[0]}/{netmask}", strict=False)


def _prefix_length(netmask: str) -> int:
    return int(ip_address(netmask)).bit_count()


def reachable_hosts(host: str) -> tuple[str, ...]:
    """IP addresses at which peers may reach a socket bound to `host`, the most useful ones first."""
    try:
        bound = ip_address(host)
    except ValueError:
        return ()
    if not bound.is_unspecified:
        return (str(bound),)
    return _usable(_interface_ips(), bound.version)


def _interface_ips() -> Iterable[str]:
    for addresses in psutil.net_if_addrs().values():
        for address in addresses:
            if address.family in {socket.AF_INET, socket.AF_INET6}:
                yield address.address


def _usable(candidates: Iterable[str], version: int) -> tuple[str, ...]:
    ips: list[IPv4Address | IPv6Address] = []
    for text in candidates:
        ip = ip_address(text.partition("%")[0])
        # a link-local address means nothing without the interface it belongs to
        if ip.version == version and not ip.is_link_local and ip not in ips:
            ips.append(ip)
    outside = [ip for ip in ips if not ip.is_loopback]
    return tuple(str(ip) for ip in sorted(outside or ips, key=lambda ip: (ip.is_private, int(ip))))
