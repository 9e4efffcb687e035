"""What to tell the owner of a computer that holds layers and is ready, but gets nothing to do."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from neuroshard.status.snapshot import StageStatus

QUIET_SECONDS = 15.0


class Standby:
    """Notices that nothing was asked of the stages here for a while."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._work: object = None
        self._since = 0.0

    def rest(self) -> None:
        """The node does not train now: that nothing is asked of it meanwhile says nothing."""
        self._work = None

    def sentence(self, stages: Sequence[StageStatus], replicas: int, *, has_lanes: bool) -> str:
        """Why these stages, whose work others drive, do nothing; "" as long as they do something, or drive themselves.

        `replicas` other nodes hold the same layers; with lanes a driver keeps to one of them until an outer step.
        """
        now, work = self._clock(), [(stage.index, stage.steps, stage.sequences_accumulated) for stage in stages]
        if work != self._work:
            self._work, self._since = work, now
        if not stages or stages[0].index == 0 or now - self._since < QUIET_SECONDS:
            return ""
        if replicas and has_lanes:
            return (
                "Ready, and not needed at present: until the next outer step those who feed text keep to another "
                "computer with the same layers. This one steps in at once when that one fails."
            )
        return "Ready: no computer that feeds text to the model sends anything at present."
