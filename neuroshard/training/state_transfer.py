"""State transfer of a stage in training: the state donor, and the adoption of a received state."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Any, cast

from neuroshard.membership.reports import MAX_LOSS
from neuroshard.pipeline.executor import Precision
from neuroshard.state.checkpoint_manifest import CheckpointMeta
from neuroshard.state.checkpoint_saver import CheckpointSaver
from neuroshard.state.checkpoint_store import CheckpointStore
from neuroshard.state.outer_state import OuterProgress, may_serve_averaged
from neuroshard.state.receiver import ReceivedState
from neuroshard.state.replica_status import ReplicaStatus
from neuroshard.status.snapshot import CheckpointGeneration
from neuroshard.training.outer_sync import OuterSync
from neuroshard.training.record import Inherited, Progress, StageIdentity, TrainingRecord, to_meta
from neuroshard.types import NodeId


@dataclass(frozen=True)
class KnownCopy:
    """The newest copy of a stage that another node keeps."""

    node_id: NodeId
    taken_at: float  # when its state was taken, seconds since the epoch


@dataclass
class StateDonor:
    """See SnapshotSource. `steps` tells the stage's applied steps, `in_group` how it stands among its replicas."""

    keeper: CheckpointSaver
    outer: OuterSync
    steps: Callable[[], int]
    now: Callable[[], float] = time.time
    in_group: Callable[[], ReplicaStatus] | None = None
    replicas: Callable[[], int] = lambda: 1  # of the stage, this one included
    copy: KnownCopy | None = field(default=None, init=False)

    def standing(self) -> ReplicaStatus:
        """See SnapshotSource."""
        return self.own() if self.in_group is None else self.in_group()

    def own(self) -> ReplicaStatus:
        """How the stage stands by itself."""
        progress = self.outer.progress
        return ReplicaStatus(
            is_live=True,
            steps=self.steps(),
            outer_step=self.outer.state.outer_step,
            root=progress.state_root,
            copied_seconds=None if self.copy is None else max(0.0, self.now() - self.copy.taken_at),
            sequences=progress.sequences,
            wallet_rounds=progress.wallet_rounds,
        )

    def newest(self) -> CheckpointGeneration | None:
        """See SnapshotSource."""
        generations = self.keeper.store.generations()
        return generations[0] if generations else None

    def want(self) -> float:
        """See SnapshotSource."""
        return self.keeper.want()

    def may_be_taken(self, waited_seconds: float) -> bool:
        """See SnapshotSource: of averaged gradients, which change all of it at every step, while a step is young.

        How far a step is this node tells by its own part of it.
        """
        parameters, replicas = self.outer.parameters, self.replicas()
        if parameters.strategy != "averaging" or replicas == 1:
            return True
        counted = self.outer.progress.sequences * replicas
        return may_serve_averaged(counted, parameters.averaged_sequences, waited_seconds)

    def copied(self, peer: NodeId, taken_at: float) -> None:
        """See SnapshotSource; the newest one counts."""
        taken_at = min(taken_at, self.now())
        if self.copy is None or taken_at >= self.copy.taken_at:
            self.copy = KnownCopy(peer, taken_at)


def adopted_meta(received: ReceivedState, identity: StageIdentity) -> CheckpointMeta:
    """A record that goes on where the donor's stage was.

    Steps, tokens and what counts towards the next round go on; the donor's curve, tests, data and generator do not.
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
        line_sequences=_count(meta.extra.get("outer"), "line_sequences"),
        since_round=_count(meta.extra.get("outer"), "since_round"),
        state_root=received.root,
    )
    made = to_meta(
        TrainingRecord(progress, inherited=Inherited(meta.step, meta.tokens)),
        outer=outer,
        outer_step=meta.outer_step,
        identity=identity,
        precision=Precision.FP32,
        time=meta.time,
    )
    return replace(made, rng={}, precision="")


def install(received: ReceivedState, identity: StageIdentity, store: CheckpointStore) -> None:
    """Make it the newest checkpoint of the stage; blocks. Raises StorageError."""
    store.adopt(adopted_meta(received, identity), received.path, received.manifest.checkpoint.tensors.sha256)


def _loss(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and isfinite(value) and 0 <= value <= MAX_LOSS else None


def _count(fields: Any, name: str) -> int:
    value = cast("Mapping[str, Any]", fields).get(name) if isinstance(fields, Mapping) else None
    return value if type(value) is int and 0 <= value < 1 << 48 else 0
