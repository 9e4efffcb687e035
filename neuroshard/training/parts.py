"""What a trainer is made of, and what it needs of the data room."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from neuroshard.config.run_parameters import RunParameters
from neuroshard.data.feed import HeldOut
from neuroshard.data.windows import Batch
from neuroshard.status.data import DataStatus
from neuroshard.training.evaluation import PINNED_SEQUENCES
from neuroshard.training.executor import StageExecutor
from neuroshard.training.generation import TextGenerator
from neuroshard.training.held_out_vote import HeldOutVote
from neuroshard.training.outer_sync import OuterSync
from neuroshard.training.rounds.group_rounds import GroupRounds
from neuroshard.training.routing import Routing
from neuroshard.training.saving import Saver
from neuroshard.training.stage_service import StageService
from neuroshard.types import DataPosition, NodeId


class Feed(Protocol):
    """What the trainer needs of the data room's DataFeed."""

    @property
    def position(self) -> DataPosition:
        """The next unread window."""
        ...

    async def next_batch(self, sequences: int, *, step: int | None = None) -> Batch:
        """The next batch; nothing is consumed when cancelled."""
        ...

    async def held_out(self, count: int = PINNED_SEQUENCES) -> HeldOut:
        """The pinned held-out sequences."""
        ...

    def note_evaluation(self, train_loss: float, held_out_loss: float | None, step: int) -> None:
        """Note the losses of a step."""
        ...

    def status(self) -> DataStatus:
        """For the dashboard."""
        ...


@dataclass(frozen=True)
class Driving:
    """What a node has that drives microbatches. A lone node's routing knows one LocalHop around its own service."""

    node_id: NodeId
    feed: Feed
    routing: Routing
    in_flight: int = 1  # microbatches under way at the same time
    first_session: int = 1  # above those of earlier starts that other nodes may remember


@dataclass(frozen=True)
class StageParts:
    """One stage that a node holds. All stages of a node share one compute thread."""

    index: int  # of the run's stages
    service: StageService
    outer: OuterSync
    saver: Saver | None = None  # None: nothing is kept, for measurements
    group: GroupRounds | None = None  # rounds with other replicas; None: this node has nobody
    vote: HeldOutVote | None = None  # on their aggregates

    @property
    def executor(self) -> StageExecutor:
        """The stage's arithmetic."""
        return self.service.executor


@dataclass(frozen=True)
class TrainerParts:
    """What a trainer is made of."""

    parameters: RunParameters
    stages: tuple[StageParts, ...]  # in the order of their layers
    driving: Driving | None = None  # None: this node's layers get their work from others
    generator: TextGenerator | None = None
    versions: Callable[[int], RunParameters] | None = None  # by outer step; None: `parameters` hold all the time

    def in_force(self, stage: StageParts) -> RunParameters:
        """The version of the run's parameters that holds at a stage's present outer step."""
        return self.parameters if self.versions is None else self.versions(stage.outer.state.outer_step)
