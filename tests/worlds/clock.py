"""Time in tests: a virtual clock that never waits, and the work that it must not run ahead of.

The event loop is real, its clock is simulated: it jumps to the next deadline when every task waits. Work that the
product sends to another thread runs on the loop itself, because the clock would not wait for that thread.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio
import anyio.lowlevel
import trio
from trio.testing import MockClock

T = TypeVar("T")


def run_virtually(scenario: Callable[[], Awaitable[None]]) -> None:
    trio.run(scenario, clock=MockClock(autojump_threshold=0))


async def until(holds: Callable[[], bool]) -> None:
    """Look often. The limit is that of the scenario: how long it takes says nothing on a busy machine."""
    while not holds():
        await anyio.sleep(0.01)


async def at_once(function: Callable[[], T], /) -> T:
    """Run what would block on the event loop's own thread: a virtual clock must not run on meanwhile."""
    await anyio.lowlevel.checkpoint()
    return function()
