"""Documents of a text collection: how they are cut, ordered and freed of repeats. Pure; reading lives elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b, sha256
from typing import Protocol

MIN_LINE_CHARACTERS = 16  # shorter lines repeat in any text and say nothing about a copy
MIN_NEW_SHARE = 0.5

StageProgress = Callable[[str, float], None]  # (name of the stage, fraction done of it)
Fraction = Callable[[float], None]


@dataclass(frozen=True)
class Document:
    """One text with the name it was found under."""

    name: str
    text: str


class TextSource(Protocol):
    """Where the documents of a Genesis folder come from."""

    @property
    def name(self) -> str:
        """Name of the source in the manifest."""
        ...

    def fingerprint(self) -> str:
        """Changes whenever the documents would; costs much less than reading them."""
        ...

    def documents(self, progress: Fraction) -> list[Document]:
        """All documents, in the same order every time. Raises DataError when there are none."""
        ...


def without_repeats(documents: Iterable[Document]) -> list[Document]:
    """The documents without near-duplicates of earlier ones, so that a copy cannot stand on both sides of a split.

    A document stays when at least half of its text (in lines of 16 characters and more, ignoring white space at
    their ends) is new; a document without such lines stays unless the same text came before.
    """
    seen: set[bytes] = set()
    kept: list[Document] = []
    for document in documents:
        lines = [line for line in map(str.strip, document.text.splitlines()) if len(line) >= MIN_LINE_CHARACTERS]
        lines = lines or [document.text.strip()]
        digests = {_digest(line): len(line) for line in lines}
        new = sum(length for digest, length in digests.items() if digest not in seen)
        if new >= MIN_NEW_SHARE * sum(digests.values()) and new > 0:
            kept.append(document)
            seen.update(digests)
    return kept


def _digest(line: str) -> bytes:
    return blake2b(line.encode("utf-8", "surrogatepass"), digest_size=8).digest()


def in_sections(documents: Iterable[Document], max_characters: int) -> Iterator[Document]:
    """Long documents cut at ends of paragraphs, else of lines, else anywhere, into sections of at most max_characters.

    Sections are documents of their own from here on: shuffled apart, they make every shard represent the whole text.
    """
    for document in documents:
        if len(document.text) <= max_characters:
            yield document
            continue
        start = 0
        while start < len(document.text):
            stop = _section_end(document.text, start, max_characters)
            yield Document(f"{document.name}#{start}", document.text[start:stop])
            start = stop


def _section_end(text: str, start: int, max_characters: int) -> int:
    limit = start + max_characters
    if limit >= len(text):
        return len(text)
    earliest = start + max_characters // 2
    for separator in ("\n\n", "\n", " "):
        found = text.rfind(separator, earliest, limit)
        if found >= 0:
            return found + len(separator)
    return limit


def shuffled(documents: Sequence[Document]) -> list[Document]:
    """The documents in the order of SHA-256(name, text): the same everywhere, unrelated to where they came from."""
    return sorted(documents, key=_order_key)


def _order_key(document: Document) -> bytes:
    name = document.name.encode("utf-8", "surrogatepass")
    return sha256(len(name).to_bytes(8) + name + document.text.encode("utf-8", "surrogatepass")).digest()
