"""A token bucket: what somebody may do at once and in the long run. No clock, no waiting."""

from __future__ import annotations

from math import inf


class Allowance:
    """So much at once, and so much a second in the long run."""

    def __init__(self, burst: float, per_second: float) -> None:
        self._burst = burst
        self._per_second = per_second
        self._left = burst
        self._at = -inf

    def take(self, now: float, amount: float = 1) -> bool:
        """Whether so much more is allowed now (seconds on any monotonic clock); what is refused costs nothing."""
        self._left = min(self._burst, self._left + (now - self._at) * self._per_second)
        self._at = now
        if self._left < amount:
            return False
        self._left -= amount
        return True
