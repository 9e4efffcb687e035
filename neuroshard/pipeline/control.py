"""Requests to pause, resume, save and stop a running trainer, and waits that end when a request arrives."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import anyio

from neuroshard.waiting import Signal

PAUSED_BY_USER = "Paused by the user."

T = TypeVar("T")


@dataclass(frozen=True)
class TimedPause:
    """A requested pause, which ends when the first of two clocks reaches the end.

    The wall clock keeps running while a computer sleeps. The monotonic clock does not change when the wall clock is set
    back.
    """

    reason: str
    until: float | None = None  # seconds since the epoch; None: the pause has no end of its own
    until_monotonic: float | None = None


class RequestedPause:
    """The pause that applies to training, its reason and its end. A trainer passes it to the trainer that replaces it.

    A user may have requested the pause, the owner's rules may require it, or both. A user's request is reported first.
    """

    def __init__(
        self, monotonic: Callable[[], float] = time.monotonic, wall_clock: Callable[[], float] = time.time
    ) -> None:
        self._monotonic = monotonic
        self._wall_clock = wall_clock
        self.asked: TimedPause | None = None
        self._rule: tuple[str, float | None] | None = None

    @property
    def holds(self) -> bool:
        """Whether training must pause."""
        return self.asked is not None or self._rule is not None

    @property
    def reason(self) -> str:
        """Reason for the pause as a sentence; "" without a pause."""
        if self.asked is not None:
            return self.asked.reason
        return "" if self._rule is None else self._rule[0]

    @property
    def rule_reason(self) -> str:
        """Reason of the owner's rules for a pause, also during a requested one; "" when the rules allow training."""
        return "" if self._rule is None else self._rule[0]

    @property
    def until(self) -> float | None:
        """End of the pause in seconds since the epoch; None when the end is unknown or there is no pause."""
        if self.asked is not None:
            return self.asked.until
        return None if self._rule is None else self._rule[1]

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the requested pause ends; None when it has no end of its own."""
        asked = self.asked
        if asked is None or asked.until is None or asked.until_monotonic is None:
            return None
        return max(0.0, min(asked.until - self._wall_clock(), asked.until_monotonic - self._monotonic()))

    def begin(self, reason: str, duration_seconds: float | None = None) -> None:
        """Request a pause, or replace the reason and end of the requested one."""
        if duration_seconds is None:
            self.asked = TimedPause(reason)
        else:
            now, monotonic = self._wall_clock(), self._monotonic()
            self.asked = TimedPause(reason, now + duration_seconds, monotonic + duration_seconds)

    def renew_request(self, reason: str, begun: float, until: float | None) -> None:
        """Renew a request made at the wall-clock time `begun`. The pause lasts no longer than the original one."""
        if until is None:
            self.asked = TimedPause(reason)
        elif (left := min(until - self._wall_clock(), until - begun)) > 0:
            self.asked = TimedPause(reason, self._wall_clock() + left, self._monotonic() + left)

    def end(self) -> None:
        """Withdraw the requested pause. A pause that the owner's rules require continues."""
        self.asked = None

    def expire(self) -> None:
        """End the requested pause once its time is over. A timer that follows one clock can be late after a sleep."""
        if self.seconds_left == 0.0:
            self.end()

    def follow_rule(self, reason: str, until: float | None = None) -> None:
        """Set the pause that the owner's rules require; an empty reason removes it."""
        self._rule = (reason, until) if reason else None


class Control:
    """Requests to pause, resume, save and stop. All loops of a trainer check them between microbatches."""

    def __init__(self, requested_pause: RequestedPause | None = None) -> None:
        """`requested_pause` is the pause of the previous trainer, which continues here."""
        self.is_stopping = False
        self.abandons_work = False  # of the stop: microbatches that are open cannot end, so nobody waits for them
        self.restarting = 0  # number of loops that wait for the ranks of a site to start again
        self.saves = 0  # number of requests for checkpoints so far
        self.requested_pause = requested_pause or RequestedPause()  # takes effect when the loops have seen it
        self._changed = Signal()

    @property
    def must_hold(self) -> str | None:
        """Reason why no more microbatches may begin; None while they may."""
        if self.is_stopping:
            return "The node stops."
        return "The node is paused." if self.requested_pause.holds else None

    def pause(self, reason: str, duration_seconds: float | None = None) -> None:
        """Request a pause, or replace the reason and end of the requested one."""
        self.requested_pause.begin(reason, duration_seconds)
        self._changed.notify()

    def resume(self) -> None:
        """Withdraw the requested pause."""
        self.requested_pause.end()
        self._changed.notify()

    def look_again(self) -> None:
        """Notify the loops that another object has changed the pause."""
        self._changed.notify()

    @contextmanager
    def restarting_ranks(self) -> Generator[None]:
        """A block in which one more loop waits for the ranks of a site."""
        self.restarting += 1
        try:
            yield
        finally:
            self.restarting -= 1

    def save(self) -> int:
        """Request a checkpoint of every stage. Returns the number of the request."""
        self.saves += 1
        self._changed.notify()
        return self.saves

    def stop(self, *, abandons_work: bool = False) -> None:
        """End training for good: a stop cannot be withdrawn. `abandons_work` ends it without the open microbatches."""
        self.is_stopping, self.abandons_work = True, abandons_work
        self._changed.notify()

    def feed(self, signal: Signal) -> None:
        """Notify `signal` of every request as well."""
        self._changed.feed(signal)

    async def until_changed(self, work: Callable[[], Awaitable[T]]) -> T | None:
        """Return the value of `work`, or None if a request came first and cancelled `work`."""
        return await self._changed.interrupt(work)

    async def changed(self) -> None:
        """Wait for the next request. The end of the pause counts as a request to resume."""
        with anyio.move_on_after(self.requested_pause.seconds_left):
            await self._changed.wait()
            return
        if self.requested_pause.seconds_left == 0.0:  # otherwise another loop has already ended the pause
            self.resume()


class Requests:
    """Requests that one loop of a trainer has not served yet. Each loop saves once per request for a checkpoint."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._saves = control.saves
        self._saved = Signal()

    @property
    def save_wanted(self) -> bool:
        """Whether a requested checkpoint has not been saved by this loop."""
        return self._saves < self._control.saves

    @property
    def are_waiting(self) -> bool:
        """Whether the loop must interrupt its work for a request."""
        return self._control.must_hold is not None or self.save_wanted

    async def unless_waiting(self, work: Callable[[], Awaitable[T]]) -> T | None:
        """Return the value of `work`, or None if a request came first and cancelled `work`."""
        return None if self.are_waiting else await self._control.until_changed(work)

    def save_taken(self, number: int) -> None:
        """Mark all save requests up to this number as served."""
        self._saves = number
        self._saved.notify()

    async def saved(self, number: int) -> None:
        """Wait until the save request with this number is served."""
        await self._saved.until(lambda: self._saves >= number)
