"""How far a populator is, told on a terminal in one line that changes and elsewhere in a plain line now and then."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TextIO

_TERMINAL_SECONDS = 0.2
_PLAIN_SECONDS = 30.0
_UNITS = ((86_400.0, "d"), (3_600.0, "h"), (60.0, "min"), (1.0, "s"))


@dataclass(frozen=True)
class SourceStatus:
    """One source in this run of the populator."""

    source: str
    shards: int
    target_shards: int
    tokens_per_shard: int
    tokens: int  # in this run
    text_bytes: int  # in this run
    documents: int
    seconds: float  # of this run

    def line(self) -> str:
        """For people: how much, how fast, how long still."""
        return (
            f"{self.source}: {self.shards:,} of {self.target_shards:,} shards, {self.documents:,} documents, "
            f"{self.text_bytes / 1e6 / max(self.seconds, 1e-9):.1f} MB/s{self._time_left()}"
        )

    def _time_left(self) -> str:
        missing = (self.target_shards - self.shards) * self.tokens_per_shard
        if self.tokens == 0 or missing <= 0:
            return ""
        return f", at most {spelled(missing * self.seconds / self.tokens)} left"


def spelled(seconds: float) -> str:
    """A duration in its largest unit."""
    length, unit = next(((length, unit) for length, unit in _UNITS if seconds >= length), _UNITS[-1])
    return f"{seconds / length:.1f} {unit}" if unit in "dh" else f"{seconds / length:.0f} {unit}"


class ProgressPrinter:
    """Writes to a stream, as often as that is of use."""

    def __init__(self, stream: TextIO, clock: Callable[[], float]) -> None:
        """`clock` gives seconds that never go back."""
        self._stream = stream
        self._clock = clock
        self._is_terminal = stream.isatty()
        self._last = -_PLAIN_SECONDS
        self._width = 0

    def learning(self, source: str, fraction: float) -> None:
        """The vocabulary is being learned."""
        self._show(f"{source}: learning the vocabulary, {fraction:.0%}")

    def tokenising(self, status: SourceStatus) -> None:
        """Shards are being made."""
        self._show(status.line())

    def say(self, message: str) -> None:
        """Something that is told once."""
        self.end()
        self._stream.write(f"{message}\n")
        self._stream.flush()

    def end(self) -> None:
        """Clear the line that changes."""
        if self._is_terminal and self._width:
            self._stream.write("\r" + " " * self._width + "\r")
            self._width = 0

    def _show(self, line: str) -> None:
        now = self._clock()
        if now - self._last < (_TERMINAL_SECONDS if self._is_terminal else _PLAIN_SECONDS):
            return
        self._last = now
        self._stream.write(f"\r{line:{self._width}}" if self._is_terminal else f"{line}\n")
        self._width = len(line)
        self._stream.flush()
