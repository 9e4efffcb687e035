"""Who does the stages of a microbatch: what a driver asks, and the answer where stages never change hands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import anyio

from neuroshard.training.microbatch import DisputedTensorError, StageError, UnwantedTensorError
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

    def forgiven(self, stage: int, hop: Hop) -> None:
        """It failed for no fault of its own, and may be used again."""
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

    def forgiven(self, stage: int, hop: Hop) -> None:
        """See Routing."""


class Dispute:
    """About one tensor of a stage: who refuses it first is left alone for a while, unless the next one agrees.

    Otherwise a tensor that is wrong would cost one replica after the other its work.
    """

    def __init__(self, routing: Routing, stage: int) -> None:
        self._routing = routing
        self._stage = stage
        self._first: Hop | None = None

    def note(self, hop: Hop, error: StageError) -> None:
        """Count what went wrong. Raises UnwantedTensorError when the tensor was refused twice."""
        if not isinstance(error, DisputedTensorError):
            return
        if self._first is None:
            self._first = hop
            return
        self._routing.forgiven(self._stage, self._first)
        raise UnwantedTensorError(f"What goes to stage {self._stage + 1} was refused twice. {error.message}") from error
