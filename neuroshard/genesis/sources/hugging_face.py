"""Datasets of the Hugging Face hub, or in its layout on this computer, streamed: nothing is downloaded as a whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from neuroshard.errors import DataError
from neuroshard.genesis.sources.extras import datasets
from neuroshard.genesis.sources.records import (
    FIRST_RECORDS,
    MAX_RECORD_BYTES,
    Position,
    Record,
    SourceFailureError,
    missing_field,
)
from neuroshard.types import JsonValue

_RECORDS_A_STATE = 256  # telling where a stream stands takes time: records in between are counted


@dataclass(frozen=True)
class HuggingFaceSource:
    """One split of a dataset."""

    name: str
    location: str
    subset: str | None
    split: str
    text_field: str
    revision: str | None = None

    def open(self, position: Position) -> HuggingFaceReader:
        """A reading from the position on. Raises UsageError without the library, DataError for a damaged position."""
        state, beyond = position.get("state"), position.get("beyond", 0)
        if not isinstance(state, Mapping | None) or not isinstance(beyond, int) or beyond < 0:
            raise DataError(f"The position of source {self.name!r} is damaged.", "Build a new data set.")
        datasets()
        return HuggingFaceReader(self, cast("Mapping[str, JsonValue] | None", state), beyond)


class HuggingFaceReader:
    """One reading. Its position is a state of the stream and the number of records taken beyond it."""

    def __init__(self, source: HuggingFaceSource, state: Mapping[str, JsonValue] | None, beyond: int) -> None:
        self._source = source
        self._state = state
        self._beyond = beyond
        self._field_seen = False
        self._without_field = 0

    def position(self) -> Position:
        """Where the stream stands after the record given last."""
        if self._state is None and self._beyond == 0:
            return {}
        return {"state": self._state, "beyond": self._beyond}

    def records(self) -> Iterator[Record]:
        """All records from the position on. Raises SourceFailureError when the hub cannot be reached, DataError."""
        library = datasets()
        failures = (OSError, library.exceptions.DatasetsError, ConnectionError, *_http_errors())
        try:
            stream = self._stream(library)
            rows = iter(stream)
            for _ in range(self._beyond):
                next(rows, None)
            for row in rows:
                self._beyond += 1
                if self._beyond >= _RECORDS_A_STATE:
                    self._state, self._beyond = stream.state_dict(), 0
                yield self._record(row)
        except failures as error:
            raise SourceFailureError(
                f"Source {self._source.name!r}: {self._source.location} cannot be read: {error}.",
                "Look whether the name is right and huggingface.co can be reached.",
            ) from error

    def _stream(self, library: Any) -> Any:
        source = self._source
        try:
            stream = library.load_dataset(
                source.location, name=source.subset, split=source.split, revision=source.revision, streaming=True
            )
        except (ValueError, RuntimeError) as error:  # an unknown subset or split; a dataset that is a program
            raise DataError(
                f"Source {source.name!r}: {source.location} cannot be opened: {error}",
                'A dataset that is loaded by a program may have files too: revision = "refs/convert/parquet".',
            ) from error
        if self._state is not None:
            stream.load_state_dict(dict(self._state))
        return stream

    def _record(self, row: Mapping[str, object]) -> Record:
        text = row.get(self._source.text_field)
        if isinstance(text, str):
            self._field_seen = True
            return Record(text) if len(text) <= MAX_RECORD_BYTES else Record("", "a document is over the limit")
        self._without_field += 1
        if not self._field_seen and self._without_field >= FIRST_RECORDS:
            raise missing_field(self._source.name, self._source.text_field, list(row))
        return Record("", f"a document has no text under {self._source.text_field!r}")


def _http_errors() -> tuple[type[Exception], ...]:
    """What the hub's client raises when a connection breaks, by the versions of its HTTP library."""
    from importlib import import_module, util

    libraries = [import_module(name) for name in ("httpx", "httpx2", "requests") if util.find_spec(name)]
    names = ("HTTPError", "RequestException")
    return tuple(getattr(library, name) for library in libraries for name in names if hasattr(library, name))
