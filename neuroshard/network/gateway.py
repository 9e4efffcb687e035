"""Which router this computer's way to the internet begins with. Nothing is sent to find out, and no program is run."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterable
from contextlib import suppress
from ipaddress import IPv4Address, IPv4Interface
from pathlib import Path

import psutil

ROUTES = Path("/proc/net/route")  # Linux: its IPv4 routes
SOMEWHERE = "192.0.2.1"  # in the internet, for documentation: nobody has it
_UP, _GATEWAY = 0x1, 0x2


def default_gateway() -> str | None:
    """IPv4 address of the router towards the internet; None where there is none.

    Linux tells its routes in a file. Elsewhere the first address of the network that leads outside is taken for the
    router's, as it is in nearly every home; where it is not, nobody answers there, and UPnP finds the router.
    """
    try:
        return gateway_in(ROUTES.read_text(encoding="ascii"))
    except OSError:
        host = host_towards_outside()
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
    """The first address of the network in which this computer has the address `host`; None when that is its own."""
    for interface in interfaces:
        if str(interface.ip) == host and interface.network.prefixlen < 31:
            first = str(interface.network.network_address + 1)
            return first if first != host else None
    return None


def host_towards_outside() -> str | None:
    """This computer's IPv4 address on its way to the internet; None where there is no way."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((SOMEWHERE, 9))  # of a datagram socket: it only looks the way up
        except OSError:
            return None
        return str(probe.getsockname()[0])


def _interfaces() -> Iterable[IPv4Interface]:
    for entries in psutil.net_if_addrs().values():
        for entry in entries:
            if entry.family == socket.AF_INET and entry.netmask:
                with suppress(ValueError):
                    yield IPv4Interface(f"{entry.address}/{entry.netmask}")
