"""Port mapping: a node behind a home router requests ports, so that peers can dial it.

The node renews each port after half of its lease time and returns all ports when the network ends.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from ipaddress import IPv4Address

import anyio

from neuroshard.network.nat.external_addresses import ExternalAddresses, is_behind_router, is_inner_ipv4, is_public_ipv4
from neuroshard.network.nat.nat_pmp import find_nat_pmp_router
from neuroshard.network.nat.router import LEASE_SECONDS, Lease, Router, RouterFinder, RouterRefusedError
from neuroshard.network.nat.upnp import find_upnp_router
from neuroshard.network.transport import Network

_LOG = logging.getLogger(__name__)

LOOK_SECONDS = 30.0  # between checks of this computer's own address
CHECK_SECONDS = 120.0  # between checks of the router's address and the leases
AGAIN_SECONDS = 60.0  # after a router that granted ports before has refused
RETRY_SECONDS = 900.0  # after no router granted a port
CLOSE_SECONDS = 5.0
ROUTER_FINDERS: tuple[RouterFinder, ...] = (find_nat_pmp_router, find_upnp_router)


class SecondRouterError(RouterRefusedError):
    """The router's external address is itself private: a mapped port would not be reachable from the internet."""


@dataclass(frozen=True)
class _Held:
    """A lease, and when it was last requested: by the monotonic clock, and by the wall clock, which includes sleep."""

    lease: Lease
    at: float
    calendar_at: float

    def is_due(self, now: float, calendar: float) -> bool:
        return max(now - self.at, calendar - self.calendar_at) >= self.lease.seconds / 2


@dataclass
class PortMapping:
    """Maps a node's ports at the router. `ports` names the listening ports and gets the external address of each."""

    ports: ExternalAddresses
    finders: Sequence[RouterFinder] = ROUTER_FINDERS
    calendar: Callable[[], float] = time.time
    _trouble: str = ""
    _has_complained: bool = False
    _held: dict[int, _Held] = field(default_factory=dict[int, _Held])  # by inner port

    def trouble(self) -> str:
        """One sentence for the owner on why peers cannot dial this node; empty if no reason is known."""
        return self._trouble

    async def live(self, _: Network) -> None:
        """Keep ports mapped while the network runs, if a router can be asked. Failures are tried again later."""
        try:
            while True:
                hosts = self.ports.hosts()
                was_of_use = is_behind_router(hosts) and await self._hold_any()
                with anyio.move_on_after(AGAIN_SECONDS if was_of_use else RETRY_SECONDS):
                    while self.ports.hosts() == hosts:
                        await anyio.sleep(LOOK_SECONDS)
        finally:
            self._trouble = ""

    async def _hold_any(self) -> bool:
        """Keep ports mapped at the first router that grants any, until it stops. Returns False if none does."""
        refusals: list[str] = []
        trouble = ""
        for find in self.finders:
            try:
                await self._hold(await find())
            except SecondRouterError as error:
                trouble, refusals = str(error), [str(error)]
                break
            except RouterRefusedError as error:
                refusals.append(str(error))
            else:
                return True
        self._trouble = trouble
        self._complain(refusals)
        return False

    async def _hold(self, router: Router) -> None:
        """Keep ports mapped until the router refuses or this node listens elsewhere.

        Raises RouterRefusedError without any port.
        """
        if not self._is_here(router):
            raise RouterRefusedError(f"The router forwards ports to {router.local_host}, which is not this computer.")
        try:
            while self._is_here(router) and await self._is_refreshed(router):
                with anyio.move_on_after(CHECK_SECONDS):
                    while self._is_here(router) and not any(map(self._is_due, self._held.values())):
                        await anyio.sleep(LOOK_SECONDS)
        finally:
            await self._let_go(router)

    async def _is_refreshed(self, router: Router) -> bool:
        """Whether the router still honours its leases. Raises RouterRefusedError if it never granted any."""
        try:
            await self._refresh(router)
        except RouterRefusedError as error:
            if not self._held:
                raise
            _LOG.info("The router no longer forwards connections to this node: %s", error)
            return False
        return True

    async def _refresh(self, router: Router) -> None:
        """Request what is missing or due, and report the result. Raises RouterRefusedError without the first port."""
        host = await _host_outside(router)
        first, *others = self.ports.ports()
        await self._keep(router, first)
        for inner in others:
            try:
                await self._keep(router, inner)
            except RouterRefusedError as error:
                _LOG.debug("The router did not map port %d: %s", inner, error)
                self._held.pop(inner, None)
        self._report(host)

    async def _keep(self, router: Router, inner: int) -> None:
        held = self._held.get(inner)
        if held is not None and not self._is_due(held) and await router.keeps(held.lease):
            return
        at, calendar_at = anyio.current_time(), self.calendar()
        suggested = Lease(inner, inner, LEASE_SECONDS) if held is None else held.lease
        try:
            lease = await router.open(inner, suggested.outer, LEASE_SECONDS)
        except BaseException:
            if held is None:  # the router may have opened it in spite of the error
                await _give_back(router, (suggested,))
            raise
        self._held[inner] = _Held(lease, at, calendar_at)

    def _report(self, host: str) -> None:
        outside = {inner: (host, held.lease.outer) for inner, held in self._held.items()}
        before = [self.ports.of(inner) for inner in outside]
        self.ports.update(outside)
        if before != list(outside.values()):
            self._has_complained, self._trouble = False, ""
            ports = ", ".join(str(port) for _, port in outside.values())
            _LOG.info("The router forwards its ports %s at %s to this node.", ports, host)

    async def _let_go(self, router: Router) -> None:
        held, self._held = self._held, {}
        self.ports.update({})
        await _give_back(router, [each.lease for each in held.values()])

    def _is_here(self, router: Router) -> bool:
        return router.local_host in self.ports.hosts()

    def _is_due(self, held: _Held) -> bool:
        return held.is_due(anyio.current_time(), self.calendar())

    def _complain(self, refusals: Iterable[str]) -> None:
        level = logging.DEBUG if self._has_complained else logging.INFO
        self._has_complained = True
        _LOG.log(level, "No router maps a port to this node: %s", " ".join(refusals))


async def _give_back(router: Router, leases: Iterable[Lease]) -> None:
    """Return all ports, also while this node ends. Mappings that the router keeps expire with their lease."""
    with anyio.move_on_after(CLOSE_SECONDS, shield=True):
        for lease in leases:
            with suppress(RouterRefusedError):
                await router.close(lease)


async def _host_outside(router: Router) -> str:
    """The router's public address. Raises RouterRefusedError, SecondRouterError."""
    host = await router.external_host()
    if is_public_ipv4(host):
        return str(IPv4Address(host))
    if is_inner_ipv4(host):
        raise SecondRouterError(
            f"The router is itself behind another one (its address is {host}): peers outside cannot dial this node."
        )
    raise RouterRefusedError(f"The router has no public address: it reports {host[:40]!r}.")
