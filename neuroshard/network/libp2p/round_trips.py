"""How long a connection's messages take there and back. Pure."""

from __future__ import annotations

from collections import deque

KEPT = 3
FIRST_PING_SECONDS = 1.0  # between measurements until so many are known


class RoundTrips:
    """The newest few, in seconds. The least of them counts: a busy loop at either end only ever lengthens one."""

    def __init__(self) -> None:
        self._seconds = deque[float](maxlen=KEPT)

    def add(self, seconds: float) -> None:
        """Note one."""
        self._seconds.append(seconds)

    @property
    def are_enough(self) -> bool:
        """Whether the next measurement has time."""
        return len(self._seconds) == KEPT

    @property
    def least(self) -> float | None:
        """None before the first."""
        return min(self._seconds, default=None)
