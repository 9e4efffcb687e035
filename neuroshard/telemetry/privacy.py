"""Making text fit to be shown to strangers: without secrets, and without what tells who its owner is and where."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from ipaddress import ip_address
from pathlib import PurePath

from neuroshard.telemetry.redaction import REPLACEMENT, Redactor
from neuroshard.types import JsonValue

PHRASE_WORDS = 12  # of the shortest wallet phrase
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
    """Takes out registered secrets, wallet phrases, passwords, the home folder, host name and public addresses."""

    def __init__(self, redactors: Sequence[Redactor], phrase_words: Sequence[str], home: PurePath, host: str) -> None:
        """`phrase_words` are those that wallet phrases are made of."""
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
        """The words without every run of them that is long enough to be a phrase."""
        words = list(_WORD.finditer(match.group()))
        text, end = match.group(), len(words)
        for first, last in _runs(words, lambda word: word.group().lower() in self._phrase_words, end):
            text = text[: words[first].start()] + REPLACEMENT + text[words[last].end() :]
        return text


def _runs(words: Sequence[re.Match[str]], belongs: Callable[[re.Match[str]], bool], end: int) -> list[tuple[int, int]]:
    """First and last index of every run of at least twelve words that belong, the last run first."""
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
    """An address of the public internet says where somebody is; one of this computer or network does not."""
    try:
        return "[address]" if ip_address(match.group()).is_global else match.group()
    except ValueError:
        return match.group()  # a version number, or a time
