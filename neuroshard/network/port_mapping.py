"""A node behind a home router asks it for a port, so that others can dial it. How the router is spoken to is elsewhere.

The port is leased, asked for again long before the lease ends, and given back when the network ends.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from ipaddress import AddressValueError, IPv4Address
from random import Random, SystemRandom
from typing import Protocol, TypeAlias, TypeVar

import anyio
from anyio import to_thread

from neuroshard.errors import NeuroShardError
from neuroshard.network.nearby_places import direct_endpoints
from neuroshard.network.transport import Network
from neuroshard.types import NodeId

log = logging.getLogger(__name__)

LEASE_SECONDS = 3600
RENEW_SECONDS = 1200.0
LOOK_SECONDS = 30.0  # between looks whether this computer is still where the router passes the port on to
RETRY_SECONDS = 900.0
CALL_SECONDS = 15.0  # for the router to answer
CLOSE_SECONDS = 5.0  # a search takes 4 s where no router answers
OTHER_PORTS = 3  # that are tried when the node's own number is taken at the router
PORT_RANGE = (20_000, 60_000)


class RouterRefusedError(NeuroShardError):
    """The router does not do what it was asked for."""


class NoRouterError(RouterRefusedError):
    """No router that can be asked."""


class Router(Protocol):
    """A router; its calls block for as long as it takes to answer, and raise RouterRefusedError."""

    local_host: str  # this computer's address as the router sees it

    def external_host(self) -> str:
        """The router's own address outside."""
        ...

    def is_taken(self, port: int) -> bool:
        """Whether the port is passed on to another computer."""
        ...

    def open(self, external_port: int, internal_port: int, lease_seconds: int) -> None:
        """Pass a port on to this computer."""
        ...

    def close(self, external_port: int) -> None:
        """Take a port back."""
        ...


_Answer = TypeVar("_Answer")
RouterFinder: TypeAlias = Callable[[], Router]
"""Finds the router of this network; blocks for seconds and raises NoRouterError."""


def is_behind_router(addresses: Iterable[str]) -> bool:
    """Whether a node may be behind a router: it has IPv4 addresses of local networks only."""
    hosts = [host for host, _ in direct_endpoints(addresses) if ":" not in host]
    local = [host for host in hosts if IPv4Address(host).is_private and not IPv4Address(host).is_loopback]
    return bool(local) and not any(map(is_public_ipv4, hosts))


def is_public_ipv4(host: str) -> bool:
    """Whether everybody in the internet can dial an address."""
    try:
        address = IPv4Address(host)
    except AddressValueError:
        return False
    return address.is_global and not address.is_multicast and not address.is_reserved


@dataclass
class PortMapping:
    """Attached to a node's networking."""

    node_id: NodeId
    find_router: RouterFinder
    random: Random = field(default_factory=SystemRandom)
    _address: str | None = None
    _has_complained: bool = False

    def external_address(self) -> str | None:
        """The multiaddr that the router passes on to this node; None while there is none."""
        return self._address

    async def live(self, network: Network) -> None:
        """Hold a port as long as this network lives, where a router can be asked; what fails is tried again later."""
        while True:
            addresses = network.transport.addresses()
            if is_behind_router(addresses):
                try:
                    await self._hold(network)
                except RouterRefusedError as error:
                    self._complain(error)
            with anyio.move_on_after(RETRY_SECONDS):
                while network.transport.addresses() == addresses:
                    await anyio.sleep(LOOK_SECONDS)

    async def _hold(self, network: Network) -> None:
        """Hold a port until this node is dialled elsewhere. Raises RouterRefusedError when the router gives none."""
        router = await _asked(self.find_router)
        inner = self._inner_port(network, router)
        if inner is None:
            raise RouterRefusedError(f"The router passes ports on to {router.local_host}, where this node is not.")
        outer = await self._free_port(router, inner)
        try:
            while self._inner_port(network, router) == inner:
                await self._renew(router, outer, inner)
                with anyio.move_on_after(RENEW_SECONDS):
                    while self._inner_port(network, router) == inner:
                        await anyio.sleep(LOOK_SECONDS)
        finally:
            self._address = None
            with anyio.CancelScope(shield=True):
                await self._give_back(router, outer)

    @staticmethod
    def _inner_port(network: Network, router: Router) -> int | None:
        endpoints = direct_endpoints(network.transport.addresses())
        return next((port for host, port in endpoints if host == router.local_host), None)

    async def _free_port(self, router: Router, inner: int) -> int:
        """A port of the router that nobody else has; the node's own number where possible."""
        await self._checked_outside(router)
        for port in (inner, *(self.random.randint(*PORT_RANGE) for _ in range(OTHER_PORTS))):
            if not await _asked(partial(router.is_taken, port)):
                return port
        raise RouterRefusedError("The router's ports are taken by other computers.")

    async def _renew(self, router: Router, outer: int, inner: int) -> None:
        await _asked(partial(router.open, outer, inner, LEASE_SECONDS))
        address = f"/ip4/{await self._checked_outside(router)}/tcp/{outer}/p2p/{self.node_id}"
        if address != self._address:
            self._address, self._has_complained = address, False
            log.info("The router passes %s on to this node.", address)

    @staticmethod
    async def _checked_outside(router: Router) -> str:
        host = await _asked(router.external_host)
        if not is_public_ipv4(host):
            raise RouterRefusedError(f"The router is itself behind another one: its address is {host[:40]!r}.")
        return str(IPv4Address(host))

    @staticmethod
    async def _give_back(router: Router, port: int) -> None:
        try:
            await _asked(partial(router.close, port), CLOSE_SECONDS)
        except RouterRefusedError as error:
            log.debug("The router keeps port %d until its lease ends: %s", port, error)

    def _complain(self, error: RouterRefusedError) -> None:
        level = logging.DEBUG if self._has_complained else logging.INFO
        self._has_complained = True
        log.log(level, "No port of the router leads to this node: %s", error)


async def _asked(call: Callable[[], _Answer], seconds: float = CALL_SECONDS) -> _Answer:
    """What a router answers in time. Whoever cancels waits CLOSE_SECONDS at most; then the thread is left alone."""

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
