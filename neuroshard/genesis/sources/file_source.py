"""A source of files: one after another, each by a reader of its kind. A position is a file and a place in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from neuroshard.errors import DataError
from neuroshard.genesis.sources.file_tree import Parts, files_from, path_of
from neuroshard.genesis.sources.records import Position, Record, SourceFailureError

# (file, place to begin at) -> records, each with the place after it. 0 is the beginning of a file.
FileReading = Callable[[Path, int], Iterator[tuple[Record, int]]]


@dataclass(frozen=True)
class FileSource:
    """Files below a folder, or one file. Files that appear later are read when their names come after those read."""

    name: str
    root: Path
    suffixes: tuple[str, ...]
    read: FileReading

    def open(self, position: Position) -> FileReader:
        """A reading from the position on. Raises DataError when the position is not one of such a source."""
        if not position:
            return FileReader(self, (), 0)
        file, place = position.get("file"), position.get("place")
        if not isinstance(file, str) or not isinstance(place, int) or place < 0:
            raise DataError(f"The position of source {self.name!r} is damaged.", "Build a new data set.")
        return FileReader(self, tuple(file.split("/")), place)


class FileReader:
    """One reading of a FileSource."""

    def __init__(self, source: FileSource, file: Parts, place: int) -> None:
        self._source = source
        self._file = file
        self._place = place

    def position(self) -> Position:
        """File and place after the record given last."""
        return {"file": "/".join(self._file), "place": self._place} if self._file else {}

    def records(self) -> Iterator[Record]:
        """All records from the position on. Raises SourceFailureError for what cannot be read now."""
        root, begun, place = self._source.root, self._file, self._place
        if not root.exists():
            raise SourceFailureError(f"Source {self._source.name!r}: {root} does not exist.", "Name a file or folder.")
        for file in files_from(root, self._source.suffixes, begun):
            path = path_of(root, file)
            try:
                for record, after in self._source.read(path, place if file == begun else 0):
                    self._file, self._place = file, after
                    yield record
            except OSError as error:
                raise SourceFailureError(f"{path} cannot be read: {error.strerror or error}.") from error
