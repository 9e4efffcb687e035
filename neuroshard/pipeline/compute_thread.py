"""The thread that owns the model's tensors: callables enter a queue and values come out, so no lock is needed."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum, auto
from math import inf
from threading import Condition, Event, Thread
from typing import Any, TypeVar

import anyio
import torch
import trio

from neuroshard.errors import NotReadyError
from neuroshard.pipeline.microbatch import AcceleratorFullError
from neuroshard.state.system_resources import lower_thread_priority

NICENESS = 5  # a third of the share of what else wants the same core
T = TypeVar("T")


class Priority(Enum):
    """Order of waiting jobs; equal ones keep their order of arrival."""

    SMALL = auto()  # a snapshot, a change of state: must not wait for more than the job that runs
    TEXT = auto()  # some tokens for people: before training, but never two of them while training waits
    TRAINING = auto()  # forward or backward of one microbatch, an optimizer step


@dataclass(frozen=True)
class _Job:
    work: Callable[[], Any]
    result: Future[Any] = field(default_factory=Future[Any])


class ComputeThread:
    """Runs one job at a time; a job takes at most one microbatch and long ones look at `cancelled`.

    A job that was given up before its start never runs. One that already runs is waited for, because its tensors
    are in use until it ends.
    """

    def __init__(self, cpu_threads: int | None = None, name: str = "neuroshard-compute") -> None:
        """`cpu_threads` is what one torch operation may use (results depend on it bit by bit); None keeps torch's."""
        self._cpu_threads = cpu_threads
        self._waiting = {priority: deque[_Job]() for priority in Priority}
        self._closed = False
        self._changed = Condition()
        self._last = Priority.TRAINING
        self._share = 1.0
        self._worked = (-inf, 0.0)  # when the last job of training ended, and the seconds that it took
        self.cancelled = Event()
        self._thread = Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def throttle(self, share: float) -> None:
        """Let training compute in this share of the time, from now on; it rests between its jobs, the others do not.

        Raises ValueError unless 0 < share <= 1.
        """
        if not 0 < share <= 1:
            raise ValueError(f"a share of the time must be in (0, 1], got {share}")
        if share != self._share:
            with self._changed:
                self._share = share
                self._changed.notify()

    def submit(self, work: Callable[[], T], priority: Priority = Priority.TRAINING) -> Future[T]:
        """Queue a job from any thread. Raises NotReadyError once the thread was closed."""
        job = _Job(work)
        with self._changed:
            if self._closed:
                raise NotReadyError("The compute thread has ended.", "Start the node again.")
            self._waiting[priority].append(job)
            self._changed.notify()
        return job.result

    async def run(self, work: Callable[[], T], priority: Priority = Priority.TRAINING) -> T:
        """Run a job and wait for its value without blocking the event loop; its exception is raised here.

        When the caller is cancelled, a waiting job is dropped and a running one is waited for. Raises
        AcceleratorFullError where PyTorch found no memory there.
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
        try:
            return result.result()
        except torch.OutOfMemoryError as error:
            raise AcceleratorFullError from error

    def close(self) -> None:
        """Accept no more jobs, finish the accepted ones and join the thread; a second call does nothing."""
        with self._changed:
            self._closed = True
            self.cancelled.set()
            self._changed.notify()
        self._thread.join()

    def _work(self) -> None:
        lower_thread_priority(NICENESS)
        if self._cpu_threads is not None:
            torch.set_num_threads(self._cpu_threads)  # OpenMP keeps this per calling thread
        while (turn := self._next()) is not None:
            began = time.perf_counter()
            is_paced = turn[1] is Priority.TRAINING and self._share < 1
            self._run_job(turn[0], to_its_end=is_paced)
            if is_paced:
                ended = time.perf_counter()
                self._worked = ended, ended - began
            del turn  # keeps the values of a finished job alive no longer than its caller does

    def _next(self) -> tuple[_Job, Priority] | None:
        """Wait for the job whose turn it is; None when no more will come."""
        small, text, training = (self._waiting[priority] for priority in Priority)
        with self._changed:
            while True:
                rest = self._seconds_to_rest() if training and not self._closed else 0.0
                is_due = bool(training) and rest <= 0
                if small:
                    return small.popleft(), Priority.SMALL
                if text and not (is_due and self._last is Priority.TEXT):
                    self._last = Priority.TEXT
                    return text.popleft(), Priority.TEXT
                if is_due:
                    self._last = Priority.TRAINING
                    return training.popleft(), Priority.TRAINING
                if self._closed:
                    return None
                self._changed.wait(rest if training else None)

    def _seconds_to_rest(self) -> float:
        """Until training has computed in no more than its share of the time."""
        ended, seconds = self._worked
        return ended + seconds * (1 / self._share - 1) - time.perf_counter()

    @staticmethod
    def _run_job(job: _Job, *, to_its_end: bool) -> None:
        """`to_its_end`: of what the job begins on the accelerator too."""
        if not job.result.set_running_or_notify_cancel():
            return
        try:
            value = job.work()
            if to_its_end:
                _wait_for_accelerator()
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


def _wait_for_accelerator() -> None:
    """Until what was begun there has ended: only then it is known how long that took. Raises what failed there."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    elif torch.backends.mps.is_available():
        torch.mps.synchronize()
