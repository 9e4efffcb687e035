"""One log file for each source: logs/genesis_<source>.log."""

from __future__ import annotations

import logging
from pathlib import Path
from types import TracebackType

from neuroshard.errors import StorageError

_FIRST_SKIPPED = 20  # are told one by one, then one in a thousand
_LATER_SKIPPED = 1_000


class SourceLog:
    """Appends lines with their time to the log of a source."""

    def __init__(self, folder: Path, source: str) -> None:
        """Raises StorageError when the file cannot be written."""
        self.file = folder / f"genesis_{source}.log"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._handler = logging.FileHandler(self.file, encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            raise StorageError(f"{self.file} cannot be written: {error.strerror or error}.") from error
        self._handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
        self._logger = logging.Logger(f"genesis.{source}")  # of its own: nobody else listens
        self._logger.addHandler(self._handler)
        self._skipped = 0

    def __enter__(self) -> SourceLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._handler.close()

    def say(self, message: str) -> None:
        """One line."""
        self._logger.info(message)

    def skipped(self, problem: str) -> None:
        """A record without text; of very many not each has a line."""
        self._skipped += 1
        if self._skipped <= _FIRST_SKIPPED or self._skipped % _LATER_SKIPPED == 0:
            self.say(f"passed over: {problem} ({self._skipped:,} so far)")
