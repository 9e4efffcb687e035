"""A source of files: one after another, each by a reader of its kind. A position is a file and a place in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import cast

from neuroshard.errors import DataError
from neuroshard.genesis.sources.file_tree import Parts, files_from, path_of
from neuroshard.genesis.sources.records import Position, Record, SourceChangedError, SourceFailureError

# (file, place to begin at) -> records, each with the place after it. 0 is the beginning of a file.
FileReading = Callable[[Path, int], Iterator[tuple[Record, int]]]


@dataclass(frozen=True)
class FilesBefore:
    """What lies before a file: new ones among these would never be read."""

    count: int = 0
    size_bytes: int = 0

    def and_one_of(self, size_bytes: int) -> FilesBefore:
        """With one file more."""
        return FilesBefore(self.count + 1, self.size_bytes + size_bytes)

    def has_grown_since(self, before: FilesBefore) -> bool:
        """Whether there is more now. Files that were read may be removed."""
        return self.count > before.count or (self.count == before.count and self.size_bytes != before.size_bytes)


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
            return FileReader(self, (), 0, FilesBefore())
        knows_before = not position.keys().isdisjoint(("files", "bytes"))  # earlier versions did not count
        names = ("place", "files", "bytes") if knows_before else ("place",)
        file, numbers = position.get("file"), [position.get(name) for name in names]
        if not isinstance(file, str) or not all(isinstance(number, int) and number >= 0 for number in numbers):
            raise DataError(f"The position of source {self.name!r} is damaged.", "Build a new data set.")
        place, *before = cast("list[int]", numbers)
        return FileReader(self, tuple(file.split("/")), place, FilesBefore(*before) if knows_before else None)


class FileReader:
    """One reading of a FileSource."""

    def __init__(self, source: FileSource, file: Parts, place: int, before: FilesBefore | None) -> None:
        """`before` None: whatever lies before the file now counts as read."""
        self._source = source
        self._file = file
        self._place = place
        self._before = before

    def position(self) -> Position:
        """File and place after the record given last, and how much came before that file."""
        if not self._file:
            return {}
        file, before = "/".join(self._file), self._before
        if before is None:
            return {"file": file, "place": self._place}
        return {"file": file, "place": self._place, "files": before.count, "bytes": before.size_bytes}

    def records(self) -> Iterator[Record]:
        """All records from the position on.

        Raises SourceFailureError for what cannot be read now, SourceChangedError when there is more before the
        position than was read.
        """
        root, begun, place = self._source.root, self._file, self._place
        if not root.exists():
            raise SourceFailureError(f"Source {self._source.name!r}: {root} does not exist.", "Name a file or folder.")
        before = self._found_before()
        for file in files_from(root, self._source.suffixes, begun):
            path = path_of(root, file)
            try:
                for record, after in self._source.read(path, place if file == begun else 0):
                    self._file, self._place, self._before = file, after, before
                    yield record
                before = before.and_one_of(path.stat().st_size)
            except OSError as error:
                raise SourceFailureError(f"{path} cannot be read: {error.strerror or error}.") from error

    def _found_before(self) -> FilesBefore:
        """The files before the one where reading goes on. Raises SourceChangedError: they are more than were read."""
        root, found, newest = self._source.root, FilesBefore(), (0, "")
        for file in takewhile(lambda file: file < self._file, files_from(root, self._source.suffixes)):
            try:
                status = path_of(root, file).stat()
            except FileNotFoundError:
                continue  # removed in this moment
            except OSError as error:
                raise SourceFailureError(f"{root} cannot be read: {error.strerror or error}.") from error
            found = found.and_one_of(status.st_size)
            newest = max(newest, (status.st_mtime_ns, "/".join(file)))
        if self._before is not None and found.has_grown_since(self._before):
            raise SourceChangedError(
                f"Source {self._source.name!r}: files were added or changed before {'/'.join(self._file)}, up to which "
                f"all was read; the newest of them is {newest[1]}.",
                "Give new files names that come after those read, or make them a source of their own; "
                "files that were read may be removed.",
            )
        return found
