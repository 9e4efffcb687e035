"""Builds the stage of a run on the compute thread: model, optimizer, outer state, checkpoints; and restores it."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from neuroshard.config.run_parameters import RunParameters
from neuroshard.config.settings import Settings
from neuroshard.identity import NodeIdentity
from neuroshard.model.initial_weights import initialise
from neuroshard.model.tensor_schema import TensorSchema, flatten
from neuroshard.model.transformer import StageModel
from neuroshard.node.own_run import OwnRun
from neuroshard.node.probe import Device
from neuroshard.optim.inner import make_inner_optimizer
from neuroshard.optim.outer import fresh_outer_state
from neuroshard.training.checkpoint.keeper import CheckpointKeeper
from neuroshard.training.checkpoint.schedule import CheckpointPolicy
from neuroshard.training.checkpoint.staging import StagingBuffers
from neuroshard.training.checkpoint.store import CheckpointStore, StorageLimits, stage_folder
from neuroshard.training.checkpoint.tensor_file import TensorLayout
from neuroshard.training.compute import ComputeThread
from neuroshard.training.exchange import StageRounds, lone_exchange
from neuroshard.training.executor import StageExecutor
from neuroshard.training.outer_sync import OuterSync
from neuroshard.training.precision import probe_precision
from neuroshard.training.record import StageIdentity, TrainingRecord
from neuroshard.training.saving import Saver
from neuroshard.training.stage_state import OUTER_TENSORS, materialise_moments, stage_tensors
from neuroshard.types import LayerRange

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Stage:
    """The built parts of one stage."""

    executor: StageExecutor
    outer: OuterSync
    keeper: CheckpointKeeper
    saver: Saver
    record: TrainingRecord


def checkpoint_policy(settings: Settings) -> CheckpointPolicy:
    """What the owner allows checkpoints to cost."""
    return CheckpointPolicy(
        min_seconds=settings.checkpoint_min_seconds, bytes_per_day=settings.checkpoint_write_gb_per_day * 1e9
    )


def storage_limits(settings: Settings) -> StorageLimits:
    """Space for the checkpoints."""
    return StorageLimits(own_bytes=settings.max_checkpoint_storage * 1_000_000)


async def build_stage(
    *,
    compute: ComputeThread,
    settings: Settings,
    identity: NodeIdentity,
    run: OwnRun,
    layers: LayerRange,
    device: Device,
    threads: int,
) -> Stage:
    """Build the stage and put the newest checkpoint back. Raises StorageError when the folder cannot be used."""
    folder = stage_folder(settings.data_dir, identity.wallet_id, run.run_id, layers)
    stage_identity = StageIdentity(
        identity.wallet_id, identity.node_id, run.run_id, run.parameters.architecture, layers, threads
    )
    builder = _Builder(
        compute=compute, settings=settings, run=run, device=device, folder=folder, identity=stage_identity
    )
    stage = await compute.run(builder.build)
    restored = await stage.saver.restore()
    if restored is None:
        await compute.run(builder.choose_precision)
        return stage
    record, outer_state, progress = restored
    stage.outer.restore(outer_state, progress)
    return Stage(stage.executor, stage.outer, stage.keeper, stage.saver, record)


class _Builder:
    """Runs on the compute thread, because everything it makes belongs there."""

    def __init__(
        self,
        *,
        compute: ComputeThread,
        settings: Settings,
        run: OwnRun,
        device: Device,
        folder: Path,
        identity: StageIdentity,
    ) -> None:
        self._compute = compute
        self._settings = settings
        self._run = run
        self._device = device
        self._folder = folder
        self._identity = identity
        self._executor: StageExecutor | None = None

    def build(self) -> Stage:
        """A fresh stage with initial weights."""
        parameters = self._run.parameters
        model = StageModel(parameters.architecture, self._identity.layers)
        initialise(model, seed=parameters.initial_weights_seed)
        model.to(self._device.torch_device())
        optimizer = make_inner_optimizer(model, parameters.inner)
        materialise_moments(model, optimizer)
        executor = self._executor = StageExecutor(model, optimizer, self._device.torch_device())
        outer = self._outer_sync(parameters, model)
        staging = StagingBuffers(
            TensorLayout.of(stage_tensors(model, optimizer, outer.state)),
            by_reference=OUTER_TENSORS,
            pinned=self._device.kind == "cuda",
        )
        store = CheckpointStore(self._folder, storage_limits(self._settings))
        keeper = CheckpointKeeper(store, staging, checkpoint_policy(self._settings))
        saver = Saver(
            compute=self._compute,
            keeper=keeper,
            identity=self._identity,
            executor=executor,
            outer=outer,
            staging=staging,
        )
        return Stage(executor, outer, keeper, saver, TrainingRecord())

    def choose_precision(self) -> None:
        """For a new run: bf16 autocast only where it is clearly faster on this computer."""
        if self._executor is None:
            raise AssertionError("the stage is built first")
        probe = probe_precision(self._executor.model, self._device.torch_device())
        self._executor.precision = probe.chosen
        log.info("Precision %s: bf16 autocast would be %.2f times as fast.", probe.chosen.value, probe.gain)

    def _outer_sync(self, parameters: RunParameters, model: StageModel) -> OuterSync:
        rounds = StageRounds(self._run.run_id, 0, TensorSchema.of(model).sha256, parameters.outer)
        return OuterSync(
            compute=self._compute,
            model=model,
            parameters=parameters.outer,
            exchange=lone_exchange(self._identity.node_id, rounds),
            state=fresh_outer_state(flatten(model)),
        )
