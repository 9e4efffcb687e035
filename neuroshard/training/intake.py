"""How much work a stage takes for its next step: what is accumulated, what is open, and whether more may come."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

import anyio

from neuroshard.training.microbatch import MicrobatchKey

T = TypeVar("T")


@dataclass(frozen=True)
class Accumulated:
    """What the gradients of the step in work hold so far."""

    sequences: int = 0
    tokens: int = 0
    keys: tuple[MicrobatchKey, ...] = ()  # in the order in which they were done

    def plus(self, key: MicrobatchKey, sequences: int, tokens: int) -> Accumulated:
        """With one more microbatch."""
        return Accumulated(self.sequences + sequences, self.tokens + tokens, (*self.keys, key))


class Intake:
    """Closed at first. Once opened it admits microbatches until those of a step are in, done or on their way.

    Belongs to the event loop's thread.
    """

    def __init__(self, sequences_per_step: int) -> None:
        self.accumulated = Accumulated()
        self.closed_because: str | None = "The stage is not ready yet."
        self.is_paused = False  # closed until somebody resumes
        self._target = sequences_per_step
        self._open_microbatches = 0
        self._open_sequences = 0
        self._waiting: dict[anyio.Event, Callable[[], bool]] = {}
        self._waits: set[anyio.CancelScope] = set()

    @property
    def wanted(self) -> int:
        """Sequences of a step."""
        return self._target

    @property
    def open_microbatches(self) -> int:
        """Microbatches between their forward and their backward pass."""
        return self._open_microbatches

    @property
    def missing(self) -> int:
        """Sequences that the step in work still wants."""
        return max(0, self._target - self.accumulated.sequences - self._open_sequences)

    @property
    def is_admitting(self) -> bool:
        """Whether it was opened and not closed since; it may have all it wants."""
        return self.closed_because is None

    @property
    def is_open(self) -> bool:
        """Whether another microbatch may begin."""
        return self.is_admitting and self.missing > 0

    @property
    def is_full(self) -> bool:
        """Whether the step can be made."""
        return self.accumulated.sequences >= self._target and self.is_idle

    @property
    def is_idle(self) -> bool:
        """Whether no microbatch is between its forward and its backward pass."""
        return self._open_microbatches == 0

    def open(self) -> None:
        """Admit microbatches."""
        self.closed_because, self.is_paused = None, False
        self.notify()

    def close(self, reason: str, *, is_paused: bool = False) -> None:
        """Admit no more; whoever waits for data to begin another microbatch gives up."""
        self.closed_because, self.is_paused = reason, is_paused
        self.notify()

    def begin(self, sequences: int) -> None:
        """A microbatch was admitted."""
        self._open_microbatches += 1
        self._open_sequences += sequences
        self.notify()

    def finish(self, key: MicrobatchKey, sequences: int, tokens: int) -> None:
        """A microbatch is accumulated."""
        self.accumulated = self.accumulated.plus(key, sequences, tokens)
        self.withdraw(sequences)

    def withdraw(self, sequences: int) -> None:
        """A microbatch is open no more."""
        self._open_microbatches -= 1
        self._open_sequences -= sequences
        self.notify()

    def take(self) -> Accumulated:
        """What a step is made of; the next one begins with nothing."""
        taken, self.accumulated = self.accumulated, Accumulated()
        return taken

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition on this intake holds; it still does when the caller goes on."""
        while not condition():
            holds = anyio.Event()
            self._waiting[holds] = condition
            try:
                await holds.wait()
            finally:
                self._waiting.pop(holds, None)

    async def opened(self) -> None:
        """Wait until a microbatch may begin; it still may when the caller goes on."""
        await self.until(lambda: self.is_open)

    async def unless_closed(self, work: Callable[[], Awaitable[T]]) -> T | None:
        """The value of `work`, or None when the intake closed first and `work` was cancelled."""
        if not self.is_open:
            return None
        with anyio.CancelScope() as scope:
            self._waits.add(scope)
            try:
                return await work()
            finally:
                self._waits.discard(scope)
        return None

    def notify(self) -> None:
        """Wake whoever waits for what holds now."""
        for holds in [event for event, condition in self._waiting.items() if condition()]:
            holds.set()
        if not self.is_open:
            for scope in self._waits:
                scope.cancel()
