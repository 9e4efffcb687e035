"""The newest log lines in memory, numbered, for the API and the dashboard."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from itertools import islice
from threading import Lock

MAX_MESSAGE_CHARACTERS = 8_000


@dataclass(frozen=True)
class LogLine:
    """One log record as people may see it; sequence numbers start at 1 and have no gaps."""

    sequence: int
    time: float  # seconds since the epoch
    level: str
    logger: str
    message: str  # with the traceback, if there is one


class LogRing:
    """Bounded and thread-safe; the oldest lines fall out."""

    def __init__(self, capacity: int = 2000) -> None:
        self._lock = Lock()
        self._lines: deque[LogLine] = deque(maxlen=capacity)
        self._last = 0

    @property
    def last_sequence(self) -> int:
        """Number of the newest line, 0 when there was none."""
        return self._last

    def append(self, time: float, level: str, logger: str, message: str) -> None:
        """Add a line; what exceeds MAX_MESSAGE_CHARACTERS is cut."""
        if len(message) > MAX_MESSAGE_CHARACTERS:
            message = f"{message[:MAX_MESSAGE_CHARACTERS]} ... (cut)"
        with self._lock:
            self._last += 1
            self._lines.append(LogLine(self._last, time, level, logger, message))

    def after(self, sequence: int, limit: int | None = None) -> tuple[LogLine, ...]:
        """The lines after `sequence`, oldest first; with a limit, ask again with the last number to go on.

        A gap between `sequence` and the first line means that lines fell out in between.
        """
        with self._lock:
            if not self._lines:
                return ()
            skip = max(0, sequence + 1 - self._lines[0].sequence)
            return tuple(islice(self._lines, skip, None if limit is None else skip + max(0, limit)))

    def newest(self, limit: int = 500) -> tuple[LogLine, ...]:
        """The newest `limit` lines, oldest first."""
        return self.after(max(0, self._last - limit), limit)


class RingHandler(logging.Handler):
    """Feeds a LogRing from logging."""

    def __init__(self, ring: LogRing) -> None:
        super().__init__()
        self._ring = ring
        self.setFormatter(logging.Formatter("%(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        """Format and keep the record."""
        self._ring.append(record.created, record.levelname, record.name, self.format(record))
