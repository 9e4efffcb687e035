"""Work with companions: tasks that live exactly as long as the work does."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import anyio

from neuroshard.errors import NeuroShardError

T = TypeVar("T")
Companion = Callable[[], Coroutine[Any, Any, object]]


async def accompanied(work: Callable[[], Awaitable[T]], *companions: Companion) -> T:
    """The value of `work`; companions run beside it and are cancelled when it ends.

    The failure of one ends all. An error for the user is raised as itself, not inside a group.
    """
    values: list[T] = []
    try:
        async with anyio.create_task_group() as tasks:
            for companion in companions:
                tasks.start_soon(companion)
            values.append(await work())
            tasks.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        told = group.subgroup(NeuroShardError)
        if told is None:
            raise
        raise _first(told) from group
    return values[0]


def _first(group: BaseExceptionGroup[NeuroShardError]) -> NeuroShardError:
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
