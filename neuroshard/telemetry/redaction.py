"""Remove secrets from every log record, and personal data from text that the owner gives to others."""

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
    """Replaces registered secrets and token arguments in text. Any thread may use and extend it."""

    def __init__(self, *secrets: str) -> None:
        self._lock = Lock()
        self._patterns: tuple[re.Pattern[str], ...] = ()
        for secret in secrets:
            self.add(secret)

    def add(self, secret: str) -> None:
        """Register a secret. A phrase of several words is found with any spacing and in any case."""
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
        """Return `text` with every secret replaced by REPLACEMENT."""
        for pattern in self._patterns:
            text = pattern.sub(REPLACEMENT, text)
        for pattern in _PATTERNS:
            text = pattern.sub(rf"\g<1>{REPLACEMENT}", text)
        return text


class RedactingFilter(logging.Filter):
    """Removes secrets from a record in place before a handler formats it: message, arguments, traceback, extras."""

    def __init__(self, redactor: Redactor) -> None:
        super().__init__()
        self._redactor = redactor
        self._formatter = logging.Formatter()

    def filter(self, record: logging.LogRecord) -> bool:
        """Clean the record. Returns true: no record is dropped."""
        clean = self._redactor.clean
        record.msg, record.args = clean(_message_of(record)), ()
        if record.exc_info:
            record.exc_text = record.exc_text or self._formatter.formatException(record.exc_info)
            record.exc_info = None  # another handler could format it again, with the secrets
        if record.exc_text:
            record.exc_text = clean(record.exc_text)
        if record.stack_info:
            record.stack_info = clean(record.stack_info)
        for name, value in extras_of(record).items():
            if not isinstance(value, bool | int | float | None):
                setattr(record, name, clean(str(value)))
        return True


def extras_of(record: logging.LogRecord) -> dict[str, object]:
    """The `extra` fields that the caller of the logger passed."""
    return {name: value for name, value in vars(record).items() if name not in _STANDARD_ATTRIBUTES}


def _message_of(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except (TypeError, ValueError, KeyError) as error:  # arguments that do not fit the format must not lose the line
        return f"{record.msg} {record.args!r} [not formatted: {error}]"


PHRASE_WORDS = 12  # words in the shortest wallet phrase
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
        """Prepare the replacements; `phrase_words` is the word list of wallet phrases."""
        self._redactors = tuple(redactors)
        self._phrase_words = frozenset(phrase_words)
        self._replacements: list[tuple[re.Pattern[str], str]] = []
        if len(home.parts) > 1:  # not the root of the disk
            shown = re.escape(str(home))
            doubled = shown.replace(r"\\", r"\\\\")  # backslashes as repr() and JSON write them
            self._replacements += [(re.compile(rf"{text}(?![\w.-])"), "~") for text in (doubled, shown)]
        if len(host) >= _SHORTEST_NAME and host.lower() not in _USUAL_HOSTS:
            self._replacements.append((re.compile(rf"(?<![\w.-]){re.escape(host)}(?![\w-])", re.IGNORECASE), "[host]"))

    def text(self, text: str) -> str:
        """Return the text with secrets, personal data and public addresses replaced."""
        for redactor in self._redactors:
            text = redactor.clean(text)
        text = _PHRASE.sub(self._without_phrase, text)
        text = _NAMED.sub(rf"\g<1>{REPLACEMENT}", _CREDENTIALS.sub(f"{REPLACEMENT}@", text))
        for pattern, replacement in self._replacements:
            text = pattern.sub(replacement, text)
        text = _USER_FOLDER.sub(r"\g<1>[user]", text)
        return _IPV6.sub(_shown_address, _IPV4.sub(_shown_address, text))

    def json(self, value: JsonValue) -> JsonValue:
        """Return the value with every text in it cleaned, including the names of members."""
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
        """Replace every run of words of the list that is long enough to be a phrase."""
        words = list(_WORD.finditer(match.group()))
        text, end = match.group(), len(words)
        for first, last in _runs(words, lambda word: word.group().lower() in self._phrase_words, end):
            text = text[: words[first].start()] + REPLACEMENT + text[words[last].end() :]
        return text


def _runs(words: Sequence[re.Match[str]], belongs: Callable[[re.Match[str]], bool], end: int) -> list[tuple[int, int]]:
    """First and last index of every run of at least PHRASE_WORDS words that belong to the list.

    The last run comes first, so that replacing one does not move the positions of the others.
    """
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
    """Replace a public IP address, because it reveals a location. A private one stays."""
    try:
        return "[address]" if ip_address(match.group()).is_global else match.group()
    except ValueError:
        return match.group()  # a version number, or a time
