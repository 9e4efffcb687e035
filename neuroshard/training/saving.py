"""Takes checkpoints of a running stage and puts a restored one back; files are the checkpoint package's business."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import anyio
from torch import Tensor

from neuroshard.config.data_dir import make_folder, reason_of
from neuroshard.errors import StorageError
from neuroshard.optim.outer import OuterState
from neuroshard.status.snapshot import CheckpointGeneration, CheckpointStatus
from neuroshard.training.checkpoint.keeper import CheckpointKeeper, StateCapture
from neuroshard.training.checkpoint.metadata import CheckpointMeta, encode_manifest
from neuroshard.training.checkpoint.staging import StagingBuffers
from neuroshard.training.checkpoint.store import Expectation, LoadedCheckpoint
from neuroshard.training.checkpoint.writer import WriteReport
from neuroshard.training.compute import ComputeThread, Priority
from neuroshard.training.executor import StageExecutor
from neuroshard.training.given_back import trim_heap
from neuroshard.training.outer_sync import OuterProgress, OuterSync
from neuroshard.training.precision import Precision
from neuroshard.training.record import StageIdentity, TrainingRecord, from_meta, restore_random_state, to_meta
from neuroshard.training.stage_state import load_stage_tensors, stage_tensors

_LOG = logging.getLogger(__name__)

WRITE_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Restored:
    """What a checkpoint held beside weights and moments."""

    record: TrainingRecord
    outer_state: OuterState
    residual: Tensor | None  # (d,), see OuterSync
    outer_progress: OuterProgress


class Saver:
    """The trainer's way to its checkpoints; every call is one job of the compute thread."""

    def __init__(
        self,
        *,
        compute: ComputeThread,
        keeper: CheckpointKeeper,
        identity: StageIdentity,
        executor: StageExecutor,
        outer: OuterSync,
        staging: StagingBuffers,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._staging = staging
        self._compute = compute
        self._keeper = keeper
        self._identity = identity
        self._executor = executor
        self._outer = outer
        self._wall_clock = wall_clock

    async def offer(self, record: TrainingRecord, outer_step_done: bool) -> bool:
        """After a step: save in the background when it is due."""

        def work() -> bool:
            if outer_step_done:
                self._keeper.outer_step_done()
            return self._keeper.offer(record.progress.steps, lambda: self._capture(record))

        return await self._compute.run(work, Priority.SMALL)

    async def save(self, record: TrainingRecord) -> WriteReport:
        """Save now and wait until it is on disk or has failed. A state that lies there already is not written again."""
        return await self._compute.run(lambda: self._save(record), Priority.SMALL)

    async def restore(self) -> Restored | None:
        """Put the newest whole checkpoint back into the stage; None when there is none."""
        await self._written()
        return await self._compute.run(self._restore, Priority.SMALL)

    async def rest(self) -> None:
        """Give memory back that only the next checkpoint needs, once a write in flight has ended."""

        def work() -> None:
            self._staging.forget()
            trim_heap()

        await self._written()
        await self._compute.run(work, Priority.SMALL)

    def seconds_to_lie_down(self) -> float:
        """Until the owner's limit for checkpoints allows as many bytes as one has."""
        return self._keeper.seconds_to_write()

    async def lie_down(self, is_wanted: Callable[[], bool]) -> None:
        """Let all large tensors of a suspended stage lie in a file beside its checkpoints, while it is wanted."""

        def work() -> None:
            if self._executor.lie_down(folder, is_wanted):
                self._keeper.count_write()
                trim_heap()

        store = self._keeper.store
        folder = store.folder
        await self._written()
        try:
            make_folder(folder, store.data_dir)
            await self._outer.lie_down(folder, is_wanted)
            await self._compute.run(work, Priority.SMALL)
        except OSError as error:
            _LOG.info(
                "The paused stage stays in memory: %s cannot be written (%s).", folder, reason_of(error, store.data_dir)
            )

    async def get_up(self) -> None:
        """Take the outer state into memory; the rest came with the accelerator."""
        await self._outer.get_up()

    async def close(self) -> None:
        """Wait for a write in flight and end the writer."""
        await self._compute.run(self._keeper.close, Priority.SMALL)

    def status(self, step: int, step_seconds: float) -> CheckpointStatus:
        """For the dashboard."""
        return self._keeper.status(step, step_seconds)

    async def _written(self) -> None:
        """Wait for a write in flight, which reads the buffers, while the compute thread works for others."""
        while self._staging.in_use:
            await anyio.sleep(WRITE_POLL_SECONDS)

    def _restore(self) -> Restored | None:
        loaded = self._keeper.restore(expectation(self._identity)).loaded
        if loaded is None:
            return None
        warning = thread_warning(loaded.meta.threads, self._identity.threads)
        if warning is not None:
            _LOG.warning("%s", warning)
        return put_back(loaded, self._executor)

    def _save(self, record: TrainingRecord) -> WriteReport:
        self._keeper.wait()
        present = self._on_disk(self._meta(record))
        if present is not None:
            return WriteReport(present.step, started=0.0, seconds=0.0, generation=present)
        return self._keeper.save(lambda: self._capture(record))

    def _on_disk(self, meta: CheckpointMeta) -> CheckpointGeneration | None:
        """The newest generation when it holds this state; equal steps, outer steps and records mean equal tensors."""
        store = self._keeper.store
        newest = next(iter(store.generations()), None)
        if newest is None or newest.step != meta.step:
            return None
        try:
            found = store.read_manifest(Path(newest.path))
            size = Path(newest.path).with_name(found.tensors.file).stat().st_size
        except (OSError, StorageError):
            return None  # damaged meanwhile: written anew
        same = encode_manifest(replace(found, meta=replace(meta, time=found.meta.time))) == encode_manifest(found)
        return newest if same and size == found.tensors.bytes else None

    def _meta(self, record: TrainingRecord) -> CheckpointMeta:
        return to_meta(
            record,
            outer=self._outer.progress,
            outer_step=self._outer.state.outer_step,
            identity=self._identity,
            precision=self._executor.precision,
            time=self._wall_clock(),
        )

    def _capture(self, record: TrainingRecord) -> StateCapture:
        executor = self._executor
        tensors = stage_tensors(executor.model, executor.optimizer, self._outer.state)
        return StateCapture(self._meta(record), tensors, self._outer.residual)


def expectation(identity: StageIdentity) -> Expectation:
    """What a checkpoint must be of to be continued by this stage."""
    return Expectation(identity.wallet_id, identity.run_id, identity.architecture, identity.layers)


def thread_warning(stored: int, present: int) -> str | None:
    """What to say when a checkpoint was made with another number of CPU threads."""
    if stored == present:
        return None
    return (
        f"The checkpoint was made with {stored} CPU threads, now there are {present}: "
        "training goes on, but its last digits will differ."
    )


def put_back(loaded: LoadedCheckpoint, executor: StageExecutor) -> Restored:
    """Load a checkpoint into a stage; runs on the compute thread. Raises CheckpointError for a malformed record."""
    record, progress = from_meta(loaded.meta)
    state = load_stage_tensors(loaded.tensors, executor.model, executor.optimizer, loaded.meta.outer_step)
    restore_random_state(loaded.meta)
    if loaded.meta.precision:  # another one would not continue bit for bit
        executor.precision = Precision(loaded.meta.precision)
    executor.zero()
    return Restored(record, state, loaded.residual, progress)
