"""The stage this node trains: built or restored on the compute thread, with its rounds and its checkpoints."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial

from neuroshard.config.settings import Settings
from neuroshard.consensus.round_runner import RoundDependencies
from neuroshard.consensus.stage_chain import FileChainStore, StageChain
from neuroshard.consensus.vote_log import ROUNDS_FOLDER, FileVoteLog
from neuroshard.host.computer import processor_name
from neuroshard.host.resources import Device
from neuroshard.identity import NodeIdentity
from neuroshard.node.own_stages import StageWork
from neuroshard.node.stage_swarm import StageSwarm
from neuroshard.node.stage_versions import StageVersions
from neuroshard.pipeline.compilation import Compilation
from neuroshard.pipeline.control import Control
from neuroshard.pipeline.executor import ComputeThread, Precision
from neuroshard.pipeline.precision_probe import RememberedProbes
from neuroshard.runs.stored_runs import LocalRun
from neuroshard.state.checkpoint_saver import CheckpointPolicy
from neuroshard.state.checkpoint_store import CheckpointStore, stage_folder
from neuroshard.state.disk_space import StorageLimits, state_folders
from neuroshard.training.held_out_vote import AMONG_FRIENDS, VoteRule
from neuroshard.training.record import StageIdentity
from neuroshard.training.site.site import Site
from neuroshard.training.stage_checkpoint import build_stage
from neuroshard.training.stage_replica import StageReplica
from neuroshard.types import LayerRange

_LOG = logging.getLogger(__name__)


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
    archive_every: int | None = None  # outer steps; None: this node archives nothing

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
        shape = run.parameters.architecture
        seed = run.parameters.initial_weights_seed if shape.subspace_rank else None
        stage_identity = StageIdentity(
            identity.wallet_id, identity.node_id, run.run_id, shape, layers, threads, subspace_seed=seed
        )
        store = CheckpointStore(folder, storage_limits(settings, stages), settings.data_dir)
        archive_every = settings.archive_every if settings.archive else None
        return cls(stage_identity, store, checkpoint_policy(settings, stages), archive_every)


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
    compilation: Compilation | None = None,
    site: Site | None = None,
) -> StageReplica:
    """Build a stage of the run, or restore its newest checkpoint. Raises StorageError, CheckpointError.

    A new stage computes in `precision`, or without one in the precision that a probe of this or an earlier start found
    faster. With a `site`, all of its ranks compute the stage.
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
            probes=_remembered_probes(home, device),
            moments_on_host=work.moments_on_host,
            compilation=compilation,
            site=site,
        )
    )
    if (probe := stage.probe) is not None:
        _LOG.info("Computing in %s: bf16 is %.2f times as fast as fp32 here.", probe.chosen.value, probe.gain)
    if stage.is_restored:
        _LOG.info("Resuming at step %s.", f"{stage.record.progress.steps:,}")
    rounds = home.store.folder / ROUNDS_FOLDER
    chain = StageChain(partial(swarm.versions.founding_of, index), FileChainStore(rounds, home.store.data_dir))
    await chain.load()  # the first step needs the version of the run that applies
    votes, earlier = FileVoteLog(rounds, home.store.data_dir), swarm.rounds.earlier(swarm.name_of(index))
    around = RoundDependencies(swarm, swarm.asking, votes, chain, reported=earlier)
    return StageReplica(
        compute,
        stage,
        home.identity,
        run.parameters,
        index,
        versions=StageVersions(swarm.versions.offer.initial, chain).at,
        control=control,
        around=around,
        rule=VoteRule() if run.parameters.admits_strangers else AMONG_FRIENDS,
        limits=work.limits,
        kept_graphs=work.kept_graphs,
        archive_every=home.archive_every,
    )


def _remembered_probes(home: StageHome, device: Device) -> RememberedProbes | None:
    """Results of earlier starts on this computer; None without a data folder."""
    name = processor_name() if device.kind == "cpu" else device.label
    folder = home.store.data_dir
    return None if folder is None else RememberedProbes(folder, name, home.identity.threads)
