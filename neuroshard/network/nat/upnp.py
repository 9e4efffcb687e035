"""UPnP: the client of a router that supports it. The library's calls block, so each runs in a thread with a timeout."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random, SystemRandom
from typing import Any, TypeVar, cast

import anyio
import miniupnpc
from anyio import to_thread

from neuroshard.network.nat.router import Lease, NoRouterError, RouterRefusedError, outbound_host

CALL_SECONDS = 15.0  # for the router's answer
CLOSE_SECONDS = 5.0  # how long a cancelled caller waits for the thread: a search without an answer takes 4 s
DISCOVERY_MILLISECONDS = 1000  # for each of the four device types; the library's minimum
DESCRIPTION = "NeuroShard"
OTHER_PORTS = 3  # to try when the preferred port is taken at the router
PORT_RANGE = (20_000, 60_000)
_PROTOCOL = "TCP"
_ONLY_PERMANENT = "OnlyPermanentLeasesSupported"
_Answer = TypeVar("_Answer")


class UpnpRouter:
    """A router of this network that was found by `find_upnp_router`."""

    def __init__(self, gateway: Any, host: str, random: Random | None = None) -> None:
        self._gateway = gateway
        self._random = random or SystemRandom()
        self._local_host = host

    @property
    def local_host(self) -> str:
        return self._local_host

    async def external_host(self) -> str:
        """The router's external address. Raises RouterRefusedError."""
        return str(await answered_in_time(lambda: _asked(self._gateway.externalipaddress)))

    async def open(self, inner: int, suggested_port: int, seconds: int) -> Lease:
        """Map a port to this computer, without expiry if the router has no leases. Raises RouterRefusedError."""
        return await answered_in_time(partial(self._open, inner, suggested_port, seconds))

    async def keeps(self, lease: Lease) -> bool:
        """Whether the router still maps the port to this computer."""
        return await answered_in_time(partial(self._target, lease.outer)) == (self._local_host, lease.inner)

    async def close(self, lease: Lease) -> None:
        """Delete a mapping of this computer. Raises RouterRefusedError."""
        await answered_in_time(partial(self._close, lease), CLOSE_SECONDS)

    def _open(self, inner: int, suggested_port: int, seconds: int) -> Lease:
        for port in (suggested_port, *(self._random.randint(*PORT_RANGE) for _ in range(OTHER_PORTS))):
            if self._target(port) in {None, (self._local_host, inner)}:
                self._add(port, inner, seconds)
                return Lease(inner, port, float(seconds))
        raise RouterRefusedError("Other computers use these ports of the router.")

    def _close(self, lease: Lease) -> None:
        if self._target(lease.outer) in {None, (self._local_host, lease.inner)}:
            _asked(lambda: self._gateway.deleteportmapping(lease.outer, _PROTOCOL))

    def _target(self, port: int) -> tuple[str, int] | None:
        """The computer and port to which the router maps a port."""
        mapping: Any = _asked(lambda: self._gateway.getspecificportmapping(port, _PROTOCOL))
        return None if mapping is None else (str(mapping[0]), int(mapping[1]))

    def _add(self, outer: int, inner: int, seconds: int) -> None:
        try:
            self._add_for(outer, inner, seconds)
        except RouterRefusedError as error:
            if _ONLY_PERMANENT not in error.message:
                raise
            self._add_for(outer, inner, 0)

    def _add_for(self, outer: int, inner: int, seconds: int) -> None:
        added = _asked(
            lambda: self._gateway.addportmapping(outer, _PROTOCOL, self._local_host, inner, DESCRIPTION, "", seconds)
        )
        if not added:
            raise RouterRefusedError(f"The router does not open port {outer}.")


async def find_upnp_router() -> UpnpRouter:
    """Find the router of this network. Raises NoRouterError if none answers within seconds."""
    return await answered_in_time(_found)


def _found() -> UpnpRouter:
    host = outbound_host()
    if host is None:
        raise NoRouterError("This computer has no route to the internet.")
    gateway: Any = cast("Any", miniupnpc).UPnP(multicastif=host, discoverdelay=DISCOVERY_MILLISECONDS)
    try:
        _asked(gateway.discover)
        _asked(gateway.selectigd)
    except RouterRefusedError as error:
        raise NoRouterError("No router of this network opens ports by UPnP.") from error
    return UpnpRouter(gateway, str(gateway.lanaddr))


def _asked(call: Callable[[], _Answer]) -> _Answer:
    try:
        return call()
    except Exception as error:
        if type(error) is Exception:  # miniupnpc has no exception class of its own
            raise RouterRefusedError(f"The router refuses: {str(error)[:200]}.") from error
        raise


async def answered_in_time(call: Callable[[], _Answer], seconds: float = CALL_SECONDS) -> _Answer:
    """The result of a blocking router call. A cancelled caller waits CLOSE_SECONDS at most and then abandons the
    thread.

    Raises RouterRefusedError, also on a timeout.
    """

    def tried() -> _Answer | RouterRefusedError:
        try:
            return call()
        except RouterRefusedError as error:
            return error

    answer: _Answer | RouterRefusedError = RouterRefusedError(f"The router does not answer within {seconds:g} s.")
    async with anyio.create_task_group() as tasks:
        with anyio.CancelScope(shield=True) as patience:
            tasks.start_soon(_limit, patience, seconds)
            answer = await to_thread.run_sync(tried, abandon_on_cancel=True)
        tasks.cancel_scope.cancel()
    if isinstance(answer, RouterRefusedError):
        raise answer
    return answer


async def _limit(patience: anyio.CancelScope, seconds: float) -> None:
    try:
        await anyio.sleep(seconds)
        patience.cancel()
    finally:
        patience.deadline = min(patience.deadline, anyio.current_time() + CLOSE_SECONDS)
