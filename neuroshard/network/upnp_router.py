"""A home router that opens ports when asked by UPnP. Calls block; whoever calls does so in a worker thread."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any, TypeVar, cast

import miniupnpc

from neuroshard.network.port_mapping import NoRouterError, RouterRefusedError

DISCOVERY_MILLISECONDS = 1000  # for each of the four kinds of device that may be one; less is not possible
DESCRIPTION = "NeuroShard"
SOMEWHERE = "192.0.2.1"  # in the internet, for documentation: nobody has it
_PROTOCOL = "TCP"
_ONLY_PERMANENT = "OnlyPermanentLeasesSupported"
_Answer = TypeVar("_Answer")


class UpnpRouter:
    """The router of this network that was found by `find_upnp_router`."""

    def __init__(self, gateway: Any, host: str) -> None:
        self._gateway = gateway
        self.local_host = host  # this computer's address as the router sees it

    def external_host(self) -> str:
        """The router's own address outside. Raises RouterRefusedError."""
        return str(_asked(self._gateway.externalipaddress))

    def is_taken(self, port: int) -> bool:
        """Whether the router passes this port on to another computer."""
        mapping = _asked(lambda: self._gateway.getspecificportmapping(port, _PROTOCOL))
        return mapping is not None and str(mapping[0]) != self.local_host

    def open(self, external_port: int, internal_port: int, lease_seconds: int) -> None:
        """Pass a port on to this computer; for ever where the router knows no leases. Raises RouterRefusedError."""
        try:
            self._add(external_port, internal_port, lease_seconds)
        except RouterRefusedError as error:
            if _ONLY_PERMANENT not in error.message:
                raise
            self._add(external_port, internal_port, 0)

    def close(self, external_port: int) -> None:
        """Take a port back. Raises RouterRefusedError."""
        _asked(lambda: self._gateway.deleteportmapping(external_port, _PROTOCOL))

    def _add(self, external_port: int, internal_port: int, lease_seconds: int) -> None:
        added = _asked(
            lambda: self._gateway.addportmapping(
                external_port, _PROTOCOL, self.local_host, internal_port, DESCRIPTION, "", lease_seconds
            )
        )
        if not added:
            raise RouterRefusedError(f"The router does not open port {external_port}.")


def find_upnp_router() -> UpnpRouter:
    """The router of this network. Raises NoRouterError when none answers within seconds."""
    gateway: Any = cast("Any", miniupnpc).UPnP(
        multicastif=_host_towards_outside(), discoverdelay=DISCOVERY_MILLISECONDS
    )
    try:
        _asked(gateway.discover)
        _asked(gateway.selectigd)
    except RouterRefusedError as error:
        raise NoRouterError("No router of this network opens ports by UPnP.") from error
    return UpnpRouter(gateway, str(gateway.lanaddr))


def _host_towards_outside() -> str:
    """This computer's address on its way to the internet; nothing is sent. Raises NoRouterError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((SOMEWHERE, 9))
        except OSError as error:
            raise NoRouterError(f"This computer has no way to the internet: {error.strerror}.") from error
        return str(probe.getsockname()[0])


def _asked(call: Callable[[], _Answer]) -> _Answer:
    try:
        return call()
    except Exception as error:
        if type(error) is Exception:  # miniupnpc has no error class of its own
            raise RouterRefusedError(f"The router refuses: {str(error)[:200]}.") from error
        raise
