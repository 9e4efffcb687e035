"""How fast the steps come, and since when data are waited for. Belongs to the event loop's thread."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from neuroshard.training.progress import Speed

T = TypeVar("T")

NOTICEABLE_WAIT_SECONDS = 1.0


class Pace:
    """Times the steps; pauses, evaluations and waits for data do not count."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self.monotonic = monotonic
        self.speed = Speed()
        self.step_seconds = 0.0  # of the last step
        self._mark = monotonic()

    def step_ended(self) -> None:
        """A step ends now and the next one begins."""
        now = self.monotonic()
        self.step_seconds, self._mark = now - self._mark, now

    def count(self, tokens: int) -> None:
        """The step that ended was made with so many tokens."""
        self.speed = self.speed.after_step(self.step_seconds, tokens)

    def restart(self) -> None:
        """Whatever was done since the last step does not count."""
        self._mark = self.monotonic()

    def skip(self, seconds: float) -> None:
        """So much of the time does not count."""
        self._mark += seconds


class DataWait:
    """Waits for data, and lets others see it."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._since: float | None = None

    @property
    def is_noticeable(self) -> bool:
        """Whether data are waited for at present, and for so long that it should be told."""
        return self._since is not None and self._pace.monotonic() - self._since > NOTICEABLE_WAIT_SECONDS

    async def timed(self, work: Callable[[], Awaitable[T]]) -> T:
        """The value of `work`, which waits for data."""
        began = self._since = self._pace.monotonic()
        try:
            return await work()
        finally:
            waited = self._pace.monotonic() - began
            self._since = None
            if waited > NOTICEABLE_WAIT_SECONDS:
                self._pace.skip(waited)
