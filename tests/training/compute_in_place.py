"""Computing that a virtual clock waits for."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import anyio.lowlevel

from neuroshard.pipeline.executor import ComputeThread, Priority

T = TypeVar("T")


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
