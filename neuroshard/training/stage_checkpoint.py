"""Builds one stage from its newest checkpoint or from the run's initial weights, saves it, and restores it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import anyio
import torch
from torch import Tensor

from neuroshard.config.run_parameters import RunParameters
from neuroshard.consensus.sync_strategies import first_outer_state, kept_length
from neuroshard.errors import StorageError
from neuroshard.model.subspace import subspace_of
from neuroshard.model.transformer import StageModel
from neuroshard.model.weights import TensorSchema, flatten, initialise
from neuroshard.optim.inner_optimizer import PINNED_KINDS, make_inner_optimizer
from neuroshard.optim.outer import OuterState
from neuroshard.pipeline.arithmetic import Executor
from neuroshard.pipeline.compilation import Compilation
from neuroshard.pipeline.executor import ComputeThread, Precision, Priority, StageExecutor
from neuroshard.pipeline.precision_probe import PrecisionProbe, RememberedProbes, probe_precision
from neuroshard.state.checkpoint_manifest import CheckpointMeta, encode_manifest
from neuroshard.state.checkpoint_saver import CheckpointPolicy, CheckpointSaver, StateCapture, WriteReport
from neuroshard.state.checkpoint_store import CheckpointStore, Expectation, LoadedCheckpoint
from neuroshard.state.outer_state import OuterProgress
from neuroshard.state.stage_tensors import ANCHOR, OUTER_TENSORS, VELOCITY, stage_tensors
from neuroshard.state.staging_buffers import StagingBuffers
from neuroshard.state.system_resources import release_code, trim_heap
from neuroshard.state.tensor_file import TensorLayout
from neuroshard.status.snapshot import CheckpointGeneration, CheckpointStatus
from neuroshard.training.outer_sync import OuterSync
from neuroshard.training.record import StageIdentity, TrainingRecord, from_meta, restore_random_state, to_meta
from neuroshard.training.site.sharded_stage import ShardedStage
from neuroshard.training.site.site import Site
from neuroshard.training.site.site_executor import SiteExecutor
from neuroshard.types import LayerRange

_LOG = logging.getLogger(__name__)

WRITE_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Restored:
    """Contents of a checkpoint apart from weights and moments."""

    record: TrainingRecord
    outer_state: OuterState
    residual: Tensor | None  # (d,), see OuterSync
    outer_progress: OuterProgress


class Saver:
    """Saves and restores the checkpoints of a stage. Work on tensors runs as jobs of the compute thread."""

    def __init__(
        self,
        *,
        compute: ComputeThread,
        keeper: CheckpointSaver,
        identity: StageIdentity,
        executor: Executor,
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
        self._dropped: CheckpointGeneration | None = None  # the state of the stage, if only the disk has it
        self.warnings: tuple[str, ...] = ()  # of all calls of `restore`: damaged checkpoints, other thread counts

    async def offer(self, record: TrainingRecord, outer_step_done: bool) -> bool:
        """Save in the background if a checkpoint is due after a step. Returns whether a save has begun."""

        def work() -> bool:
            if outer_step_done:
                self._keeper.outer_step_done()
            return self._keeper.offer(record.progress.steps, lambda: self._capture(record))

        if not (outer_step_done or self._keeper.has_work(record.progress.steps)):
            return False
        return await self._compute.run(work, Priority.SMALL)

    async def save(self, record: TrainingRecord) -> WriteReport:
        """Save and wait until the checkpoint is on disk or has failed. A state on disk is not saved again."""
        return await self._compute.run(lambda: self._save(record), Priority.SMALL)

    async def restore(self) -> Restored | None:
        """Load the newest undamaged checkpoint into the stage, whose tensors may be dropped; None without one.

        `warnings` then describes the damaged ones. Raises StorageError if the disk cannot be read.
        """
        await self._written()
        return await self._compute.run(self._restore, Priority.SMALL)

    @property
    def is_dropped(self) -> bool:
        """Whether the stage's state is on the disk only."""
        return self._dropped is not None

    def note_lost(self) -> None:
        """Note that the stage has lost its tensors, so that only the newest checkpoint has its state.

        Raises StorageError if there is none.
        """
        self._dropped = next(iter(self._keeper.store.generations()), None)
        if self._dropped is None:
            raise StorageError(
                "A rank of the site has ended with its part of the model, and no checkpoint was saved before.",
                "Start the node again: training begins from the start.",
            )

    async def drop_tensors(self, saved: CheckpointGeneration) -> None:
        """Free the memory of a suspended stage without gradients, whose state is in `saved`. `restore` loads it."""

        def work() -> None:
            self._executor.drop_tensors()
            self._staging.forget()
            trim_heap()
            release_code()

        await self._written()
        self._dropped = saved
        self._outer.drop_tensors()
        await self._compute.run(work, Priority.SMALL)

    async def rest(self) -> None:
        """Free memory that only the next checkpoint needs, after a running write has ended."""

        def work() -> None:
            self._staging.forget()
            trim_heap()

        await self._written()
        await self._compute.run(work, Priority.SMALL)

    async def seconds_until_save(self, record: TrainingRecord) -> float:
        """Seconds until the owner's write limit allows this state to be saved; 0.0 if it is on disk already."""

        def work() -> float:
            return 0.0 if self._on_disk(self._meta(record)) else self._keeper.seconds_to_write()

        return await self._compute.run(work, Priority.SMALL)

    async def close(self) -> None:
        """Wait for a running write and stop the writer."""
        await self._compute.run(self._keeper.close, Priority.SMALL)

    def status(self, step: int, step_seconds: float) -> CheckpointStatus:
        """Status of the stage's checkpoints for the dashboard."""
        return self._keeper.status(step, step_seconds)

    async def _written(self) -> None:
        """Wait for a running write, which reads the buffers, without blocking the compute thread."""
        while self._staging.in_use:
            await anyio.sleep(WRITE_POLL_SECONDS)

    def _restore(self) -> Restored | None:
        restoration = self._keeper.restore(expectation(self._identity))
        self.warnings += restoration.warnings
        if restoration.loaded is None:
            return None
        restored = load_into_stage(restoration.loaded, self._executor)
        # Only now: after a failure the stage still counts as dropped, so that no save writes its undefined values.
        self._dropped = None
        self.warnings += thread_warnings(restoration.loaded.meta.threads, self._identity.threads)
        return restored

    def _save(self, record: TrainingRecord) -> WriteReport:
        self._keeper.wait()
        present = self._dropped or self._on_disk(self._meta(record))
        if present is not None:
            return WriteReport(present.step, started=0.0, seconds=0.0, generation=present)
        return self._keeper.save(lambda: self._capture(record))

    def _on_disk(self, meta: CheckpointMeta) -> CheckpointGeneration | None:
        """Newest checkpoint if it contains this state. Equal steps, outer steps and records mean equal tensors."""
        store = self._keeper.store
        newest = next(iter(store.generations()), None)
        if newest is None or newest.step != meta.step:
            return None
        try:
            found = store.read_manifest(Path(newest.path))
            size = Path(newest.path).with_name(found.tensors.file).stat().st_size
        except (OSError, StorageError):
            return None  # damaged meanwhile: write it again
        same = encode_manifest(replace(found, meta=replace(meta, time=found.meta.time))) == encode_manifest(found)
        return newest if same and size == found.tensors.bytes else None

    def _meta(self, record: TrainingRecord) -> CheckpointMeta:
        return to_meta(
            record,
            outer=self._outer.progress,
            outer_step=self._outer.state.outer_step,
            line=self._outer.state.line,
            identity=self._identity,
            precision=self._executor.precision,
            time=self._wall_clock(),
        )

    def _capture(self, record: TrainingRecord) -> StateCapture:
        return StateCapture(self._meta(record), self._executor.tensors(self._outer.state), self._outer.residual)


def expectation(identity: StageIdentity) -> Expectation:
    """Properties that a checkpoint must have to be continued by this stage."""
    return Expectation(identity.wallet_id, identity.run_id, identity.architecture, identity.layers)


def thread_warnings(stored: int, present: int) -> tuple[str, ...]:
    """Warning if a checkpoint was made with another number of CPU threads; () with the same number."""
    if stored == present:
        return ()
    counts = f"The checkpoint was made with {stored} CPU threads, now there are {present}"
    return (f"{counts}: training continues, but its last digits will differ.",)


def load_into_stage(loaded: LoadedCheckpoint, executor: Executor) -> Restored:
    """Load a checkpoint into a stage. Runs on the compute thread. Raises CheckpointError for a malformed record."""
    record, progress, line = from_meta(loaded.meta)
    if executor.is_dropped:
        executor.allocate_tensors()
    executor.load_tensors(loaded.tensors)
    state = OuterState(loaded.tensors[ANCHOR], loaded.tensors[VELOCITY], loaded.meta.outer_step, line)
    restore_random_state(loaded.meta)
    if loaded.meta.precision:  # another precision would not continue bit for bit
        executor.precision = Precision(loaded.meta.precision)
    executor.zero()
    return Restored(record, state, loaded.residual, progress)


@dataclass(frozen=True)
class Stage:
    """A stage ready to train. `record` is new if no checkpoint was restored."""

    executor: Executor
    outer_state: OuterState
    staging: StagingBuffers
    keeper: CheckpointSaver
    residual: Tensor | None = None  # (d,), see OuterSync
    outer_progress: OuterProgress = field(default_factory=OuterProgress)
    record: TrainingRecord = field(default_factory=TrainingRecord)
    is_restored: bool = False
    warnings: tuple[str, ...] = ()
    probe: PrecisionProbe | None = None  # None: the precision was given or stored

    @property
    def layers(self) -> LayerRange:
        """Layers of the stage's model."""
        return self.executor.model.layer_range


class Begun(Protocol):
    """Stage with its progress, restored or new."""

    @property
    def layers(self) -> LayerRange:
        """Layers of the stage."""
        ...

    @property
    def record(self) -> TrainingRecord:
        """Training record of the stage."""
        ...

    @property
    def is_restored(self) -> bool:
        """Whether the stage was restored from a checkpoint."""
        ...


def steps_behind(stages: Sequence[Begun]) -> tuple[str, ...]:
    """Warnings about stages of a node whose checkpoints are older than those of its other stages."""
    newest = max((stage.record.progress.steps for stage in stages), default=0)
    warnings: list[str] = []
    for stage in stages:
        layers, steps = stage.layers, stage.record.progress.steps
        if steps < newest:
            numbers = f"Layer {layers.stop}" if len(layers) == 1 else f"Layers {layers.start + 1}-{layers.stop}"
            found = f"resumes from step {steps:,}" if stage.is_restored else "begins untrained"
            found = found if len(layers) == 1 else found.replace("resumes", "resume").replace("begins", "begin")
            warnings.append(
                f"{numbers} {found}, while other layers here are at step {newest:,}: nothing newer of them was saved, "
                f"and {newest - steps:,} steps of these layers are lost."
            )
    return tuple(warnings)


def build_stage(
    parameters: RunParameters,
    identity: StageIdentity,
    device: torch.device,
    store: CheckpointStore,
    *,
    policy: CheckpointPolicy | None = None,
    precision: Precision | None = None,
    probes: RememberedProbes | None = None,
    moments_on_host: bool = False,
    compilation: Compilation | None = None,
    site: Site | None = None,
) -> Stage:
    """Build the stage of `identity.layers`. Runs on the compute thread, which has `identity.threads` threads.

    A restored stage keeps the precision of its checkpoint. A new stage, or one whose state came from another computer,
    uses `precision`, or the result of a probe, which `probes` remember; a stage that is divided among ranks is not
    probed. `moments_on_host` frees the device of AdamW's moments. With a `site`, all of its ranks compute the stage.

    Raises StorageError, CheckpointError, and NetworkRefusedError if this computer's subspace is not the run's.
    """
    model = StageModel(identity.architecture, identity.layers, subspace_of(parameters))
    is_sharded = site is not None and site.is_sharded
    if is_sharded:  # no device may have space for the whole stage
        precision = precision or (Precision.FP32 if device.type == "cpu" else Precision.BF16)
    else:
        model.to(device)
    optimizer = make_inner_optimizer(model, parameters.inner, moments_on_host=moments_on_host)
    schema = TensorSchema.of(model)
    sizes = schema.total_size, kept_length(parameters.outer, schema)
    anchor, kept = (torch.empty(size) for size in sizes)  # never written, so no physical memory is used
    tensors = stage_tensors(model, optimizer, OuterState(anchor, kept, 0))
    staging = StagingBuffers(
        TensorLayout.of(tensors), OUTER_TENSORS, pinned=device.type in PINNED_KINDS and not is_sharded
    )
    keeper = CheckpointSaver(store, staging, policy or CheckpointPolicy())
    restoration = keeper.restore(expectation(identity))
    executor = _executor_of(model, optimizer, device, parameters, compilation=compilation, site=site)
    if restoration.loaded is not None:
        if not restoration.loaded.meta.precision:  # the state came from another computer
            executor.precision = precision or _probe(model, parameters, device, probes).chosen
        return _restored_stage(
            restoration.loaded,
            warnings=restoration.warnings,
            executor=executor,
            identity=identity,
            staging=staging,
            keeper=keeper,
        )
    initialise(model, parameters.initial_weights_seed)
    probe = None
    if precision is None:
        probe = _probe(model, parameters, device, probes)
        precision = probe.chosen
    executor.precision = precision
    weights = flatten(model)
    if is_sharded:
        executor.load_vector(weights)
    outer_state = first_outer_state(parameters.outer, schema, weights)
    return Stage(executor, outer_state, staging, keeper, warnings=restoration.warnings, probe=probe)


def _executor_of(
    model: StageModel,
    optimizer: torch.optim.AdamW,
    device: torch.device,
    parameters: RunParameters,
    *,
    compilation: Compilation | None,
    site: Site | None,
) -> Executor:
    if site is not None and site.is_sharded:  # with tensors of its own
        return ShardedStage(site, parameters, model.layer_range, device)
    own = StageExecutor(model, optimizer, device, compilation=compilation)
    return own if site is None else SiteExecutor(own, site, parameters)


MOST_PROBED = 4  # sequences: the gain of bf16 grows with them, and the time of the probe does too


def _probe(
    model: StageModel, parameters: RunParameters, device: torch.device, probes: RememberedProbes | None
) -> PrecisionProbe:
    sequences = min(MOST_PROBED, parameters.batch_size)
    if probes is None:
        return probe_precision(model, device, sequences=sequences)
    return probes.probe(model, device, sequences)


def _restored_stage(
    loaded: LoadedCheckpoint,
    *,
    warnings: tuple[str, ...],
    executor: Executor,
    identity: StageIdentity,
    staging: StagingBuffers,
    keeper: CheckpointSaver,
) -> Stage:
    restored = load_into_stage(loaded, executor)
    return Stage(
        executor,
        restored.outer_state,
        staging,
        keeper,
        restored.residual,
        restored.outer_progress,
        restored.record,
        is_restored=True,
        warnings=warnings + thread_warnings(loaded.meta.threads, identity.threads),
    )
