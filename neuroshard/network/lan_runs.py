"""Runs on the local network, for the wizard and the dashboard: asks by multicast DNS and lists the answers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain, repeat
from math import inf

import anyio

from neuroshard.network.limits import TokenBucket
from neuroshard.network.mdns import (
    PACKETS_A_SECOND,
    LanInterface,
    MulticastChannel,
    ReachableInterface,
    RunNotice,
    lan_interfaces,
    open_socket,
)
from neuroshard.types import NodeId
from neuroshard.waiting import Signal

_LOG = logging.getLogger(__name__)

MAX_RUNS = 8  # listed; more are not a home network but a flood
FORGOTTEN_SECONDS = 35.0  # a run from which no node answered for this time has left
FIRST_SECONDS = (1.0, 2.0)  # after the first questions, as a packet may be lost
ASK_SECONDS = 10.0  # between later questions
UNWATCHED_SECONDS = 30.0  # after the last look at the list
_LOOKER = NodeId("looker")  # no node has this id, so every node answers the question of a looker


@dataclass
class _HeardRun:
    notice: RunNotice
    heard_at: float


class LanRuns:
    """The runs that nodes of the local network announce, the first heard first. `current` may be read by any thread."""

    def __init__(self) -> None:
        self._heard: dict[str, _HeardRun] = {}
        self.current: tuple[RunNotice, ...] = ()

    def hear(self, notices: Iterable[RunNotice], now: float) -> None:
        """Take up announcements and forget the runs that have left.

        The first name of a run stays: another computer cannot rename an entry while its reader looks at it.
        """
        self._heard = {run: one for run, one in self._heard.items() if now - one.heard_at < FORGOTTEN_SECONDS}
        for notice in notices:
            known = self._heard.get(notice.run)
            if known is not None:
                self._heard[notice.run] = _HeardRun(RunNotice(notice.run, known.notice.name, notice.computers), now)
            elif len(self._heard) < MAX_RUNS:
                self._heard[notice.run] = _HeardRun(notice, now)
        self.current = tuple(one.notice for one in self._heard.values())


@dataclass(frozen=True)
class LanRunSearch:
    """Looks for runs on all local networks of this computer, until cancelled."""

    found: LanRuns
    interfaces: Callable[[], tuple[LanInterface, ...]] = lan_interfaces

    async def run(self) -> None:
        """Ask again and again. Each time opens the interfaces that work now: a cable or a Wi-Fi may come later."""
        for seconds in chain(FIRST_SECONDS, repeat(ASK_SECONDS)):
            with ExitStack() as sockets, anyio.move_on_after(seconds):
                async with anyio.create_task_group() as tasks:
                    for interface in self.interfaces():
                        tasks.start_soon(self._look, interface, sockets)
                    await anyio.sleep_forever()
            self.found.hear((), anyio.current_time())

    async def _look(self, interface: LanInterface, sockets: ExitStack) -> None:
        pace = TokenBucket(PACKETS_A_SECOND, PACKETS_A_SECOND)
        try:
            sock = open_socket(interface)
            sockets.callback(sock.close)
            channel = MulticastChannel(_LOOKER, ReachableInterface(interface, (), 0), sock)
            await channel.ask()
            while True:
                while not pace.take(anyio.current_time()):
                    await anyio.sleep(1 / PACKETS_A_SECOND)
                self.found.hear((await channel.receive()).notices, anyio.current_time())
        except OSError as error:
            _LOG.debug("Looking for runs on %s failed: %s", interface.name, error)


class WatchedLanRuns:
    """The runs of the local network, searched only while a page shows them: all nodes answer a search."""

    def __init__(self, interfaces: Callable[[], tuple[LanInterface, ...]] = lan_interfaces) -> None:
        self._runs = LanRuns()
        self._interfaces = interfaces
        self._looked = Signal()

    @property
    def current(self) -> tuple[RunNotice, ...]:
        """The runs that were heard. Any thread may read them."""
        return self._runs.current

    def look(self) -> None:
        """Search from now on, until nobody has looked for UNWATCHED_SECONDS. Call it on the event loop."""
        self._looked.notify()

    async def run(self) -> None:
        """Search while a page shows the runs, until cancelled."""
        while True:
            await self._looked.wait()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(LanRunSearch(self._runs, self._interfaces).run)
                while not await self._is_unwatched():
                    pass
                tasks.cancel_scope.cancel()
            self._runs.hear((), inf)  # the next reader must not see runs that have left meanwhile

    async def _is_unwatched(self) -> bool:
        """Wait for the next look; return whether none came for UNWATCHED_SECONDS."""
        with anyio.move_on_after(UNWATCHED_SECONDS) as patience:
            await self._looked.wait()
        return patience.cancelled_caught
