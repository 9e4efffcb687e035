"""Clock skew: this computer's clock against the clocks of the nodes whose claims arrive. Pure.

A node whose clock is wrong cannot see it by itself: the others refuse its claims as too old or too new."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

from neuroshard.identity.claims import MAX_CLOCK_SKEW_SECONDS
from neuroshard.types import NodeId

CLOCK_WITNESSES = 64  # nodes whose clocks are remembered
FEWEST_WITNESSES = 3  # two may be wrong
WITNESS_SECONDS = 900.0  # what a node showed longer ago does not count; refused nodes call again within five minutes


class ClockSkew:
    """Remembers how far the clocks of other nodes are ahead, and decides whether this computer's clock is wrong.

    `now` returns seconds since the epoch by this computer's clock. Witnesses from before a long jump do not count.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        # seconds ahead, and when that was noted; the node that was heard last is the last one
        self._noted: dict[NodeId, tuple[float, float]] = {}

    def note(self, node_id: NodeId, ahead_seconds: float) -> None:
        """Record how far the clock of a node was ahead of this computer's when it dated an authentic claim.

        A forged claim must not be noted. If the table is full, the node that was heard the longest time ago is dropped.
        """
        self._noted.pop(node_id, None)
        if len(self._noted) >= CLOCK_WITNESSES:
            del self._noted[next(iter(self._noted))]
        self._noted[node_id] = ahead_seconds, self._now()

    @property
    def offset_seconds(self) -> float | None:
        """Median of the seconds that the other nodes' clocks are ahead of this one.

        None with fewer than FEWEST_WITNESSES nodes, or if the offset is at most MAX_CLOCK_SKEW_SECONDS.
        """
        ahead = self._ahead()
        if len(ahead) < FEWEST_WITNESSES:
            return None
        offset = median(ahead)
        return offset if abs(offset) > MAX_CLOCK_SKEW_SECONDS else None

    @property
    def warning(self) -> str | None:
        """A warning for the owner if this computer's clock is wrong, or may be, otherwise None.

        It may be wrong if there are only one or two witnesses, and their clocks are far from this one.
        """
        offset = self.offset_seconds
        if offset is None:
            return self._doubt
        behind = "behind" if offset > 0 else "ahead of"
        return (
            f"This computer's clock seems to be {_duration(abs(offset))} {behind} the other nodes' clocks, "
            "so they refuse what this node reports. Set the clock."
        )

    @property
    def _doubt(self) -> str | None:
        offsets = [abs(ahead) for ahead in self._ahead()]
        if not 0 < len(offsets) < FEWEST_WITNESSES or min(offsets) <= MAX_CLOCK_SKEW_SECONDS:
            return None
        others = "the other node's clock" if len(offsets) == 1 else "the other nodes' clocks"
        return (
            f"This computer's clock and {others} differ by {_duration(median(offsets))}, "
            "so they refuse each other's reports. Set the clock that is wrong."
        )

    def _ahead(self) -> list[float]:
        now = self._now()
        return [ahead for ahead, at in self._noted.values() if abs(now - at) <= WITNESS_SECONDS]


def _duration(seconds: float) -> str:
    if seconds < 7200:
        return f"{seconds / 60:.0f} minutes"
    return f"{seconds / 3600:.0f} hours"
