"""External addresses: the ports of this node that a router maps, and their addresses on the internet.

The network records its listening ports here, and the port mapping records the external address of each one.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from ipaddress import AddressValueError, IPv4Address, IPv4Network
from typing import TypeAlias

ExternalEndpoint: TypeAlias = tuple[str, int]
"""IPv4 address and TCP port."""
_CARRIER = IPv4Network("100.64.0.0/10")  # RFC 6598: between a provider's router and its customers


class ExternalAddresses:
    """External addresses of one node over all its networks. Used only in the event loop of the node's tasks."""

    def __init__(self) -> None:
        self._hosts: Callable[[], Sequence[str]] = tuple
        self._ports: tuple[int, ...] = ()
        self._outside: dict[int, ExternalEndpoint] = {}

    @contextmanager
    def listening(self, hosts: Callable[[], Sequence[str]], ports: Iterable[int]) -> Generator[None]:
        """Register, for the length of the block, the TCP ports a network listens at, most important first, on
        `hosts()`.
        """
        self._hosts, self._ports = hosts, tuple(ports)
        try:
            yield
        finally:
            self._hosts, self._ports, self._outside = tuple, (), {}

    def hosts(self) -> tuple[str, ...]:
        """This computer's IP addresses at which the network listens now."""
        return tuple(self._hosts())

    def ports(self) -> tuple[int, ...]:
        """The ports at which the network listens now."""
        return self._ports

    def update(self, outside: Mapping[int, ExternalEndpoint]) -> None:
        """Replace the mapped ports: exactly these are reachable from outside, each at its endpoint."""
        self._outside = {port: endpoint for port, endpoint in outside.items() if port in self._ports}

    def of(self, port: int) -> ExternalEndpoint | None:
        """The external endpoint of one of this node's ports; None if it has none."""
        return self._outside.get(port)


def is_behind_router(hosts: Iterable[str]) -> bool:
    """Whether a node with these IP addresses may be behind a router: all its IPv4 addresses are private."""
    four = [IPv4Address(host) for host in hosts if ":" not in host]
    local = [host for host in four if host.is_private and not host.is_loopback]
    return bool(local) and not any(is_public_ipv4(str(host)) for host in four)


def is_public_ipv4(host: str) -> bool:
    """Whether an address can be dialled from the whole internet."""
    address = _ipv4(host)
    return address is not None and address.is_global and not address.is_multicast and not address.is_reserved


def is_inner_ipv4(host: str) -> bool:
    """Whether a router of a home or of a provider assigns such an address to the computers behind it."""
    address = _ipv4(host)
    if address is None or address.is_unspecified or address.is_loopback or address.is_link_local:
        return False
    return address in _CARRIER or (address.is_private and not address.is_reserved)


def _ipv4(host: str) -> IPv4Address | None:
    try:
        return IPv4Address(host)
    except AddressValueError:
        return None
