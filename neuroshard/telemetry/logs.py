"""Log records: their formats and handlers, the rotating file, and the ring with the newest lines.

`configure_logging` sets everything up; `close` undoes it."""

from __future__ import annotations

import contextlib
import json
import logging
import logging.handlers
import math
import os
import sys
from collections import deque
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from threading import Lock
from typing import TYPE_CHECKING, Self, TextIO

from neuroshard.errors import StorageError
from neuroshard.telemetry.redaction import RedactingFilter, Redactor, extras_of

if TYPE_CHECKING:
    from pathlib import Path


MAX_MESSAGE_CHARACTERS = 8_000


@dataclass(frozen=True)
class LogLine:
    """One formatted log record. Sequence numbers start at 1 and have no gaps."""

    sequence: int
    time: float  # seconds since the epoch
    level: str
    logger: str
    message: str  # with the traceback, if there is one


class LogRing:
    """Thread-safe memory of the newest log lines. Beyond `capacity`, the oldest lines are dropped."""

    def __init__(self, capacity: int = 2000) -> None:
        self._lock = Lock()
        self._lines: deque[LogLine] = deque(maxlen=capacity)
        self._last = 0

    @property
    def last_sequence(self) -> int:
        """Sequence number of the newest line; 0 before the first one."""
        return self._last

    def append(self, time: float, level: str, logger: str, message: str) -> None:
        """Add a line; `time` is in seconds since the epoch. Text beyond MAX_MESSAGE_CHARACTERS is cut."""
        if len(message) > MAX_MESSAGE_CHARACTERS:
            message = f"{message[:MAX_MESSAGE_CHARACTERS]} ... (cut)"
        with self._lock:
            self._last += 1
            self._lines.append(LogLine(self._last, time, level, logger, message))

    def after(self, sequence: int, limit: int | None = None) -> tuple[LogLine, ...]:
        """The lines after `sequence`, oldest first, at most `limit`. Continue with the last line's number.

        A gap between `sequence` and the first line means that the lines in between were dropped.
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
    """Logging handler that appends records to a LogRing."""

    def __init__(self, ring: LogRing) -> None:
        super().__init__()
        self._ring = ring
        self.setFormatter(logging.Formatter("%(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        self._ring.append(record.created, record.levelname, record.name, self.format(record))


MAX_FILE_BYTES = 5_000_000
KEPT_FILES = 3
FILE_NAME = "node.log"
SHOWN_ELSEWHERE = "shown_elsewhere"  # a record with this extra is not repeated on stderr


class HumanFormatter(logging.Formatter):
    """Formats a record as `14:03:22 WARNING training: message` in local time. The level INFO is left out."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        parts = record.name.split(".")
        room = parts[1] if parts[0] == "neuroshard" and len(parts) > 1 else parts[0]
        level = "" if record.levelno == logging.INFO else f"{record.levelname} "
        return f"{self.formatTime(record, '%H:%M:%S')} {level}{room}: {record.message}"


class JsonFormatter(logging.Formatter):
    """Formats a record as one line of JSON: time (UTC), level, logger, message, the caller's extras, traceback."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name, value in extras_of(record).items():
            fields.setdefault(name, None if isinstance(value, float) and not math.isfinite(value) else value)
        if record.exc_info and not record.exc_text:
            record.exc_text = self.formatException(record.exc_info)
        if record.exc_text:
            fields["traceback"] = record.exc_text
        return json.dumps(fields, ensure_ascii=False, default=str)


class PatientFileHandler(logging.handlers.RotatingFileHandler):
    """A rotating log file (mode 0600). It counts failures, such as a full disk, and never raises them."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, maxBytes=MAX_FILE_BYTES, backupCount=KEPT_FILES, encoding="utf-8")
        self.failed_writes = 0

    def _open(self) -> TextIO:  # pyright: ignore[reportIncompatibleMethodOverride]
        descriptor = os.open(self.baseFilename, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        return os.fdopen(descriptor, "a", encoding="utf-8")

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        """Count the failure. Stderr and the ring still receive the record."""
        del record
        self.failed_writes += 1

    def close(self) -> None:
        """Close the file. Lines that are still in the buffer are lost if the disk is full."""
        with contextlib.suppress(OSError):
            super().close()


class ConfiguredLogging:
    """The log handlers of this process. close(), or the end of a `with` block, removes them."""

    def __init__(self, handlers: list[logging.Handler], redactor: Redactor, root_level: int) -> None:
        self.redactor = redactor
        self._handlers = handlers
        self._previous = (root_level, logging.getLogger("neuroshard").level)

    def set_verbose(self, verbose: bool) -> None:
        """Show or hide this package's debug records, with immediate effect."""
        logging.getLogger("neuroshard").setLevel(logging.DEBUG if verbose else logging.INFO)

    def failed_writes(self) -> int:
        """Number of records that did not reach the log file."""
        return sum(handler.failed_writes for handler in self._handlers if isinstance(handler, PatientFileHandler))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close and remove every handler, and restore the previous log levels."""
        root = logging.getLogger()
        for handler in self._handlers:
            root.removeHandler(handler)
            handler.close()
        root.setLevel(self._previous[0])
        logging.getLogger("neuroshard").setLevel(self._previous[1])
        self._handlers = []


def configure_logging(
    *,
    verbose: bool = False,
    as_json: bool = False,
    ring: LogRing | None = None,
    folder: Path | None = None,
    redactor: Redactor | None = None,
    stream: TextIO | None = None,
) -> ConfiguredLogging:
    """Send this package's records and all warnings to stderr, `folder`/node.log and the ring, without secrets.

    Secrets that become known later are added with `.redactor.add`. Raises StorageError if the log file cannot be
    opened.
    """
    redactor = redactor or Redactor()
    console = logging.StreamHandler(stream or sys.stderr)
    console.setFormatter(JsonFormatter() if as_json else HumanFormatter())
    console.addFilter(lambda record: not hasattr(record, SHOWN_ELSEWHERE))
    handlers: list[logging.Handler] = [console]
    if folder is not None:
        handlers.append(_file_handler(folder / FILE_NAME, as_json))
    if ring is not None:
        handlers.append(RingHandler(ring))
    root = logging.getLogger()
    configured = ConfiguredLogging(handlers, redactor, root.level)
    for handler in handlers:
        handler.addFilter(RedactingFilter(redactor))
        root.addHandler(handler)
    root.setLevel(logging.WARNING)
    configured.set_verbose(verbose)
    return configured


def _file_handler(path: Path, as_json: bool) -> PatientFileHandler:
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handler = PatientFileHandler(path)
    except OSError as error:
        raise StorageError(
            f"The log file {path} cannot be written: {error.strerror}.", "Check the permissions of the data folder."
        ) from error
    handler.setFormatter(
        JsonFormatter() if as_json else logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    )
    return handler
