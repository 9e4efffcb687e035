"""Task trees: supervised work that is logged and tried again, and companions that live exactly as long as the work."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar, cast

import anyio

from neuroshard.errors import NeuroShardError

_LOG = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 60.0
STEADY_SECONDS = 120.0  # work that lived this long counts as healthy: the next pause is short again


def pause_after(failures: int) -> float:
    """Seconds until the next try after this many failures in a row (1, 2, ...): doubles up to a minute."""
    return min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2.0 ** min(failures - 1, 10))


async def keep_running(
    name: str,
    work: Callable[[], Awaitable[None]],
    on_failure: Callable[[str, float], None],
    *,
    is_final: Callable[[BaseException], bool] = lambda _: False,
) -> None:
    """Run `work` until it ends by itself; after a failure report the reason and the seconds until the next try.

    An error that is final, judged by its first cause, is raised as that cause instead.
    """
    failures = 0
    while True:
        started = anyio.current_time()
        try:
            await work()
        except Exception as error:  # noqa: BLE001 - the task supervisor: a failure of this work must not end training
            if is_final(first_cause(error)):
                raise first_cause(error) from None
            failures = 1 if anyio.current_time() - started > STEADY_SECONDS else failures + 1
            seconds = pause_after(failures)
            defect = None if isinstance(first_cause(error), NeuroShardError) else error  # the log shows its traceback
            text = "%s failed. Retrying in %.0f s: %s"
            _LOG.warning(text, name, seconds, cause_words(error), exc_info=defect)
            on_failure(cause_words(error), seconds)
            await anyio.sleep(seconds)
        else:
            return


def cause_words(error: BaseException) -> str:
    """The first cause inside groups of errors, in words."""
    cause = first_cause(error)
    return str(cause) or type(cause).__name__


def first_cause(error: BaseException) -> BaseException:
    """The first error inside groups of errors."""
    if isinstance(error, BaseExceptionGroup):
        return first_cause(cast("BaseExceptionGroup[BaseException]", error).exceptions[0])
    return error


T = TypeVar("T")
Companion = Callable[[], Coroutine[Any, Any, object]]


async def accompanied(work: Callable[[], Awaitable[T]], *companions: Companion) -> T:
    """Return the value of `work`. The companions run at the same time and are cancelled when it ends.

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
        for_user = group.subgroup(NeuroShardError)
        if for_user is None:
            raise
        raise _first(for_user) from group
    return values[0]


def _first(group: BaseExceptionGroup[NeuroShardError]) -> NeuroShardError:
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
