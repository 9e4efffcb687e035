"""What others ask of a running trainer, and how a wait for data gives way to it. Belongs to the event loop's thread."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio

T = TypeVar("T")


class Control:
    """Requests to pause, resume, save and stop; the trainer looks at them between microbatches."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self.is_stopping = False
        self.is_paused = False
        self.pause_reason = ""
        self.save_wanted = False
        self._resume_at: float | None = None
        self._changed = anyio.Event()
        self._wait: anyio.CancelScope | None = None

    @property
    def is_requested(self) -> bool:
        """Whether the trainer should look up from its work."""
        return self.is_stopping or self.is_paused or self.save_wanted

    @property
    def seconds_until_resume(self) -> float | None:
        """How long the pause still lasts; None when it has no end of its own."""
        return None if self._resume_at is None else max(0.0, self._resume_at - self._monotonic())

    def pause(self, reason: str, duration_seconds: float | None = None) -> None:
        """Ask for a pause, or give the present one another end."""
        self.is_paused = True
        self.pause_reason = reason
        self._resume_at = None if duration_seconds is None else self._monotonic() + duration_seconds
        self._notify()

    def resume(self) -> None:
        """Ask to go on."""
        self.is_paused = False
        self._resume_at = None
        self._notify()

    def save(self) -> None:
        """Ask for a checkpoint."""
        self.save_wanted = True
        self._notify()

    def stop(self) -> None:
        """Ask to end; there is no way back."""
        self.is_stopping = True
        self._notify()

    async def unless_requested(self, work: Callable[[], Awaitable[T]]) -> T | None:
        """The value of `work`, or None when a request came first and `work` was cancelled."""
        if self.is_requested:
            return None
        with anyio.CancelScope() as self._wait:
            return await work()
        return None

    async def changed(self) -> None:
        """Wait for the next request, or for the end of the pause, which counts as a request to resume."""
        changed = self._changed
        with anyio.move_on_after(self.seconds_until_resume):
            await changed.wait()
            return
        self.resume()

    def _notify(self) -> None:
        changed, self._changed = self._changed, anyio.Event()
        changed.set()
        if self._wait is not None:
            self._wait.cancel()
