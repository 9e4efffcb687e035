"""Remove secrets from every log record, and personal data from text that strangers will read."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from ipaddress import ip_address
from pathlib import PurePath
from threading import Lock

from neuroshard.types import JsonValue

REPLACEMENT = "[secret]"
_SHORT = 8  # shorter secrets are replaced only as whole words; otherwise every log line would have gaps
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
        """Remove this text from now on; a phrase is found however its words are spaced and cased."""
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
        """Clean the record and keep it: always returns true."""
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
    """The caller's `extra` fields."""
    return {name: value for name, value in vars(record).items() if name not in _STANDARD_ATTRIBUTES}


def _message_of(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except (TypeError, ValueError, KeyError) as error:  # a wrong number or kind of arguments must not lose the line
        return f"{record.msg} {record.args!r} [not formatted: {error}]"


PHRASE_WORDS = 12  # in the shortest wallet phrase
_PHRASE = re.compile(rf"\b(?:[A-Za-z]{{3,8}}[\s,]+){{{PHRASE_WORDS - 1},}}[A-Za-z]{{3,8}}\b")
_WORD = re.compile(r"[A-Za-z]+")
_CREDENTIALS = re.compile(r"(?<=://)[^/\s@]+@")
_NAMED = re.compile(
    r"(?i)((?:pass(?:word|phrase)?|secret|api[_-]?key|private[_-]?key|csrf[_-]?token|cookie)['\"]?\s*[=:]\s*)"
    r"(?:\"[^\"]*\"|'[^']*'|[^\s&,;}'\"]+)"
)
_USER_FOLDER = re.compile(r"((?:/home/|/Users/|[A-Za-z]:\\{1,2}Users\\{1,2}))[^/\\\s\"':]+")
_IPV4 = re.compile(r"(?<![\d.])(?:\d{1,3}\.){3}\d{1,3}(?![\d.]*\d)")
_IPV6 = re.compile(r"(?<![0-9A-Fa-f:])(?:[0-9A-Fa-f]{0,4}:){2,7}[0-9A-Fa-f]{0,4}(?![0-9A-Fa-f:])")
_SHORTEST_NAME = 3
_USUAL_HOSTS = frozenset({"localhost", "debian", "ubuntu", "raspberrypi"})


class Scrubber:
    """Removes registered secrets, wallet phrases, passwords, the home folder, host name and public addresses."""

    def __init__(self, redactors: Sequence[Redactor], phrase_words: Sequence[str], home: PurePath, host: str) -> None:
        """`phrase_words` is the word list of wallet phrases."""
        self._redactors = tuple(redactors)
        self._phrase_words = frozenset(phrase_words)
        self._replacements: list[tuple[re.Pattern[str], str]] = []
        if len(home.parts) > 1:  # not the root of the disk
            shown = re.escape(str(home))
            doubled = shown.replace(r"\\", r"\\\\")  # as in a representation or in JSON
            self._replacements += [(re.compile(rf"{text}(?![\w.-])"), "~") for text in (doubled, shown)]
        if len(host) >= _SHORTEST_NAME and host.lower() not in _USUAL_HOSTS:
            self._replacements.append((re.compile(rf"(?<![\w.-]){re.escape(host)}(?![\w-])", re.IGNORECASE), "[host]"))

    def text(self, text: str) -> str:
        """The text without them."""
        for redactor in self._redactors:
            text = redactor.clean(text)
        text = _PHRASE.sub(self._without_phrase, text)
        text = _NAMED.sub(rf"\g<1>{REPLACEMENT}", _CREDENTIALS.sub(f"{REPLACEMENT}@", text))
        for pattern, replacement in self._replacements:
            text = pattern.sub(replacement, text)
        text = _USER_FOLDER.sub(r"\g<1>[user]", text)
        return _IPV6.sub(_shown_address, _IPV4.sub(_shown_address, text))

    def json(self, value: JsonValue) -> JsonValue:
        """The value with every text in it cleaned, names of members too."""
        match value:
            case str():
                return self.text(value)
            case Mapping():
                return {self.text(name): self.json(item) for name, item in value.items()}
            case Sequence():
                return [self.json(item) for item in value]
            case _:
                return value

    def _without_phrase(self, match: re.Match[str]) -> str:
        """The words without every run that is long enough to be a phrase."""
        words = list(_WORD.finditer(match.group()))
        text, end = match.group(), len(words)
        for first, last in _runs(words, lambda word: word.group().lower() in self._phrase_words, end):
            text = text[: words[first].start()] + REPLACEMENT + text[words[last].end() :]
        return text


def _runs(words: Sequence[re.Match[str]], belongs: Callable[[re.Match[str]], bool], end: int) -> list[tuple[int, int]]:
    """First and last index of every run of at least twelve words from the list, the last run first."""
    found = list[tuple[int, int]]()
    start: int | None = None
    for index in range(end + 1):
        inside = index < end and belongs(words[index])
        if inside and start is None:
            start = index
        elif not inside and start is not None:
            if index - start >= PHRASE_WORDS:
                found.append((start, index - 1))
            start = None
    return found[::-1]


def _shown_address(match: re.Match[str]) -> str:
    """A replacement for an address of the public internet, which reveals a location; private ones stay."""
    try:
        return "[address]" if ip_address(match.group()).is_global else match.group()
    except ValueError:
        return match.group()  # a version number, or a time
