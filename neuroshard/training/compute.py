"""The one thread that owns the model's tensors: callables go in, values come out, and nobody else needs a lock."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from itertools import count
from queue import PriorityQueue
from threading import Event, Lock, Thread
from typing import Any, TypeVar

import anyio
import torch
import trio

from neuroshard.errors import NotReadyError

T = TypeVar("T")


class Priority(IntEnum):
    """Order of waiting jobs; equal ones keep their order of arrival."""

    SMALL = 0  # a few generated tokens, a snapshot: must not wait for more than the job that runs
    TRAINING = 1  # forward or backward of one microbatch, an optimizer step
    LAST = 2  # the end of the thread: after everything that was accepted


@dataclass(order=True)
class _Job:
    priority: int
    number: int
    work: Callable[[], Any] | None = field(compare=False)  # None ends the thread
    result: Future[Any] = field(compare=False, default_factory=Future[Any])


class ComputeThread:
    """Runs one job at a time; a job takes at most one microbatch and long ones look at `cancelled`.

    A job that was given up before its start never runs. One that already runs is waited for, because its tensors
    are in use until it ends.
    """

    def __init__(self, cpu_threads: int | None = None, name: str = "neuroshard-compute") -> None:
        """`cpu_threads` is what one torch operation may use (results depend on it bit by bit); None keeps torch's."""
        self._cpu_threads = cpu_threads
        self._jobs: PriorityQueue[_Job] = PriorityQueue()
        self._numbers = count()
        self._closed = False
        self._intake = Lock()  # so that no job can slip in behind the end
        self.cancelled = Event()
        self._thread = Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    @cached_property
    def turn(self) -> anyio.Lock:
        """For work that comes in many small jobs: held around each, so that a waiting microbatch gets in between."""
        return anyio.Lock()

    def submit(self, work: Callable[[], T], priority: Priority = Priority.TRAINING) -> Future[T]:
        """Queue a job from any thread. Raises NotReadyError once the thread was closed."""
        with self._intake:
            if self._closed:
                raise NotReadyError("The compute thread has ended.", "Start the node again.")
            job = _Job(priority, next(self._numbers), work)
            self._jobs.put(job)
        return job.result

    async def run(self, work: Callable[[], T], priority: Priority = Priority.TRAINING) -> T:
        """Run a job and wait for its value without blocking the event loop; its exception is raised here.

        When the caller is cancelled, a waiting job is dropped and a running one is waited for.
        """
        done = anyio.Event()
        wake = _wake_up_from_thread(done)
        result = self.submit(work, priority)
        result.add_done_callback(wake)
        try:
            await done.wait()
        finally:
            if not result.cancel() and not result.done():
                with anyio.CancelScope(shield=True):
                    await done.wait()
        return result.result()

    def close(self) -> None:
        """Accept no more jobs, finish the accepted ones and join the thread; a second call does nothing."""
        with self._intake:
            if not self._closed:
                self._closed = True
                self.cancelled.set()
                self._jobs.put(_Job(Priority.LAST, next(self._numbers), None))
        self._thread.join()

    def _work(self) -> None:
        if self._cpu_threads is not None:
            torch.set_num_threads(self._cpu_threads)  # OpenMP keeps this per calling thread
        while (job := self._jobs.get()).work is not None:
            self._run_job(job)
            del job  # keeps the values of a finished job alive no longer than its caller does

    @staticmethod
    def _run_job(job: _Job) -> None:
        if job.work is None or not job.result.set_running_or_notify_cancel():
            return
        try:
            value = job.work()
        except BaseException as error:  # noqa: BLE001 - not handled here: the future carries it to the caller
            job.result.set_exception(error)
        else:
            job.result.set_result(value)


def _wake_up_from_thread(done: anyio.Event) -> Callable[[Future[Any]], None]:
    """A callback for another thread that sets an event of the running trio loop."""
    token = trio.lowlevel.current_trio_token()

    def wake(_result: Future[Any]) -> None:
        token.run_sync_soon(done.set)  # pyright: ignore[reportUnknownMemberType]

    return wake
