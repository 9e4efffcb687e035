"""The stage this node trains: built or restored on the compute thread, with its rounds and its checkpoints."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from neuroshard.config.run_parameters import OuterOptimization, RunParameters
from neuroshard.config.settings import Settings
from neuroshard.consensus.committee import GroupMember
from neuroshard.consensus.group_rounds import AcceptanceCheck, GroupRounds
from neuroshard.consensus.matchmaking import Replica
from neuroshard.consensus.stage_chain import FileChainStore, StageChain
from neuroshard.consensus.sync_strategies import StageRounds
from neuroshard.consensus.vote_log import ROUNDS_FOLDER, FileVoteLog
from neuroshard.host.resources import Device
from neuroshard.identity import NodeIdentity
from neuroshard.model.weights import TensorSchema
from neuroshard.node.own_stages import StageWork
from neuroshard.node.stage_swarm import StageSwarm
from neuroshard.pipeline.control import Control
from neuroshard.pipeline.executor import ComputeThread, Precision
from neuroshard.pipeline.stage_server import StageServer
from neuroshard.runs.stored_runs import LocalRun
from neuroshard.state.checkpoint_saver import CheckpointPolicy, CheckpointSaver
from neuroshard.state.checkpoint_store import CheckpointStore, stage_folder
from neuroshard.state.disk_space import StorageLimits, state_folders
from neuroshard.training.gradient_sync import make_outer_sync
from neuroshard.training.held_out_vote import AMONG_FRIENDS, HeldOutVote, VoteRule
from neuroshard.training.outer_sync import OuterSync, ReplicaProgress, lone_exchange
from neuroshard.training.parts import StageParts
from neuroshard.training.record import StageIdentity, TrainingRecord
from neuroshard.training.stage_checkpoint import Saver, Stage, build_stage
from neuroshard.training.state_transfer import StateDonor
from neuroshard.types import LayerRange

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class LiveStage:
    """A stage with the parts that synchronise and save it.

    It does not refer to the tensors that it began with, so that their memory is freed once training has begun.
    """

    record: TrainingRecord
    keeper: CheckpointSaver
    is_restored: bool
    warnings: tuple[str, ...]
    parts: StageParts
    snapshots: StateDonor  # sends the stage's state to other nodes
    group: GroupRounds

    @property
    def layers(self) -> LayerRange:
        """Layer range of the stage's model."""
        return self.parts.service.executor.model.layer_range


def checkpoint_policy(settings: Settings, stages: int = 1) -> CheckpointPolicy:
    """Limits on one stage's checkpoints: all `stages` of the node share the owner's write budget equally."""
    bytes_per_day = settings.checkpoint_write_gb_per_day * 1e9 / stages
    return CheckpointPolicy(min_seconds=settings.checkpoint_min_seconds, bytes_per_day=bytes_per_day)


def storage_limits(settings: Settings, stages: int = 1) -> StorageLimits:
    """Disk space for one stage's checkpoints: `stages` share the limit, and all states in the data folder count."""
    limit = settings.max_checkpoint_storage * 1_000_000
    counted = state_folders(settings.data_dir)
    return StorageLimits(own_bytes=limit // stages, all_bytes=limit, counted=counted)


@dataclass(frozen=True)
class StageHome:
    """Identity of a stage on this computer, with the store and the policy of its checkpoints."""

    identity: StageIdentity
    store: CheckpointStore
    policy: CheckpointPolicy

    @classmethod
    def of(
        cls,
        settings: Settings,
        identity: NodeIdentity,
        run: LocalRun,
        *,
        layers: LayerRange,
        threads: int,
        stages: int = 1,
    ) -> StageHome:
        """Describe these layers on this computer; all `stages` of the node share the limits on checkpoints."""
        folder = stage_folder(settings.data_dir, identity.wallet_id, run.run_id, layers)
        stage_identity = StageIdentity(
            identity.wallet_id, identity.node_id, run.run_id, run.parameters.architecture, layers, threads
        )
        store = CheckpointStore(folder, storage_limits(settings, stages), settings.data_dir)
        return cls(stage_identity, store, checkpoint_policy(settings, stages))


async def bring_up_stage(
    *,
    compute: ComputeThread,
    home: StageHome,
    run: LocalRun,
    swarm: StageSwarm,
    index: int,
    device: Device,
    work: StageWork,
    control: Control,
    precision: Precision | None = None,
) -> LiveStage:
    """Build a stage of the run, or restore its newest checkpoint. Raises StorageError, CheckpointError.

    A new stage computes in `precision`, or without one in the precision that a probe finds faster.
    """
    stage = await compute.run(
        partial(
            build_stage,
            run.parameters,
            home.identity,
            device.torch_device(),
            home.store,
            policy=home.policy,
            precision=precision,
        )
    )
    if stage.probe is not None:
        _LOG.info(
            "Computing in %s: bf16 is %.2f times as fast as fp32 here.", stage.probe.chosen.value, stage.probe.gain
        )
    if stage.is_restored:
        _LOG.info("Resuming at step %s.", f"{stage.record.progress.steps:,}")
    service = StageServer(
        compute,
        stage.executor,
        sequences_per_step=run.parameters.sequences_per_step,
        batch_size=run.parameters.batch_size,
        limits=work.limits,
        kept_graphs=work.kept_graphs,
    )
    outer, group, snapshots, vote = _outer_part(compute, home, run, swarm, index=index, stage=stage, control=control)
    saver = Saver(
        compute=compute,
        keeper=stage.keeper,
        identity=home.identity,
        executor=stage.executor,
        outer=outer,
        staging=stage.staging,
    )
    parts = StageParts(index, service, outer, saver, group, vote)
    return LiveStage(stage.record, stage.keeper, stage.is_restored, stage.warnings, parts, snapshots, group)


def _outer_part(
    compute: ComputeThread,
    home: StageHome,
    run: LocalRun,
    swarm: StageSwarm,
    *,
    index: int,
    stage: Stage,
    control: Control,
) -> tuple[OuterSync, GroupRounds, StateDonor, HeldOutVote]:
    """Build the stage's outer step with its other replicas, and the donor that sends its state to them."""
    model = stage.executor.model
    outer_at = _outer_parameters(swarm.versions.at)
    rounds = StageRounds(
        run.run_id,
        index,
        TensorSchema.of(model),
        run.parameters.outer,
        outer_at,
        lambda: stage.keeper.saved_outer_step,
    )
    outer = make_outer_sync(compute, stage, swarm.versions.at, index)
    progress = ReplicaProgress(outer, stage.record)

    def may_take_part() -> bool:
        # no replica may wait for a node that has agreed to a round and then pauses, sleeps, ends or sends nothing
        return control.must_hold is None and swarm.may_send_large() and not swarm.is_asleep

    replica = Replica(
        GroupMember(home.identity.node_id, home.identity.wallet_id),
        swarm.name_of(index),
        rounds,
        outer.sequences_due,
        progress.status,
        partial(swarm.replicas, index),
        swarm.wallet_of,
        may_take_part,
        time.time,
        swarm.newcomers,
        is_removed=swarm.is_removed,
        word=lambda: swarm.versions.foundations.word,
        copy_keeper=lambda: progress.copy_keeper,
    )
    rule = VoteRule() if run.parameters.admission == "strangers" else AMONG_FRIENDS
    vote = HeldOutVote(compute, stage.executor, outer, run.parameters.batch_size, rule)
    group = GroupRounds(
        replica,
        swarm.asking,
        lone_exchange,
        swarm.sign,
        AcceptanceCheck(outer.root_after, outer.measured_candidates, vote.objection, vote.choice),
        book=FileVoteLog(home.store.folder / ROUNDS_FOLDER, home.store.data_dir),
        chain=StageChain(
            partial(swarm.versions.founding_of, index),
            FileChainStore(home.store.folder / ROUNDS_FOLDER, home.store.data_dir),
        ),
        reported=swarm.rounds.earlier(swarm.name_of(index)),
        note_abandoned=outer.note_abandoned,
    )
    return outer, group, StateDonor(stage.keeper, outer, progress, group), vote


def _outer_parameters(versions: Callable[[int], RunParameters]) -> Callable[[int], OuterOptimization]:
    return lambda outer_step: versions(outer_step).outer
