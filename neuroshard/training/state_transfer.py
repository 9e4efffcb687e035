"""State transfer of a stage in training: the state donor, and the adoption of a received state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import isfinite
from typing import Any, cast

from neuroshard.consensus.group_rounds import GroupRounds
from neuroshard.pipeline.executor import Precision
from neuroshard.state.checkpoint_manifest import CheckpointMeta
from neuroshard.state.checkpoint_saver import CheckpointSaver
from neuroshard.state.checkpoint_store import CheckpointStore
from neuroshard.state.outer_state import OuterProgress, count_of, line_from_json, may_serve_averaged
from neuroshard.state.receiver import ReceivedState
from neuroshard.state.replica_status import ReplicaStatus
from neuroshard.status.snapshot import CheckpointGeneration
from neuroshard.training.outer_sync import OuterSync, ReplicaProgress
from neuroshard.training.record import Inherited, Progress, StageIdentity, TrainingRecord, to_meta
from neuroshard.types import MAX_LOSS, NodeId


class StateDonor:
    """Offers the states of a stage in training to other nodes."""

    def __init__(
        self,
        keeper: CheckpointSaver,
        outer: OuterSync,
        progress: ReplicaProgress,
        group: GroupRounds | None = None,
    ) -> None:
        """`group` knows the stage's other replicas; without it, there are none."""
        self._keeper = keeper
        self._outer = outer
        self._progress = progress
        self._group = group

    def replica_status(self) -> ReplicaStatus:
        """Status of the stage among its replicas."""
        return self._progress.status() if self._group is None else self._group.replica_status()

    def newest(self) -> CheckpointGeneration | None:
        generations = self._keeper.store.generations()
        return generations[0] if generations else None

    def want(self) -> float:
        return self._keeper.want()

    def may_be_taken(self, waited_seconds: float) -> bool:
        """Whether a peer that has waited for this time may fetch the state now.

        Averaged gradients change the whole state at every step, so a transfer may only begin early in a step. This node
        estimates the progress of the step from its own part of it.
        """
        parameters = self._outer.parameters.outer
        replicas = 1 if self._group is None else 1 + self._group.peer_count
        if parameters.strategy != "averaging" or replicas == 1:
            return True
        counted = self._outer.progress.sequences * replicas
        return may_serve_averaged(counted, parameters.averaged_sequences, waited_seconds)

    def copied(self, peer: NodeId, taken_at: float) -> None:
        """Record that a peer keeps a copy of the state of this time (seconds since the epoch)."""
        self._progress.note_copy(peer, taken_at)


def adopted_meta(received: ReceivedState, identity: StageIdentity) -> CheckpointMeta:
    """Create the record of a stage that continues from a donor's state.

    Steps, tokens and the progress towards the next round continue. The donor's curve, evaluations, data position and
    random generator do not.
    """
    meta = received.manifest.meta
    progress = Progress(
        steps=meta.step,
        tokens=meta.tokens,
        sequences=meta.sequences,
        loss_ema=_loss(meta.loss_ema),
        initial_loss=_loss(meta.extra.get("initial_loss")),
    )
    outer = OuterProgress(
        inner_steps=meta.inner_step,
        sequences=_count(meta.extra.get("outer"), "sequences"),
        since_round=_count(meta.extra.get("outer"), "since_round"),
        state_root=received.root,
    )
    made = to_meta(
        TrainingRecord(progress, inherited=Inherited(meta.step, meta.tokens)),
        outer=outer,
        outer_step=meta.outer_step,
        line=line_from_json(meta.extra.get("outer")),
        identity=identity,
        precision=Precision.FP32,
        time=meta.time,
    )
    return replace(made, rng={}, precision="")


def install(received: ReceivedState, identity: StageIdentity, store: CheckpointStore) -> None:
    """Store a received state as the newest checkpoint of the stage. Blocks on disk. Raises StorageError."""
    store.adopt(adopted_meta(received, identity), received.path, received.manifest.checkpoint.tensors.sha256)


def _loss(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and isfinite(value) and 0 <= value <= MAX_LOSS else None


def _count(fields: Any, name: str) -> int:
    return count_of(cast("Mapping[str, Any]", fields).get(name)) if isinstance(fields, Mapping) else 0
