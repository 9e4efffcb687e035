"""Numbers of one node's reports: others take none that is not above the last they have heard."""

from __future__ import annotations

from collections.abc import Callable

RESERVED = 600_000  # numbers, of which one is used in a millisecond at most: so the reserve lasts for ten minutes


class ReportNumbers:
    """Milliseconds since the epoch, or one more than the last: also while the clock is set back."""

    def __init__(self, reserved: int = 0, reserve: Callable[[int], None] = lambda _: None) -> None:
        """`reserve` stores up to where numbers may be used without a word; `reserved` is what it stored last."""
        self._last = self._reserved = reserved
        self._reserve = reserve

    def next(self, now: float) -> int:
        """The next one; `now` in seconds since the epoch. Raises what `reserve` raises."""
        self._last = max(self._last + 1, int(now * 1000))
        if self._last > self._reserved:
            self._reserved = self._last + RESERVED
            self._reserve(self._reserved)
        return self._last
