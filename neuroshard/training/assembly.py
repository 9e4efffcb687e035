"""Builds one stage: model, optimizer and outer state, from the newest checkpoint or from the run's initial weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from neuroshard.config.run_parameters import RunParameters
from neuroshard.model.initial_weights import initialise
from neuroshard.model.tensor_schema import TensorSchema, flatten
from neuroshard.model.transformer import StageModel
from neuroshard.optim.inner import make_inner_optimizer
from neuroshard.optim.outer import OuterState
from neuroshard.training.checkpoint.keeper import CheckpointKeeper
from neuroshard.training.checkpoint.schedule import CheckpointPolicy
from neuroshard.training.checkpoint.staging import StagingBuffers
from neuroshard.training.checkpoint.store import CheckpointStore, LoadedCheckpoint
from neuroshard.training.checkpoint.tensor_file import TensorLayout
from neuroshard.training.executor import StageExecutor
from neuroshard.training.outer_sync import OuterProgress
from neuroshard.training.precision import Precision, PrecisionProbe, probe_precision
from neuroshard.training.record import StageIdentity, TrainingRecord
from neuroshard.training.saving import expectation, put_back, thread_warning
from neuroshard.training.stage_state import OUTER_TENSORS, materialise_moments, stage_tensors
from neuroshard.training.strategy import first_outer_state, kept_length
from neuroshard.types import LayerRange


@dataclass(frozen=True)
class Stage:
    """A stage ready to train. `record` is new when nothing was restored."""

    executor: StageExecutor
    outer_state: OuterState
    staging: StagingBuffers
    keeper: CheckpointKeeper
    residual: Tensor | None = None  # (d,), see OuterSync
    outer_progress: OuterProgress = field(default_factory=OuterProgress)
    record: TrainingRecord = field(default_factory=TrainingRecord)
    is_restored: bool = False
    warnings: tuple[str, ...] = ()
    probe: PrecisionProbe | None = None  # None: the precision was given or stored

    @property
    def layers(self) -> LayerRange:
        """Those of the stage."""
        return self.executor.model.layer_range


class Begun(Protocol):
    """A stage, as far as it has come."""

    @property
    def layers(self) -> LayerRange:
        """Those of it."""
        ...

    @property
    def record(self) -> TrainingRecord:
        """What it has done."""
        ...

    @property
    def is_restored(self) -> bool:
        """Whether a checkpoint was there."""
        ...


def steps_behind(stages: Sequence[Begun]) -> tuple[str, ...]:
    """What to say about stages of one node whose checkpoints are older than those of its others."""
    newest = max((stage.record.progress.steps for stage in stages), default=0)
    warnings: list[str] = []
    for stage in stages:
        layers, steps = stage.layers, stage.record.progress.steps
        if steps < newest:
            numbers = f"Layer {layers.stop}" if len(layers) == 1 else f"Layers {layers.start + 1}-{layers.stop}"
            found = f"goes on from step {steps:,}" if stage.is_restored else "begins anew"
            found = found if len(layers) == 1 else found.replace("goes", "go").replace("begins", "begin")
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
) -> Stage:
    """Build the stage of `identity.layers`; runs on the compute thread, whose thread count identity.threads tells.

    A restored stage keeps the precision of its checkpoint; a new one, or one whose state came from another computer,
    takes `precision`, or what a probe shows.
    Raises StorageError, CheckpointError.
    """
    model = StageModel(identity.architecture, identity.layers)
    model.to(device)
    optimizer = make_inner_optimizer(model, parameters.inner)
    materialise_moments(model, optimizer)
    schema = TensorSchema.of(model)
    sizes = schema.total_size, kept_length(parameters.outer, schema)
    anchor, kept = (torch.empty(size) for size in sizes)  # their memory is never touched
    tensors = stage_tensors(model, optimizer, OuterState(anchor, kept, 0))
    staging = StagingBuffers(TensorLayout.of(tensors), OUTER_TENSORS, pinned=device.type == "cuda")
    keeper = CheckpointKeeper(store, staging, policy or CheckpointPolicy())
    restoration = keeper.restore(expectation(identity))
    executor = StageExecutor(model, optimizer, device)
    if restoration.loaded is not None:
        if not restoration.loaded.meta.precision:  # the state came from another computer
            executor.precision = precision or _probe(model, parameters, device).chosen
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
        probe = _probe(model, parameters, device)
        precision = probe.chosen
    executor.precision = precision
    outer_state = first_outer_state(parameters.outer, schema, flatten(model))
    return Stage(executor, outer_state, staging, keeper, warnings=restoration.warnings, probe=probe)


def _probe(model: StageModel, parameters: RunParameters, device: torch.device) -> PrecisionProbe:
    return probe_precision(model, device, sequences=min(2, parameters.batch_size))


def _restored_stage(
    loaded: LoadedCheckpoint,
    *,
    warnings: tuple[str, ...],
    executor: StageExecutor,
    identity: StageIdentity,
    staging: StagingBuffers,
    keeper: CheckpointKeeper,
) -> Stage:
    restored = put_back(loaded, executor)
    warning = thread_warning(loaded.meta.threads, identity.threads)
    return Stage(
        executor,
        restored.outer_state,
        staging,
        keeper,
        restored.residual,
        restored.outer_progress,
        restored.record,
        is_restored=True,
        warnings=warnings if warning is None else (*warnings, warning),
    )
