"""Progress of a population: a line on the terminal, and one log file per source (logs/genesis_<source>.log)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, TextIO

from neuroshard.errors import StorageError
from neuroshard.types import DAY_SECONDS

_TERMINAL_SECONDS = 0.2
_PLAIN_SECONDS = 30.0
_UNITS = ((DAY_SECONDS, "d"), (3_600.0, "h"), (60.0, "min"), (1.0, "s"))


@dataclass(frozen=True)
class SourceProgress:
    """Progress of one source in this run of the populator."""

    source: str
    shards: int
    target_shards: int
    tokens_per_shard: int
    tokens: int  # in this run
    text_bytes: int  # in this run
    documents: int
    seconds: float  # of this run

    def line(self) -> str:
        """Describe amount, speed and remaining time for display."""
        return (
            f"{self.source}: {self.shards:,} of {self.target_shards:,} shards, {self.documents:,} documents, "
            f"{self.text_bytes / 1e6 / max(self.seconds, 1e-9):.1f} MB/s{self._time_left()}"
        )

    def _time_left(self) -> str:
        missing = (self.target_shards - self.shards) * self.tokens_per_shard
        if self.tokens == 0 or missing <= 0:
            return ""
        return f", at most {duration_in_words(missing * self.seconds / self.tokens)} left"


def duration_in_words(seconds: float) -> str:
    """Describe a duration in its largest unit."""
    length, unit = next(((length, unit) for length, unit in _UNITS if seconds >= length), _UNITS[-1])
    return f"{seconds / length:.1f} {unit}" if unit in "dh" else f"{seconds / length:.0f} {unit}"


class PopulationProgress(Protocol):
    """The view of a population's progress."""

    def learning(self, source: str, fraction: float) -> None:
        """Show the progress of learning the vocabulary; `fraction` is in 0..1."""
        ...

    def tokenising(self, status: SourceProgress) -> None:
        """Show the progress of making shards."""
        ...

    def say(self, message: str) -> None:
        """Show a message, for example the failure of a source."""
        ...


class ProgressPrinter:
    """Writes progress to a stream at readable intervals."""

    def __init__(self, stream: TextIO, clock: Callable[[], float]) -> None:
        """`clock` gives seconds that never go back."""
        self._stream = stream
        self._clock = clock
        self._is_terminal = stream.isatty()
        self._last = -_PLAIN_SECONDS
        self._width = 0

    def learning(self, source: str, fraction: float) -> None:
        self.show(f"{source}: learning the vocabulary, {fraction:.0%}")

    def tokenising(self, status: SourceProgress) -> None:
        self.show(status.line())

    def say(self, message: str) -> None:
        """Write a message on a line of its own."""
        self.end()
        self._stream.write(f"{message}\n")
        self._stream.flush()

    def end(self) -> None:
        """Clear the changing line."""
        if self._is_terminal and self._width:
            self._stream.write("\r" + " " * self._width + "\r")
            self._width = 0

    def show(self, line: str) -> None:
        """Show a line that the next one replaces; of lines in quick succession, only some."""
        now = self._clock()
        if now - self._last < (_TERMINAL_SECONDS if self._is_terminal else _PLAIN_SECONDS):
            return
        self._last = now
        self._stream.write(f"\r{line:{self._width}}" if self._is_terminal else f"{line}\n")
        self._width = len(line)
        self._stream.flush()


_FIRST_SKIPPED = 20  # are logged one by one, then one in a thousand
_LATER_SKIPPED = 1_000


class SourceLog:
    """Appends lines with their time to the log of a source, if it has one."""

    def __init__(self, folder: Path | None, source: str) -> None:
        """`folder` None: no log. Raises StorageError when the file cannot be written."""
        self._handler = logging.NullHandler() if folder is None else _log_file(folder / f"genesis_{source}.log")
        self._handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
        self._logger = logging.Logger(f"genesis.{source}")  # outside the logger hierarchy: no other handler gets it
        self._logger.addHandler(self._handler)
        self._skipped = 0

    def __enter__(self) -> SourceLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._handler.close()

    def say(self, message: str) -> None:
        """Append one line."""
        self._logger.info(message)

    def skipped(self, problem: str) -> None:
        """Log a record without text; of very many, only some have a line."""
        self._skipped += 1
        if self._skipped <= _FIRST_SKIPPED or self._skipped % _LATER_SKIPPED == 0:
            self.say(f"passed over: {problem} ({self._skipped:,} so far)")


def _log_file(file: Path) -> logging.Handler:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        return logging.FileHandler(file, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise StorageError(f"{file} cannot be written: {error.strerror or error}.") from error
