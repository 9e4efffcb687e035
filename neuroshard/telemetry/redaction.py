"""Keeping secrets out of every log: the texts that were registered, and whatever looks like a bearer token."""

from __future__ import annotations

import logging
import re
from threading import Lock

REPLACEMENT = "[secret]"
_SHORT = 8  # shorter secrets are replaced only as whole words, or every log line would be full of holes
_PATTERNS = (
    re.compile(r"(?i)(\bbearer\s+)[^\s'\",;]+"),
    re.compile(r"(--token[\s=]+)(?:\"[^\"]*\"|'[^']*'|\S+)"),
    re.compile(r"(?i)((?:^|[\s?&{,'\"-])(?:neuroshard_)?token['\"]?\s*[=:]\s*)(?:\"[^\"]*\"|'[^']*'|[^\s&,;}'\"]+)"),
)
_STANDARD_ATTRIBUTES = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class Redactor:
    """Replaces registered secrets in text; safe to use and to extend from any thread."""

    def __init__(self, *secrets: str) -> None:
        self._lock = Lock()
        self._patterns: tuple[re.Pattern[str], ...] = ()
        for secret in secrets:
            self.add(secret)

    def add(self, secret: str) -> None:
        """Never let this text through again; a phrase is found however its words are spaced and cased."""
        words = secret.split()
        if not words:
            return
        pattern = r"(?:\s|%20|\+|\\n|\\t)+".join(re.escape(word) for word in words)
        if len(secret) < _SHORT:
            pattern = rf"(?<!\w){pattern}(?!\w)"
        compiled = re.compile(pattern, re.IGNORECASE)
        with self._lock:
            self._patterns = (*self._patterns, compiled)

    def clean(self, text: str) -> str:
        """`text` without secrets."""
        for pattern in self._patterns:
            text = pattern.sub(REPLACEMENT, text)
        for pattern in _PATTERNS:
            text = pattern.sub(rf"\g<1>{REPLACEMENT}", text)
        return text


class RedactingFilter(logging.Filter):
    """Cleans a record once, in place, before any handler formats it: message, arguments, traceback and extras."""

    def __init__(self, redactor: Redactor) -> None:
        super().__init__()
        self._redactor = redactor
        self._formatter = logging.Formatter()

    def filter(self, record: logging.LogRecord) -> bool:
        """Always true; the record afterwards holds only cleaned text."""
        clean = self._redactor.clean
        record.msg, record.args = clean(_message_of(record)), ()
        if record.exc_info:
            record.exc_text = record.exc_text or self._formatter.formatException(record.exc_info)
            record.exc_info = None  # its frames could still be printed elsewhere
        if record.exc_text:
            record.exc_text = clean(record.exc_text)
        if record.stack_info:
            record.stack_info = clean(record.stack_info)
        for name, value in extras_of(record).items():
            if not isinstance(value, bool | int | float | None):
                setattr(record, name, clean(str(value)))
        return True


def extras_of(record: logging.LogRecord) -> dict[str, object]:
    """What the caller gave as `extra`."""
    return {name: value for name, value in vars(record).items() if name not in _STANDARD_ATTRIBUTES}


def _message_of(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except (TypeError, ValueError, KeyError) as error:  # wrong number or kind of arguments must not lose the line
        return f"{record.msg} {record.args!r} [not formatted: {error}]"
