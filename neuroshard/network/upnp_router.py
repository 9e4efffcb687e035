"""A home router that opens ports when asked by UPnP. Calls block; whoever calls does so in a worker thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import miniupnpc

from neuroshard.network.port_mapping import NoRouterError, RouterRefusedError

DISCOVERY_MILLISECONDS = 2000
DESCRIPTION = "NeuroShard"
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
    gateway: Any = cast("Any", miniupnpc).UPnP()
    gateway.discoverdelay = DISCOVERY_MILLISECONDS
    try:
        found = _asked(gateway.discover)
        if found:
            _asked(gateway.selectigd)
    except RouterRefusedError as error:
        raise NoRouterError(f"No router that opens ports was found: {error.message}") from error
    if not found:
        raise NoRouterError("No router of this network opens ports by UPnP.")
    return UpnpRouter(gateway, str(gateway.lanaddr))


def _asked(call: Callable[[], _Answer]) -> _Answer:
    try:
        return call()
    except Exception as error:
        if type(error) is Exception:  # miniupnpc has no error class of its own
            raise RouterRefusedError(f"The router refuses: {str(error)[:200]}.") from error
        raise
