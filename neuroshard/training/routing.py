"""Who does the stages of a microbatch: what a driver asks, and the answer where stages never change hands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import anyio

from neuroshard.training.microbatch import StageError
from neuroshard.training.pipeline import Hop

RETRY_SECONDS = 0.5


class Routing(Protocol):
    """Knows who holds the stages of a run, and chooses among them."""

    @property
    def stage_count(self) -> int:
        """Of the run: a whole model, never a shorter one."""
        ...

    @property
    def obstacle(self) -> str | None:
        """Why microbatches wait for a stage at present; None while they do not."""
        ...

    async def hop(self, stage: int) -> Hop:
        """Whoever shall do a microbatch in this stage; waits while nobody can. One of the other calls ends that."""
        ...

    def finished(self, stage: int, hop: Hop, seconds: float) -> None:
        """It did the stage's work for the microbatch; its answers took so long altogether."""
        ...

    def left(self, stage: int, hop: Hop) -> None:
        """It was needed for something else, or not to the end, and did not fail."""
        ...

    def busy(self, stage: int, hop: Hop, error: StageError) -> None:
        """It is there and cannot do the work yet; it will be asked again soon."""
        ...

    def failed(self, stage: int, hop: Hop, error: StageError) -> None:
        """It cannot be used now; the next `hop` of this stage names another one if there is one."""
        ...


class FixedRouting:
    """One hop for each stage, for good. One that failed is named again after a while."""

    def __init__(self, route: Sequence[Hop]) -> None:
        self._route = tuple(route)
        self._not_before = [0.0] * len(route)

    @property
    def stage_count(self) -> int:
        """See Routing."""
        return len(self._route)

    @property
    def obstacle(self) -> str | None:
        """See Routing."""
        return None

    async def hop(self, stage: int) -> Hop:
        """See Routing."""
        if self._not_before[stage]:
            await anyio.sleep_until(self._not_before[stage])
            self._not_before[stage] = 0.0
        return self._route[stage]

    def finished(self, stage: int, hop: Hop, seconds: float) -> None:
        """See Routing."""

    def left(self, stage: int, hop: Hop) -> None:
        """See Routing."""

    def busy(self, stage: int, hop: Hop, error: StageError) -> None:
        """See Routing."""

    def failed(self, stage: int, hop: Hop, error: StageError) -> None:
        """See Routing."""
        self._not_before[stage] = anyio.current_time() + RETRY_SECONDS
