"""What a router that opens ports looks like to whoever asks it, by whichever protocol."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from neuroshard.errors import NeuroShardError

LEASE_SECONDS = 3600  # asked for


class RouterRefusedError(NeuroShardError):
    """The router does not do what it was asked for."""


class NoRouterError(RouterRefusedError):
    """No router that can be asked."""


@dataclass(frozen=True)
class Lease:
    """A TCP port of the router that leads to one of this computer, for so long unless it is renewed."""

    inner: int
    outer: int
    seconds: float


class Router(Protocol):
    """A router. Its calls end within seconds, and raise RouterRefusedError."""

    @property
    def local_host(self) -> str:
        """This computer's address as the router sees it."""
        ...

    async def external_host(self) -> str:
        """The router's own address outside, as it says; nobody has checked it."""
        ...

    async def open(self, inner: int, wish: int, seconds: int) -> Lease:
        """Pass a port on to this computer, if possible the one wished for; also to renew a lease."""
        ...

    async def keeps(self, lease: Lease) -> bool:
        """Whether the router still knows a lease, as far as it tells."""
        ...

    async def close(self, lease: Lease) -> None:
        """Give a port back."""
        ...


RouterFinder: TypeAlias = Callable[[], Awaitable[Router]]
"""Finds the router of this network. Takes seconds and raises NoRouterError."""
