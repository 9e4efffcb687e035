"""Time in tests: a virtual clock that never waits, and the work that it must not run ahead of.

The event loop is real, its clock is simulated: it jumps to the next deadline when every task waits. Work that the
product sends to another thread runs on the loop itself, because the clock would not wait for that thread.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import TypeVar

import anyio.lowlevel
import trio
from trio.testing import MockClock

from neuroshard.pipeline.executor import ComputeThread, Priority

T = TypeVar("T")


def run_virtually(scenario: Callable[[], Awaitable[None]]) -> None:
    trio.run(scenario, clock=MockClock(autojump_threshold=0))


async def at_once(function: Callable[[], T], /) -> T:
    """Run what would block on the event loop's own thread: a virtual clock must not run on meanwhile."""
    await anyio.lowlevel.checkpoint()
    return function()


class ComputeInPlace(ComputeThread):
    """Computes on the loop's own thread, which the virtual clock waits for: it leaps while other threads work."""

    def __init__(self) -> None:
        super().__init__()
        self.close()  # the thread

    async def run(self, work: Callable[[], T], priority: Priority = Priority.TRAINING) -> T:
        await anyio.lowlevel.checkpoint()
        return work()

    def submit(self, work: Callable[[], T], priority: Priority = Priority.TRAINING) -> Future[T]:
        done = Future[T]()
        try:
            done.set_result(work())
        except BaseException as error:  # noqa: BLE001 - carried to the caller
            done.set_exception(error)
        return done

    async def finish(self, result: Future[T]) -> T:
        await anyio.lowlevel.checkpoint()
        return result.result()
