"""Schedule, staging buffers and writer together: what the training loop calls after every step."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from neuroshard.status.snapshot import CheckpointStatus
from neuroshard.training.checkpoint.metadata import CheckpointMeta
from neuroshard.training.checkpoint.schedule import CheckpointPolicy, CheckpointSchedule, exposure
from neuroshard.training.checkpoint.staging import StagingBuffers
from neuroshard.training.checkpoint.store import CheckpointStore, Expectation, Restoration
from neuroshard.training.checkpoint.writer import CheckpointWriter, WriteReport

ASSUMED_BYTES_PER_SECOND = 200e6


@dataclass(frozen=True)
class StateCapture:
    """A state to save: the tensors are read on the calling thread, before `offer` or `save` returns."""

    meta: CheckpointMeta
    tensors: Mapping[str, Tensor]
    residual: Tensor | None = None  # (d,), kept by reference: it is replaced and never changed in place


class CheckpointKeeper:
    """Lives on the compute thread, except status(), which any thread may call. Ended by close()."""

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
        self._writer = CheckpointWriter(store, clock)
        self._schedule = CheckpointSchedule(policy, staging.layout.file_bytes)
        self._status = CheckpointStatus(folder=str(store.folder), interval_seconds=self._schedule.interval_seconds)
        self._saved: tuple[int, float] | None = None  # step and monotonic time of the newest complete state
        self._stall_seconds = 0.0
        self._write_seconds = staging.layout.file_bytes / ASSUMED_BYTES_PER_SECOND  # until one was measured
        self._restored: str | None = None
        self._seen: WriteReport | None = None
        self._is_wanted = False
        self._generations = store.generations()

    def restore(self, expected: Expectation) -> Restoration:
        """Load the newest whole state into the buffers and start counting from it. Raises StorageError."""
        restoration = self.store.load_newest(expected, self._staging)
        sentences = list(restoration.warnings)
        if restoration.loaded is not None:
            meta = restoration.loaded.meta
            self._schedule = CheckpointSchedule(self._schedule.policy, self._schedule.generation_bytes, meta.step)
            self._saved = (meta.step, self._clock())
            sentences.append(f"Restored step {meta.step}.")
        self._restored = " ".join(sentences) or None
        self._generations = self.store.generations()
        return restoration

    def change_policy(self, policy: CheckpointPolicy) -> None:
        """Obey other limits from now on."""
        old = self._schedule
        self._schedule = CheckpointSchedule(
            policy, old.generation_bytes, old.last_step, old.last_started, old.outer_step_waiting
        )

    def outer_step_done(self) -> None:
        """Tell that an outer step was completed: the next offer that time and budget allow is taken."""
        self._schedule = self._schedule.outer_step_done()

    def want(self) -> float:
        """Somebody needs a new state: the next offer that the write budget allows is taken. From any thread.

        Returns seconds until the budget allows it.
        """
        self._is_wanted = True
        return self.seconds_to_write()

    def seconds_to_write(self) -> float:
        """Until the write budget allows another state."""
        return self._schedule.seconds_to_write(self._clock())

    def count_write(self) -> None:
        """As many bytes as a state has were written to something else."""
        self._schedule = self._schedule.written(self._clock())

    def offer(self, step: int, capture: Callable[[], StateCapture]) -> bool:
        """After every step: save in the background when it is due. Returns whether the state was taken."""
        self._notice()
        in_flight, now = self._writer.in_flight, self._clock()
        is_wanted = self._is_wanted and self._schedule.may_write(step, now, write_in_flight=in_flight)
        if not is_wanted and not self._schedule.is_due(step, now, write_in_flight=in_flight):
            return False
        self._take(capture())
        return True

    def save(self, capture: Callable[[], StateCapture]) -> WriteReport:
        """Save now, whatever the schedule says, and wait until it is on disk (or has failed, see `alarm`)."""
        self._writer.wait()
        self._notice()
        self._take(capture())
        report = self._writer.wait()
        self._notice()
        if report is None:
            raise AssertionError("a write was submitted and waited for")
        return report

    def status(self, step: int, step_seconds: float) -> CheckpointStatus:
        """For the snapshot: what is safe, and what a kill now could lose."""
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
        self._writer.wait()
        self._notice()

    def close(self) -> WriteReport | None:
        """Wait for the write in flight and end the writer thread."""
        report = self._writer.close()
        self._notice()
        return report

    def cancel(self) -> None:
        """Give up the write in flight."""
        self._writer.cancel()

    def _take(self, state: StateCapture) -> None:
        started = self._clock()
        self._staging.copy_from(state.tensors)
        self._stall_seconds = self._clock() - started
        self._writer.submit(state.meta, self._staging, state.residual)
        beside = 0 if state.residual is None else state.residual.nbytes
        size = self._staging.layout.file_bytes + beside
        self._schedule = replace(self._schedule.taken(state.meta.step, started), generation_bytes=size)
        self._is_wanted = False

    def _notice(self) -> None:
        """Take over what the writer finished since the last look."""
        report = self._writer.last_report()
        if report is None or report is self._seen:
            return
        self._seen = report
        if report.generation is not None:
            self._write_seconds = report.seconds
            self._saved = (report.step, report.started)
        self._generations = self.store.generations()
