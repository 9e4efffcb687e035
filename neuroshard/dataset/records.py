"""The interface of every document source: records in a fixed order, and positions from which reading resumes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from neuroshard.errors import DataError, DataUnavailableError
from neuroshard.types import JsonValue

MAX_RECORD_BYTES = 128 << 20  # of a line or file; larger ones are passed over, so that memory stays bounded
FIRST_RECORDS = 1_000  # so many without the text field mean that the field has another name

Position: TypeAlias = Mapping[str, JsonValue]  # only its own source understands it; {} is the beginning


class SourceFailureError(DataUnavailableError):
    """A source that cannot be read now; reading goes on from its last position once it can."""


class SourceChangedError(SourceFailureError):
    """Among what was read of a source there is something new: it is read on once somebody has put that right."""


@dataclass(frozen=True)
class SourceRecord:
    """One document, or in `problem` why there is none at this place."""

    text: str
    problem: str = ""


class RecordReader(Protocol):
    """One reading of a source."""

    def records(self) -> Iterator[SourceRecord]:
        """The records from the position on, in an order that never changes. Raises SourceFailureError, DataError."""
        ...

    def position(self) -> Position:
        """The place after the record given last."""
        ...


class DocumentSource(Protocol):
    """Something that can be read from any position it told of before."""

    def open(self, position: Position) -> RecordReader:
        """A reading that begins at the position."""
        ...


def missing_field(source: str, field: str, found: list[str]) -> DataError:
    """The error for a source whose documents have no such field."""
    names = ", ".join(repr(name[:60]) for name in found[:20]) or "none at all"
    return DataError(
        f"Source {source!r}: no document has text under text_field {field!r}. Its fields are: {names}.",
        "Name one of them as text_field.",
    )
