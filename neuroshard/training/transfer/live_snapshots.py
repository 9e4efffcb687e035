"""What others can have of a stage that this node trains: checkpoints, made sooner when somebody wishes for one."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from neuroshard.status.snapshot import CheckpointGeneration
from neuroshard.swarm.schedule import may_serve_averaged
from neuroshard.training.checkpoint.keeper import CheckpointKeeper
from neuroshard.training.outer_sync import OuterSync
from neuroshard.training.transfer.standing import Standing
from neuroshard.types import NodeId


@dataclass(frozen=True)
class SecondCopy:
    """The newest copy of a stage that another node keeps."""

    node_id: NodeId
    taken_at: float  # when its state was taken, seconds since the epoch


@dataclass
class LiveSnapshots:
    """See Snapshots. `steps` tells the stage's applied steps, `in_group` how it stands among its replicas."""

    keeper: CheckpointKeeper
    outer: OuterSync
    steps: Callable[[], int]
    now: Callable[[], float] = time.time
    in_group: Callable[[], Standing] | None = None
    replicas: Callable[[], int] = lambda: 1  # of the stage, this one included
    copy: SecondCopy | None = field(default=None, init=False)

    def standing(self) -> Standing:
        """See Snapshots."""
        return self.own() if self.in_group is None else self.in_group()

    def own(self) -> Standing:
        """How the stage stands by itself."""
        progress = self.outer.progress
        return Standing(
            is_live=True,
            steps=self.steps(),
            outer_step=self.outer.state.outer_step,
            root=progress.state_root,
            copied_seconds=None if self.copy is None else max(0.0, self.now() - self.copy.taken_at),
            sequences=progress.sequences,
            wallet_rounds=progress.wallet_rounds,
        )

    def newest(self) -> CheckpointGeneration | None:
        """See Snapshots."""
        generations = self.keeper.store.generations()
        return generations[0] if generations else None

    def want(self) -> float:
        """See Snapshots."""
        return self.keeper.want()

    def may_be_taken(self, waited_seconds: float) -> bool:
        """See Snapshots: of averaged gradients, which change all of it at every step, while a step is young.

        How far a step is this node tells by its own part of it.
        """
        parameters, replicas = self.outer.parameters, self.replicas()
        if parameters.strategy != "averaging" or replicas == 1:
            return True
        counted = self.outer.progress.sequences * replicas
        return may_serve_averaged(counted, parameters.averaged_sequences, waited_seconds)

    def copied(self, peer: NodeId, taken_at: float) -> None:
        """See Snapshots; the newest one counts."""
        taken_at = min(taken_at, self.now())
        if self.copy is None or taken_at >= self.copy.taken_at:
            self.copy = SecondCopy(peer, taken_at)
