"""The call that runs blocking work outside the event loop, or at once in tests with a virtual clock."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

import anyio


async def first_of(*waits: Callable[[], Awaitable[object]]) -> None:
    """Return when the first of several waits has ended; the others are cancelled."""
    async with anyio.create_task_group() as tasks:

        async def wait_for(wait: Callable[[], Awaitable[object]]) -> None:
            await wait()
            tasks.cancel_scope.cancel()

        for wait in waits:
            tasks.start_soon(wait_for, wait)


_Value = TypeVar("_Value")


class BlockingRunner(Protocol):
    """Runs a blocking function elsewhere and waits for its value."""

    def __call__(self, function: Callable[[], _Value], /) -> Awaitable[_Value]:
        """The function's value; what it raises is raised here."""
        ...
