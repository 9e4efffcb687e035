"""Saves checkpoints while training runs: the schedule, and the saver with its writer thread."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from neuroshard.errors import StorageError
from neuroshard.state.checkpoint_manifest import CheckpointMeta
from neuroshard.state.checkpoint_store import CheckpointStore, Expectation, Restoration
from neuroshard.state.disk_space import StorageLimits
from neuroshard.state.staging_buffers import StagingBuffers
from neuroshard.state.system_resources import lower_thread_priority
from neuroshard.status.snapshot import CheckpointGeneration, CheckpointStatus
from neuroshard.types import DAY_SECONDS


@dataclass(frozen=True)
class CheckpointPolicy:
    """Limits that the owner of the computer sets."""

    every_steps: int = 10
    min_seconds: float = 30.0
    bytes_per_day: float = 200e9

    def interval_seconds(self, generation_bytes: int) -> float:
        """Return the least time between two writes: the minimum, or more when the day's budget requires it."""
        return max(self.min_seconds, self.budget_seconds(generation_bytes))

    def budget_seconds(self, generation_bytes: int) -> float:
        """Return the time between two writes that spreads the day's budget evenly."""
        return generation_bytes / self.bytes_per_day * DAY_SECONDS


@dataclass(frozen=True)
class CheckpointSchedule:
    """Decides when to save. `taken` and `outer_step_done` return the next schedule."""

    policy: CheckpointPolicy
    generation_bytes: int
    last_step: int = 0  # of the newest saved state, or the step at which training started
    last_started: float | None = None  # monotonic seconds
    outer_step_waiting: bool = False  # an outer step was completed that no checkpoint contains yet

    def is_due(self, step: int, now: float, *, write_in_flight: bool) -> bool:
        """Return whether to save after `step`: every 10 steps or after an outer step, when time and budget allow."""
        if write_in_flight or step <= self.last_step:
            return False
        if not self.outer_step_waiting and step - self.last_step < self.policy.every_steps:
            return False
        return self.last_started is None or now - self.last_started >= self.interval_seconds

    def may_write(self, step: int, now: float, *, write_in_flight: bool) -> bool:
        """Return whether a state that another node needs may be saved after `step`: earlier, but within the budget."""
        if write_in_flight or step <= self.last_step:
            return False
        return self.seconds_to_write(now) == 0.0

    def seconds_to_write(self, now: float) -> float:
        """Return the seconds until the write budget allows another state."""
        if self.last_started is None:
            return 0.0
        return max(0.0, self.last_started + self.policy.budget_seconds(self.generation_bytes) - now)

    @property
    def interval_seconds(self) -> float:
        """Return the least time between two writes of this size."""
        return self.policy.interval_seconds(self.generation_bytes)

    def taken(self, step: int, now: float) -> CheckpointSchedule:
        """Return the schedule after a state was given to the writer; a failed write counts too, so the retry waits."""
        return replace(self, last_step=step, last_started=now, outer_step_waiting=False)

    def outer_step_done(self) -> CheckpointSchedule:
        """Return the schedule after an outer step: a save is due as soon as allowed, not only every ten steps."""
        return replace(self, outer_step_waiting=True)


@dataclass(frozen=True)
class Exposure:
    """The most that a kill at this moment could lose."""

    steps: int
    seconds: float
    sentence: str


def exposure(
    schedule: CheckpointSchedule,
    *,
    step: int,
    saved_step: int | None,
    seconds_since_saved: float | None,
    step_seconds: float,
    write_seconds: float,
) -> Exposure:
    """Return the interval plus ten steps plus one write, or the present distance to the saved state if that is more.

    `saved_step` is the step of the newest complete generation, `seconds_since_saved` the age of that state; None when
    nothing was saved yet.
    """
    if saved_step is None or seconds_since_saved is None:
        return Exposure(step, 0.0, "everything since the start: no checkpoint yet")
    every, interval = schedule.policy.every_steps, schedule.interval_seconds
    waiting = max(interval, write_seconds)
    bound = waiting + every * step_seconds + write_seconds
    behind = step - saved_step
    if seconds_since_saved > bound and behind > every:
        words = f"{behind} steps, {seconds_since_saved:.0f} s: no checkpoint since step {saved_step}"
        return Exposure(behind, seconds_since_saved, words)
    steps = every + (math.ceil((waiting + write_seconds) / step_seconds) if step_seconds > 0 else 0)
    words = (
        f"at most {bound:.0f} s of work, about {steps} steps: "
        f"{interval:.0f} s between checkpoints, {every} steps, {write_seconds:.1f} s for a write"
    )
    return Exposure(max(steps, behind), bound, words)


_LOG = logging.getLogger(__name__)

NICENESS = 10


@dataclass(frozen=True)
class WriteReport:
    """The result of one write. `alarm` is the message for the owner when it failed."""

    step: int
    started: float  # by the writer's clock; the state was taken just before
    seconds: float
    generation: CheckpointGeneration | None
    alarm: str | None = None


ASSUMED_BYTES_PER_SECOND = 200e6


@dataclass(frozen=True)
class StateCapture:
    """A state to save. Its tensors are read on the calling thread before `offer` or `save` returns."""

    meta: CheckpointMeta
    tensors: Mapping[str, Tensor]
    residual: Tensor | None = None  # (d,), kept by reference: it is replaced and never changed in place


class CheckpointSaver:
    """Owns the schedule, the writer thread and, while a write is in flight, the staging buffers.

    It belongs to the compute thread; any thread may call `status`. `close` ends it. A defect in the code of a write is
    raised by the next call that looks for its report.
    """

    def __init__(
        self,
        store: CheckpointStore,
        staging: StagingBuffers,
        policy: CheckpointPolicy,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.store = store
        self._staging = staging
        self._clock = clock
        self._cancel = threading.Event()
        self._pool = ThreadPoolExecutor(
            1, thread_name_prefix="checkpoint", initializer=partial(lower_thread_priority, NICENESS)
        )
        self._write: Future[WriteReport] | None = None  # the newest one, which may have finished
        self._schedule = CheckpointSchedule(policy, staging.layout.file_bytes)
        self._status = CheckpointStatus(folder=str(store.folder), interval_seconds=self._schedule.interval_seconds)
        self._saved: tuple[int, float] | None = None  # step and monotonic time of the newest complete state
        self._stall_seconds = 0.0
        self._write_seconds = staging.layout.file_bytes / ASSUMED_BYTES_PER_SECOND  # until one was measured
        self._restored: str | None = None
        self._seen: WriteReport | None = None
        self._is_wanted = False
        self._list()

    def restore(self, expected: Expectation) -> Restoration:
        """Load the newest whole state into the buffers and start counting from it. Raises StorageError."""
        restoration = self.store.load_newest(expected, self._staging)
        sentences = list(restoration.warnings)
        if restoration.loaded is not None:
            meta = restoration.loaded.meta
            self._schedule = replace(self._schedule, last_step=meta.step, outer_step_waiting=False)
            self._saved = (meta.step, self._clock())
            sentences.append(f"Restored step {meta.step}.")
        self._restored = " ".join(sentences) or None
        self._list()
        return restoration

    def change_limits(self, policy: CheckpointPolicy, storage: StorageLimits) -> None:
        """Apply other limits on writes and on disk space from now on."""
        self.store.change_limits(storage)
        old = self._schedule
        self._schedule = CheckpointSchedule(
            policy, old.generation_bytes, old.last_step, old.last_started, old.outer_step_waiting
        )

    def outer_step_done(self) -> None:
        """Record that an outer step was completed: the next offer that time and budget allow is taken."""
        self._schedule = self._schedule.outer_step_done()

    def want(self) -> float:
        """Request a new state from any thread: the next offer that the write budget allows is taken.

        Returns seconds until the budget allows it.
        """
        self._is_wanted = True
        return self.seconds_to_write()

    def seconds_to_write(self) -> float:
        """Return the seconds until the write budget allows another state."""
        return self._schedule.seconds_to_write(self._clock())

    def offer(self, step: int, capture: Callable[[], StateCapture]) -> bool:
        """Save in the background if it is due; call this after every step. Returns whether the state was taken."""
        self._notice()
        if not self._is_due(step):
            return False
        state, started = capture(), self._clock()
        self._take(state)
        self._stall_seconds = self._clock() - started
        return True

    def has_work(self, step: int) -> bool:
        """Return whether an offer after this step would save or collect a finished write. Any thread may call this."""
        write = self._write
        is_unseen = write is not None and write.done() and write.result() is not self._seen
        return is_unseen or self._is_due(step)

    def _is_due(self, step: int) -> bool:
        """Return whether to save after this step, by schedule or for a requested copy."""
        in_flight, now = self._write is not None and not self._write.done(), self._clock()
        is_wanted = self._is_wanted and self._schedule.may_write(step, now, write_in_flight=in_flight)
        return is_wanted or self._schedule.is_due(step, now, write_in_flight=in_flight)

    def save(self, capture: Callable[[], StateCapture]) -> WriteReport:
        """Save now, whatever the schedule, and wait until it is on disk (or has failed, see `alarm`)."""
        self.wait()
        write = self._take(capture())
        self.wait()
        return write.result()

    def status(self, step: int, step_seconds: float) -> CheckpointStatus:
        """Return the status: the saved state, and the most that a kill now could lose."""
        self._notice()
        saved, now = self._saved, self._clock()
        lost = exposure(
            self._schedule,
            step=step,
            saved_step=saved[0] if saved else None,
            seconds_since_saved=now - saved[1] if saved else None,
            step_seconds=step_seconds,
            write_seconds=self._write_seconds,
        )
        newest = self._generations[0] if self._generations else None
        return CheckpointStatus(
            folder=str(self.store.folder),
            generations=self._generations,
            last_saved_step=newest.step if newest else None,
            last_saved_time=newest.time if newest else None,
            interval_seconds=self._schedule.interval_seconds,
            could_lose=lost.sentence,
            could_lose_steps=lost.steps,
            could_lose_seconds=lost.seconds,
            last_write_seconds=self._write_seconds,
            last_stall_seconds=self._stall_seconds,
            alarm=self._seen.alarm if self._seen else None,
            restored=self._restored,
        )

    def wait(self) -> None:
        """Wait for the write in flight, if there is one."""
        if self._write is not None:
            wait_for([self._write])
        self._notice()

    def close(self) -> WriteReport | None:
        """Wait for the write in flight and end the writer thread."""
        self._pool.shutdown(wait=True)
        self._notice()
        return None if self._write is None else self._write.result()

    def cancel(self) -> None:
        """Abandon the write in flight at its next chunk, for a user who does not want to wait."""
        self._cancel.set()

    def _take(self, state: StateCapture) -> Future[WriteReport]:
        """Copy a state into the buffers and begin to write it. RuntimeError while another write is in flight."""
        started, staging = self._clock(), self._staging
        staging.copy_from(state.tensors)
        staging.claim()
        try:
            write = self._write = self._pool.submit(self._write_out, state.meta, state.residual)
        except BaseException:
            staging.release()
            raise
        beside = 0 if state.residual is None else state.residual.nbytes
        size = staging.layout.file_bytes + beside
        self._schedule = replace(self._schedule.taken(state.meta.step, started), generation_bytes=size)
        self._is_wanted = False
        return write

    def _write_out(self, meta: CheckpointMeta, residual: Tensor | None) -> WriteReport:
        """Write the contents of the buffers. Runs on the writer thread."""
        started = self._clock()
        try:
            generation = self.store.write(meta, self._staging, self._cancel.is_set, residual)
        except InterruptedError:
            return WriteReport(meta.step, started, self._clock() - started, None, "The last checkpoint was abandoned.")
        except StorageError as error:
            failure = f"No checkpoint of step {meta.step} was saved"
            alarm = f"{error} {failure}; training continues, and older checkpoints are kept."
            _LOG.error("%s", alarm)  # a full disk needs no traceback
            return WriteReport(meta.step, started, self._clock() - started, None, alarm)
        finally:
            self._staging.release()
        seconds = self._clock() - started
        _LOG.info(
            "The checkpoint of step %d was saved in %.1f s (%.0f MB).", meta.step, seconds, generation.bytes / 1e6
        )
        return WriteReport(meta.step, started, seconds, generation)

    def _notice(self) -> None:
        """Record the write that finished since the last call. A defect in its code is raised here."""
        write = self._write
        if write is None or not write.done():
            return
        report = write.result()
        if report is self._seen:
            return
        self._seen = report
        if report.generation is not None:
            self._write_seconds = report.seconds
            self._saved = (report.step, report.started)
        self._list()

    def _list(self) -> None:
        generations = self._generations = self.store.generations()
        # the outer step of the newest checkpoint; 0 without one. Any thread may read it.
        self.saved_outer_step = generations[0].outer_step if generations else 0
