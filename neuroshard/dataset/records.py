"""The interface of every document source: records in a fixed order, and positions from which reading resumes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, cast

from neuroshard.errors import DataError, DataUnavailableError
from neuroshard.types import JsonValue

MAX_RECORD_BYTES = 128 << 20  # of a line or file; larger ones are skipped, so that memory stays bounded
FIRST_RECORDS = 1_000  # if none of these has the text field, the field has another name

Position: TypeAlias = Mapping[str, JsonValue]  # only its own source can interpret it; {} is the beginning


class SourceFailureError(DataUnavailableError):
    """A source cannot be read now; reading resumes from its last position once it can."""


class SourceChangedError(SourceFailureError):
    """A source changed before its position; a person must fix that before reading resumes."""


@dataclass(frozen=True)
class SourceRecord:
    """One document, or in `problem` why there is none at this place."""

    text: str
    problem: str = ""


class RecordReader(Protocol):
    """One reading of a source."""

    def records(self) -> Iterator[SourceRecord]:
        """Yield records from the position on, in an order that never changes. Raises SourceFailureError, DataError."""
        ...

    def position(self) -> Position:
        """The place after the last record returned."""
        ...


class DocumentSource(Protocol):
    """Documents that can be read from any position that was reported before."""

    def open(self, position: Position) -> RecordReader:
        """Start reading at the position."""
        ...


@dataclass(frozen=True)
class PopulationSource:
    """A source of a population: its documents, and the number of shards that it may fill."""

    name: str  # of the log file and in the manifest
    origin: str  # a position has no meaning under another origin
    target_shards: int
    documents: DocumentSource


class ListedTexts:
    """Texts in memory: a document source and its reader. A position is the number of texts that were read."""

    def __init__(self, texts: Sequence[str], read: int = 0) -> None:
        self._texts = texts
        self._read = read

    def open(self, position: Position) -> ListedTexts:
        return ListedTexts(self._texts, cast("int", position.get("read", 0)))

    def position(self) -> Position:
        return {"read": self._read}

    def records(self) -> Iterator[SourceRecord]:
        for text in self._texts[self._read :]:
            self._read += 1
            yield SourceRecord(text)


def missing_field(source: str, field: str, found: list[str]) -> DataError:
    """Return the error for a source whose documents have no such field."""
    names = ", ".join(repr(name[:60]) for name in found[:20]) or "none at all"
    return DataError(
        f"Source {source!r}: no document has text under text_field {field!r}. Its fields are: {names}.",
        "Name one of them as text_field.",
    )
