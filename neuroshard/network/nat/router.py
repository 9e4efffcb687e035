"""The home router of this computer: its address, the port leases, and the interface of both router protocols.

The search for the router's address sends no packet and runs no program.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Interface
from pathlib import Path
from typing import Protocol, TypeAlias

import psutil

from neuroshard.errors import NeuroShardError

LEASE_SECONDS = 3600  # requested lifetime


class RouterRefusedError(NeuroShardError):
    """The router refused a request, or did not answer it in time."""


class NoRouterError(RouterRefusedError):
    """No router was found that accepts requests."""


@dataclass(frozen=True)
class Lease:
    """A TCP port of the router that is mapped to one of this computer, for `seconds` unless it is renewed."""

    inner: int
    outer: int
    seconds: float


class Router(Protocol):
    """A router. Its calls end within seconds and raise RouterRefusedError."""

    @property
    def local_host(self) -> str:
        """This computer's address as the router sees it."""
        ...

    async def external_host(self) -> str:
        """The router's external address as it reports it, unverified."""
        ...

    async def open(self, inner: int, suggested_port: int, seconds: int) -> Lease:
        """Map a port to this computer, if possible the preferred outer one; also renews a lease."""
        ...

    async def keeps(self, lease: Lease) -> bool:
        """Whether the router still keeps a lease, if it can be asked for that."""
        ...

    async def close(self, lease: Lease) -> None:
        """Return a port."""
        ...


RouterFinder: TypeAlias = Callable[[], Awaitable[Router]]
"""Finds the router of this network. Takes seconds and raises NoRouterError."""


ROUTES = Path("/proc/net/route")  # Linux: its IPv4 routes
SOMEWHERE = "192.0.2.1"  # reserved for documentation, in use by no host
_UP, _GATEWAY = 0x1, 0x2


def default_gateway() -> str | None:
    """IPv4 address of the router towards the internet; None if there is none.

    Linux lists its routes in a file. On other systems, the first address of the outgoing network is assumed to be
    the router's, as in nearly every home. If that is wrong, the address does not answer, and UPnP finds the router.
    """
    try:
        return gateway_in(ROUTES.read_text(encoding="ascii"))
    except OSError:
        host = outbound_host()
        return None if host is None else first_host_of_network(host, _interfaces())


def gateway_in(routes: str, byte_order: str = sys.byteorder) -> str | None:
    """The gateway of the best default route in the text of /proc/net/route."""
    best: tuple[int, str] | None = None
    for line in routes.splitlines()[1:]:
        fields = line.split()
        if len(fields) < 8 or fields[1] != "00000000" or fields[7] != "00000000":
            continue
        with suppress(ValueError):
            flags, metric = int(fields[3], 16), int(fields[6])
            gateway = IPv4Address(int(fields[2], 16).to_bytes(4, "little" if byte_order == "little" else "big"))
            if flags & _UP and flags & _GATEWAY and (best is None or metric < best[0]):
                best = metric, str(gateway)
    return None if best is None else best[1]


def first_host_of_network(host: str, interfaces: Iterable[IPv4Interface]) -> str | None:
    """The first address of the network that contains `host`; None if it is `host` itself."""
    for interface in interfaces:
        if str(interface.ip) == host and interface.network.prefixlen < 31:
            first = str(interface.network.network_address + 1)
            return first if first != host else None
    return None


def outbound_host() -> str | None:
    """This computer's IPv4 address on the route to the internet; None without a route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((SOMEWHERE, 9))  # on a datagram socket this only looks up the route
        except OSError:
            return None
        return str(probe.getsockname()[0])


def _interfaces() -> Iterable[IPv4Interface]:
    for entries in psutil.net_if_addrs().values():
        for entry in entries:
            if entry.family == socket.AF_INET and entry.netmask:
                with suppress(ValueError):
                    yield IPv4Interface(f"{entry.address}/{entry.netmask}")
