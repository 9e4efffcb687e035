"""What a trainer is made of, and what it needs of the data room."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from neuroshard.config.run_parameters import RunParameters
from neuroshard.data.feed import HeldOut
from neuroshard.data.windows import Batch
from neuroshard.status.snapshot import DataStatus
from neuroshard.training.compute import ComputeThread
from neuroshard.training.evaluation import PINNED_SEQUENCES
from neuroshard.training.executor import StageExecutor
from neuroshard.training.generation import TextGenerator
from neuroshard.training.outer_sync import OuterSync
from neuroshard.training.pipeline import Hop
from neuroshard.training.saving import Saver
from neuroshard.types import DataPosition


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
class TrainerParts:
    """What a trainer is made of. A lone node's route is one LocalHop around its own executor."""

    parameters: RunParameters
    compute: ComputeThread
    executor: StageExecutor
    route: Sequence[Hop]
    feed: Feed
    outer: OuterSync
    saver: Saver | None = None  # None: nothing is kept, for measurements
    generator: TextGenerator | None = None
    stage: int = 0
