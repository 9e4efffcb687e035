"""Multiaddrs: where a node can be dialled, and who must answer there. Text in, values out; nothing is resolved here."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address

import psutil

from neuroshard.config.multiaddr import checked_multiaddr
from neuroshard.errors import UsageError
from neuroshard.identity import public_key_of
from neuroshard.types import NodeId


@dataclass(frozen=True)
class PeerAddress:
    """A node and one way to it: directly, or through a relay."""

    peer: NodeId
    host: str  # IP address or name; of the relay when there is one
    port: int
    relay: NodeId | None = None
    text: str = ""

    @property
    def is_relayed(self) -> bool:
        """Whether the way leads through a relay."""
        return self.relay is not None


def parse_address(text: str) -> PeerAddress:
    """Read a multiaddr that ends with /p2p/<node id>. Raises UsageError that says what is wrong."""
    try:
        parts = checked_multiaddr(text).split("/")  # "", protocol, host, "tcp", port, "p2p", node id, ...
        nodes = [NodeId(part) for part in (parts[6], *parts[9:])]
        for node in nodes:
            public_key_of(node)
    except ValueError as error:
        raise UsageError(f"An address cannot be used: {error}.") from None
    return PeerAddress(nodes[-1], parts[2], int(parts[4]), nodes[0] if len(nodes) > 1 else None, text)


def is_loopback_host(host: str) -> bool:
    """Whether what listens there is reachable from this computer only."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def reachable_hosts(host: str) -> tuple[str, ...]:
    """IP addresses under which others may reach a socket bound to `host`, the most useful ones first."""
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
