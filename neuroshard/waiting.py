"""Waiting for changes inside one process, without polling."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from typing import TypeVar

import anyio

T = TypeVar("T")


class Signal:
    """Wakes every task that waits for a change. Belongs to the event loop; may be created before the loop runs.

    A signal carries no value: a woken task reads the state that changed, and waits again if it is not what it needs.
    """

    def __init__(self) -> None:
        self.count = 0  # changes so far
        self._event: anyio.Event | None = None  # exists while a task waits
        self._interruptible: set[anyio.CancelScope] = set()
        self._fed: list[Signal] = []

    def notify(self) -> None:
        """Wake all tasks that wait now, and cancel the work that must not outlast a change."""
        self.count += 1
        event, self._event = self._event, None
        if event is not None:
            event.set()
        for scope in self._interruptible:
            scope.cancel()
        for other in self._fed:
            other.notify()

    def feed(self, other: Signal) -> None:
        """Make every change here a change of `other` too, so that a task can wait for both at once."""
        self._fed.append(other)

    async def wait(self, after: int | None = None) -> None:
        """Wait for the next change, or for the first one after a `count` that the caller noted earlier.

        Note the count before you read the state if you do anything asynchronous in between. Otherwise a change that
        falls in between is missed.
        """
        if after is not None and after != self.count:
            await anyio.lowlevel.checkpoint()
            return
        if self._event is None:
            self._event = anyio.Event()
        await self._event.wait()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition is true. Returns without yielding if it is true already."""
        while not condition():
            await self.wait()

    async def interrupt(self, work: Callable[[], Awaitable[T]]) -> T | None:
        """Run `work` and return its value, or None if a change came first and `work` was cancelled."""
        with self.cancels():
            return await work()
        return None

    @contextmanager
    def cancels(self) -> Generator[anyio.CancelScope]:
        """Cancel the block at the next change; execution continues behind it."""
        with anyio.CancelScope() as scope:
            self._interruptible.add(scope)
            try:
                yield scope
            finally:
                self._interruptible.discard(scope)


def next_tick(seconds: float) -> float:
    """Time, by the event loop's clock, of the next multiple of a period: the deadline of a regular look.

    Looks with the same period, or with multiples of it, happen at the same moments. So a process with many of them
    wakes up as seldom as its most frequent look.
    """
    now = anyio.current_time()
    tick = (now // seconds + 1) * seconds
    return tick if tick > now else tick + seconds  # a product that was rounded down may be the present moment


async def sleep_to_tick(seconds: float) -> None:
    """Sleep until the next multiple of a period."""
    await anyio.sleep_until(next_tick(seconds))


async def first_of(*waits: Callable[[], Awaitable[object]]) -> None:
    """Return when the first of several waits has ended. The others are cancelled."""
    async with anyio.create_task_group() as tasks:

        async def wait_for(wait: Callable[[], Awaitable[object]]) -> None:
            await wait()
            tasks.cancel_scope.cancel()

        for wait in waits:
            tasks.start_soon(wait_for, wait)
