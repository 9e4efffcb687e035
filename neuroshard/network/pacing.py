"""The owner's upload limit: one token bucket that everything this node sends passes through."""

from __future__ import annotations

from math import inf

import anyio

BURST_SECONDS = 0.25
LEAST_PORTION_BYTES = 16 * 1024


class UploadPacer:
    """Spreads bytes so that within any T seconds at most rate x (T + BURST_SECONDS) bytes + one portion may leave.

    None means no limit. Who waits is served in order.
    """

    def __init__(self, bytes_per_second: float | None = None) -> None:
        self._rate = inf
        self._free_at = -inf  # when everything that was granted has been paid for
        self.limit(bytes_per_second)

    @property
    def bytes_per_second(self) -> float | None:
        """The limit."""
        return None if self._rate == inf else self._rate

    def limit(self, bytes_per_second: float | None) -> None:
        """Change the limit for everything that is sent from now on. Raises ValueError unless it is positive."""
        if bytes_per_second is not None and not bytes_per_second > 0:
            raise ValueError(f"an upload limit must be positive, got {bytes_per_second}")
        self._rate = inf if bytes_per_second is None else bytes_per_second

    def portion(self, byte_count: int) -> int:
        """How many of so many bytes to send at a time, so that the limit also holds over short times."""
        if self._rate == inf:
            return byte_count
        return min(byte_count, max(LEAST_PORTION_BYTES, int(self._rate * BURST_SECONDS)))

    def seconds_behind(self) -> float:
        """How long the next byte has to wait."""
        return max(0.0, self._free_at - anyio.current_time())

    async def spend(self, byte_count: int) -> None:
        """Wait until so many bytes may leave. Whoever is cancelled meanwhile has spent them all the same."""
        if self._rate == inf:
            return
        now = anyio.current_time()
        start = max(self._free_at, now - BURST_SECONDS)
        self._free_at = start + byte_count / self._rate
        if start > now:
            await anyio.sleep_until(start)
