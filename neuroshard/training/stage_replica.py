"""This node's replica of one stage: owns its state, rounds, vote and checkpoints, and gives its state to others.

service   admits and computes microbatches
outer     the outer state, and the steps that change it
keeper    the checkpoints on this disk, which other nodes download; `saver` fills them
vote      measures the aggregates of the rounds
group     matchmaking and rounds with the other replicas
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import anyio

from neuroshard.config.run_parameters import RunParameters
from neuroshard.consensus.committee import GroupMember
from neuroshard.consensus.group_rounds import GroupRounds
from neuroshard.consensus.round_runner import RoundDependencies
from neuroshard.consensus.sync_strategies import StageRounds
from neuroshard.model.weights import TensorSchema
from neuroshard.pipeline.arithmetic import Executor
from neuroshard.pipeline.control import Control
from neuroshard.pipeline.executor import ComputeThread
from neuroshard.pipeline.stage_server import ServiceLimits, StageServer
from neuroshard.state.kept_states import KeptState, kept_states
from neuroshard.state.outer_state import may_serve_averaged
from neuroshard.state.replica_status import ReplicaStatus
from neuroshard.state.transfer_messages import StageName
from neuroshard.status.snapshot import CheckpointGeneration
from neuroshard.training.archivist import Archivist
from neuroshard.training.gradient_sync import make_outer_sync
from neuroshard.training.held_out_vote import HeldOutVote, VoteRule
from neuroshard.training.record import StageIdentity
from neuroshard.training.stage_checkpoint import Saver, Stage
from neuroshard.types import LayerRange, NodeId


class StageReplica:
    """A `Replica` for the rounds of the stage, and a `SnapshotSource` for the nodes that fetch its state.

    It does not refer to the tensors that it began with, so that their memory is freed once training has begun. All
    stages of a node share one compute thread.
    """

    def __init__(
        self,
        compute: ComputeThread,
        stage: Stage,
        identity: StageIdentity,
        parameters: RunParameters,
        index: int = 0,
        *,
        versions: Callable[[int], RunParameters],
        control: Control | None = None,
        around: RoundDependencies | None = None,
        rule: VoteRule | None = None,
        limits: ServiceLimits | None = None,
        kept_graphs: int | None = None,
        archive_every: int | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        """`versions` returns the run's parameters that apply at an outer step; `parameters` are the first ones.

        `control` can hold the trainer of the stage. Without `around`, the stage has no other replicas, and nobody
        certifies its steps. `rule` is that of the vote; `limits` and `kept_graphs` are those of StageServer. With
        `archive_every`, it keeps a checkpoint for ever after this number of outer steps. `now` returns seconds since
        the epoch.
        """
        self.index = index  # number of the stage in the run
        self.record = stage.record
        self.is_restored, self.warnings = stage.is_restored, stage.warnings
        self.service = StageServer(
            compute,
            stage.executor,
            sequences_per_step=parameters.sequences_per_step,
            batch_size=parameters.batch_size,
            limits=limits,
            kept_graphs=kept_graphs,
        )
        self.keeper = stage.keeper
        self.outer = make_outer_sync(compute, stage, versions, index)
        self.saver = Saver(
            compute=compute,
            keeper=stage.keeper,
            identity=identity,
            executor=stage.executor,
            outer=self.outer,
            staging=stage.staging,
        )
        self.vote = HeldOutVote(compute, stage.executor, self.outer, parameters.batch_size, rule)
        self.member = GroupMember(identity.node_id, identity.wallet_id)
        self.stage = StageName(identity.run_id, identity.layers)
        schema = TensorSchema.of(stage.executor.model)
        self.terms = StageRounds(identity.run_id, index, schema, parameters.outer, versions)
        self.copy_keeper: NodeId | None = None
        self._copied_at: float | None = None  # time of the newest state of which `copy_keeper` has a copy
        self.control = control or Control()
        self._now = now
        archives = archive_every is not None
        self._archivist = Archivist(stage.keeper.store, identity.layers, archive_every) if archives else None
        self.group = None if around is None else GroupRounds(self, around)  # None: this node is alone

    @property
    def executor(self) -> Executor:
        """Executor of the stage's server."""
        return self.service.executor

    @property
    def layers(self) -> LayerRange:
        """Layer range of the stage's model."""
        return self.stage.layers

    async def run(self) -> None:
        """Serve the stage, follow its root and take part in its rounds, until cancelled. Raises StorageError."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.service.run)
            tasks.start_soon(self.outer.keep_root)
            if self.group is not None:
                tasks.start_soon(self.group.run)
                tasks.start_soon(self.outer.update_root)  # peers look for replicas with the same root
                if self._archivist is not None:
                    tasks.start_soon(self._archivist.run, self.group.chain)

    async def must_follow(self) -> None:
        """Wait until the rounds prove a newer state that this node must download."""
        if self.group is None:
            await anyio.sleep_forever()
        else:
            await self.group.must_follow.wait()

    # SnapshotSource: what the nodes that fetch the state ask

    def replica_status(self) -> ReplicaStatus:
        """Status of the stage among its replicas."""
        status = self.outer.own_status() if self.group is None else self.group.replica_status()
        copied = None if self._copied_at is None else max(0.0, self._now() - self._copied_at)
        return replace(status, steps=self.record.progress.steps, copied_seconds=copied)

    def newest(self) -> CheckpointGeneration | None:
        generations = self.keeper.store.generations()
        return generations[0] if generations else None

    def states(self) -> Sequence[KeptState]:
        return list(kept_states(self.keeper.store))

    def want(self) -> float:
        return self.keeper.want()

    def may_be_taken(self, waited_seconds: float) -> bool:
        """Whether a peer that has waited for this time may fetch the state now.

        Averaged gradients change the whole state at every step, so a transfer may only begin early in a step. This node
        estimates the progress of the step from its own part of it.
        """
        parameters = self.outer.parameters.outer
        replicas = 1 if self.group is None else 1 + len(self.group.peers())
        if parameters.strategy != "averaging" or replicas == 1:
            return True
        counted = self.outer.progress.sequences * replicas
        return may_serve_averaged(counted, parameters.averaged_sequences, waited_seconds)

    def copied(self, peer: NodeId, taken_at: float) -> None:
        """Record that a peer keeps a copy of the state of this time; only the newest copy counts."""
        taken_at = min(taken_at, self._now())
        if self._copied_at is None or taken_at >= self._copied_at:
            self._copied_at, self.copy_keeper = taken_at, peer
