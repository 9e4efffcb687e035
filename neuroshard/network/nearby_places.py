"""Where this computer is on local networks, and the multicast sockets there."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import Protocol

import psutil
import trio

from neuroshard.network.nearby_records import IpNetwork

GROUP = "224.0.0.251"
PORT = 5353
MAX_INTERFACES = 8
_LINK_LOCAL_HOPS = 255  # RFC 6762, section 11
_LINUX_IP_MULTICAST_ALL = 49  # Python has no name for it


class _Entry(Protocol):
    """An address of an interface, as psutil tells it."""

    @property
    def family(self) -> int: ...
    @property
    def address(self) -> str: ...
    @property
    def netmask(self) -> str | None: ...


@dataclass(frozen=True)
class Interface:
    """A network interface with an IPv4 address that can send to many at once."""

    name: str
    host: str  # IPv4, over which it is used
    hosts: tuple[str, ...]  # all its addresses
    networks: tuple[IpNetwork, ...]


@dataclass(frozen=True)
class Place:
    """An interface and where this node is dialled from there."""

    interface: Interface
    hosts: tuple[str, ...]
    port: int


def lan_interfaces() -> tuple[Interface, ...]:
    """The interfaces of this computer that lead into local networks."""
    states = psutil.net_if_stats()
    found: list[Interface] = []
    for name, entries in sorted(psutil.net_if_addrs().items()):
        state = states.get(name)
        if state is None or not state.isup or not _is_of_many(state.flags):
            continue
        ips = tuple(_ips(entries))
        first = next((ip for ip, _ in ips if ip.version == 4), None)
        if first is not None:
            hosts, networks = tuple(str(ip) for ip, _ in ips), tuple(network for _, network in ips)
            found.append(Interface(name, str(first), hosts, networks))
    return tuple(found[:MAX_INTERFACES])


def places_of(addresses: Iterable[str], interfaces: Iterable[Interface]) -> tuple[Place, ...]:
    """Where a node with these multiaddrs is dialled from each interface; none where it is not."""
    endpoints = tuple(direct_endpoints(addresses))
    places: list[Place] = []
    for interface in interfaces:
        near = [(host, port) for host, port in endpoints if host in interface.hosts]
        if near:
            port = near[0][1]
            places.append(Place(interface, tuple(host for host, other in near if other == port), port))
    return tuple(places)


def direct_endpoints(addresses: Iterable[str]) -> Iterator[tuple[str, int]]:
    """IP address and port of the multiaddrs that lead to a node through nobody else."""
    for address in addresses:
        match address.split("/"):
            case ["", "ip4" | "ip6", host, "tcp", port, "p2p", _]:
                yield host, int(port)
            case _:
                continue


def open_socket(interface: Interface) -> trio.socket.SocketType:
    """A socket of the multicast group on one interface, shared with other programs. Raises OSError."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "SO_REUSEPORT"):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if sys.platform == "linux":  # else packets of the other interfaces come in as well
            sock.setsockopt(socket.IPPROTO_IP, _LINUX_IP_MULTICAST_ALL, 0)
        own = socket.inet_aton(interface.host)
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, _LINK_LOCAL_HOPS)
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_LOOP, 1)  # two nodes on one computer
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, own)
        sock.bind(("", PORT))
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, socket.inet_aton(GROUP) + own)
        return trio.socket.from_stdlib_socket(sock)
    except BaseException:
        sock.close()
        raise


def _is_of_many(flags: str) -> bool:
    """Whether an interface reaches many: no loopback and no tunnel. Windows tells no flags."""
    kinds = set(flags.split(","))
    return not flags or ({"multicast", "broadcast"} <= kinds and not kinds & {"loopback", "pointopoint"})


def _ips(entries: Iterable[_Entry]) -> Iterator[tuple[IPv4Address | IPv6Address, IpNetwork]]:
    """The addresses that mean something outside this computer, and the networks they are in."""
    for entry in entries:
        if entry.family not in {socket.AF_INET, socket.AF_INET6} or not entry.netmask:
            continue
        with suppress(ValueError):
            ip = ip_address(entry.address.partition("%")[0])
            if not ip.is_loopback and not (ip.version == 6 and ip.is_link_local):
                prefix = int(ip_address(entry.netmask)).bit_count()
                yield ip, ip_network(f"{ip}/{prefix}", strict=False)
