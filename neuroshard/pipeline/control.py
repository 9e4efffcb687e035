"""Requests to pause, resume, save and stop a running trainer, and waits that end when a request arrives."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

import anyio

from neuroshard.signals import Signal

PAUSED_BY_USER = "Paused by the user."

T = TypeVar("T")


@dataclass(frozen=True)
class TimedPause:
    """A pause that somebody asked for, until whichever of the two clocks says that it is over.

    The calendar goes on while a computer sleeps; the other clock does not mind when the calendar is set back.
    """

    reason: str
    until: float | None = None  # seconds since the epoch; None: it has no end of its own
    until_monotonic: float | None = None


class RequestedPause:
    """Whether training shall pause, why, and until when: what one trainer of a node leaves to the next one.

    Somebody may have asked for it, the owner's rules may want it, or both; what was asked for is told first.
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
        """Whether training shall pause."""
        return self.asked is not None or self._rule is not None

    @property
    def reason(self) -> str:
        """In a sentence; "" when none holds."""
        if self.asked is not None:
            return self.asked.reason
        return "" if self._rule is None else self._rule[0]

    @property
    def rule_reason(self) -> str:
        """Why the owner's rules want a pause, whoever asks for one as well; "" when they do not."""
        return "" if self._rule is None else self._rule[0]

    @property
    def until(self) -> float | None:
        """When it ends, in seconds since the epoch; None when that is not known, or none holds."""
        if self.asked is not None:
            return self.asked.until
        return None if self._rule is None else self._rule[1]

    @property
    def seconds_left(self) -> float | None:
        """How long what was asked for still holds; None when it has no end of its own."""
        asked = self.asked
        if asked is None or asked.until is None or asked.until_monotonic is None:
            return None
        return max(0.0, min(asked.until - self._wall_clock(), asked.until_monotonic - self._monotonic()))

    def begin(self, reason: str, duration_seconds: float | None = None) -> None:
        """Ask for a pause, or give the one that was asked for another reason and end."""
        if duration_seconds is None:
            self.asked = TimedPause(reason)
        else:
            now, monotonic = self._wall_clock(), self._monotonic()
            self.asked = TimedPause(reason, now + duration_seconds, monotonic + duration_seconds)

    def renew_request(self, reason: str, begun: float, until: float | None) -> None:
        """Ask again for what was asked for earlier, at `begun`; it lasts no longer than it did then."""
        if until is None:
            self.asked = TimedPause(reason)
        elif (left := min(until - self._wall_clock(), until - begun)) > 0:
            self.asked = TimedPause(reason, self._wall_clock() + left, self._monotonic() + left)

    def end(self) -> None:
        """Ask for none."""
        self.asked = None

    def expire(self) -> None:
        """End what was asked for when it is over; whoever waits by one clock is late after a computer slept."""
        if self.seconds_left == 0.0:
            self.end()

    def follow_rule(self, reason: str, until: float | None = None) -> None:
        """The owner's rules want a pause; "" for none."""
        self._rule = (reason, until) if reason else None


class Control:
    """Requests to pause, resume, save and stop, for all loops of a trainer; they look at them between microbatches."""

    def __init__(self, wish: RequestedPause | None = None) -> None:
        """`wish` of the trainer before this one, which holds here as well."""
        self.is_stopping = False
        self.saves = 0  # how often checkpoints were asked for
        self._wish = wish or RequestedPause()
        self._changed = Signal()

    @property
    def is_paused(self) -> bool:
        """Whether a pause was asked for; it holds once the loops have seen it."""
        return self._wish.holds

    @property
    def pause_reason(self) -> str:
        """In a sentence."""
        return self._wish.reason

    @property
    def seconds_until_resume(self) -> float | None:
        """How long the pause that was asked for still lasts; None when it has no end of its own."""
        return self._wish.seconds_left

    @property
    def paused_until(self) -> float | None:
        """When the pause ends, in seconds since the epoch; None when that is not known, or none holds."""
        return self._wish.until

    @property
    def must_hold(self) -> str | None:
        """Why no more microbatches may begin; None while they may."""
        if self.is_stopping:
            return "The node stops."
        return "The node is paused." if self.is_paused else None

    def pause(self, reason: str, duration_seconds: float | None = None) -> None:
        """Ask for a pause, or give the present one another end."""
        self._wish.begin(reason, duration_seconds)
        self._changed.notify()

    def resume(self) -> None:
        """Ask to go on."""
        self._wish.end()
        self._changed.notify()

    def look_again(self) -> None:
        """The wish for a pause was changed by somebody else."""
        self._changed.notify()

    def save(self) -> int:
        """Ask for a checkpoint of every stage; the number of this request."""
        self.saves += 1
        self._changed.notify()
        return self.saves

    def stop(self) -> None:
        """Ask to end; there is no way back."""
        self.is_stopping = True
        self._changed.notify()

    def feed(self, signal: Signal) -> None:
        """Signal every request there too."""
        self._changed.feed(signal)

    async def until_changed(self, work: Callable[[], Awaitable[T]]) -> T | None:
        """The value of `work`, or None when something was asked for meanwhile and `work` was cancelled."""
        return await self._changed.interrupt(work)

    async def changed(self) -> None:
        """Wait for the next request, or for the end of the pause, which counts as a request to resume."""
        with anyio.move_on_after(self.seconds_until_resume):
            await self._changed.wait()
            return
        if self.seconds_until_resume == 0.0:  # or another loop has noticed it first
            self.resume()


class Requests:
    """What one loop of a trainer must still obey: each loop serves a wish for checkpoints once."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._saves = control.saves
        self._saved = Signal()

    @property
    def save_wanted(self) -> bool:
        """Whether a checkpoint was asked for that this loop has not taken."""
        return self._saves < self._control.saves

    @property
    def are_waiting(self) -> bool:
        """Whether the loop should look up from its work."""
        return self._control.must_hold is not None or self.save_wanted

    async def unless_waiting(self, work: Callable[[], Awaitable[T]]) -> T | None:
        """The value of `work`, or None when a request came first and `work` was cancelled."""
        return None if self.are_waiting else await self._control.until_changed(work)

    def save_taken(self, number: int) -> None:
        """All requests up to this one are served."""
        self._saves = number
        self._saved.notify()

    async def saved(self, number: int) -> None:
        """Wait until a request is served."""
        await self._saved.until(lambda: self._saves >= number)
