"""The task supervisor: work that may fail without ending the node is logged, told, and tried again."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import cast

import anyio

from neuroshard.errors import NeuroShardError

log = logging.getLogger(__name__)

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
    """Run `work` until it ends by itself; after a failure tell the reason and the seconds until the next try.

    An error that is final, judged by its first cause, is raised as that cause instead.
    """
    failures = 0
    while True:
        started = anyio.current_time()
        try:
            await work()
        except Exception as error:  # whatever fails here, training goes on
            if is_final(first_cause(error)):
                raise first_cause(error) from None
            failures = 1 if anyio.current_time() - started > STEADY_SECONDS else failures + 1
            seconds = pause_after(failures)
            expected = isinstance(first_cause(error), NeuroShardError)
            told = None if expected else error  # a defect: whoever mends it needs to know where
            log.warning("%s failed and is tried again in %.0f s: %s", name, seconds, reason_of(error), exc_info=told)
            on_failure(reason_of(error), seconds)
            await anyio.sleep(seconds)
        else:
            return


def reason_of(error: BaseException) -> str:
    """The first cause inside groups of errors, in words."""
    cause = first_cause(error)
    return str(cause) or type(cause).__name__


def first_cause(error: BaseException) -> BaseException:
    """The first error inside groups of errors."""
    if isinstance(error, BaseExceptionGroup):
        return first_cause(cast("BaseExceptionGroup[BaseException]", error).exceptions[0])
    return error
