"""The thread that writes checkpoints: low priority, one at a time, never in the way of training."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from neuroshard.errors import StorageError
from neuroshard.status.snapshot import CheckpointGeneration
from neuroshard.training.checkpoint.metadata import CheckpointMeta
from neuroshard.training.checkpoint.staging import StagingBuffers
from neuroshard.training.checkpoint.store import CheckpointStore
from neuroshard.training.niceness import give_way

log = logging.getLogger(__name__)

NICENESS = 10


@dataclass(frozen=True)
class WriteReport:
    """How one write went. `alarm` is what people must be told when it failed."""

    step: int
    started: float  # by the writer's clock; the state was taken just before
    seconds: float
    generation: CheckpointGeneration | None
    alarm: str | None = None


class CheckpointWriter:
    """Owns the writer thread and, while a write is in flight, the staging buffers."""

    def __init__(self, store: CheckpointStore, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._cancel = threading.Event()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint", initializer=partial(give_way, NICENESS))
        self._current: Future[WriteReport] | None = None
        self._last: WriteReport | None = None

    @property
    def in_flight(self) -> bool:
        """Whether a write is going on."""
        return self._current is not None and not self._current.done()

    def submit(
        self, meta: CheckpointMeta, staging: StagingBuffers, residual: Tensor | None = None
    ) -> Future[WriteReport]:
        """Write what the buffers hold. Raises RuntimeError while another write is in flight (nothing is queued)."""
        self.last_report()
        staging.claim()
        try:
            self._current = self._pool.submit(self._write, meta, staging, residual)
        except BaseException:
            staging.release()
            raise
        return self._current

    def last_report(self) -> WriteReport | None:
        """The newest finished write, or None. A defect in the writer's own code rises here instead of vanishing."""
        if self._current is not None and self._current.done():
            self._last = self._current.result()
        return self._last

    def wait(self, timeout_seconds: float | None = None) -> WriteReport | None:
        """Wait for the write in flight, then like last_report."""
        if self._current is not None:
            wait_for([self._current], timeout_seconds)
        return self.last_report()

    def cancel(self) -> None:
        """Give up the write in flight at its next chunk: for a user who does not want to wait."""
        self._cancel.set()

    def close(self) -> WriteReport | None:
        """Wait for the write in flight and end the thread."""
        self._pool.shutdown(wait=True)
        return self.last_report()

    def _write(self, meta: CheckpointMeta, staging: StagingBuffers, residual: Tensor | None) -> WriteReport:
        started = self._clock()
        try:
            generation = self._store.write(meta, staging, self._cancel.is_set, residual)
        except InterruptedError:
            return WriteReport(meta.step, started, self._clock() - started, None, "The last checkpoint was given up.")
        except StorageError as error:
            alarm = f"{error} No checkpoint of step {meta.step} was saved; training goes on, older checkpoints stay."
            log.error("%s", alarm)  # noqa: TRY400 - a full disk needs no traceback
            return WriteReport(meta.step, started, self._clock() - started, None, alarm)
        finally:
            staging.release()
        seconds = self._clock() - started
        log.info("checkpoint of step %d saved in %.1f s (%.0f MB)", meta.step, seconds, generation.bytes / 1e6)
        return WriteReport(meta.step, started, seconds, generation)
