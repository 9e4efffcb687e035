"""A source of files, read one after another in a fixed order, and the reader of plain text files.

A position is a file and a place in it. The file list is never in memory as a whole.
"""

from __future__ import annotations

import codecs
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import cast

from neuroshard.data.manifest import CHECKPOINTS_NAME
from neuroshard.dataset.build_folder import REPORT_NAME, UNFINISHED_SUFFIX
from neuroshard.dataset.records import MAX_RECORD_BYTES, Position, SourceChangedError, SourceFailureError, SourceRecord
from neuroshard.errors import DataError

_TEXT_SUFFIXES = (
    ".txt .md .markdown .rst .tex .org .adoc .xml .html .htm .srt"
    " .py .pyi .js .ts .tsx .jsx .c .h .cc .cpp .hpp .cs .java .kt .go .rs .rb .php .swift .scala .sh .sql .lua .pl .r"
    " .css .toml .yaml .yml .ini .cfg"
)
TEXT_SUFFIXES = tuple(_TEXT_SUFFIXES.split())
_BINARY_PROBE_BYTES = 8_192


def decode_text(data: bytes) -> str | None:
    """Text of a file: UTF-16 with a byte order mark, otherwise UTF-8, otherwise Windows-1252; None for a binary file.

    A file with a zero byte near its start is binary. Bytes that Windows-1252 does not define become U+FFFD. Line ends
    become \\n.
    """
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        text = data.decode("utf-16", "replace")
    elif b"\0" in data[:_BINARY_PROBE_BYTES]:
        return None
    else:
        try:
            text = data.decode("utf-8-sig")
        except UnicodeDecodeError:
            text = data.decode("cp1252", "replace")
    return text.replace("\r\n", "\n").replace("\r", "\n")


Parts = tuple[str, ...]  # of a path below the source's folder
_DATA_SET_NAMES = frozenset({REPORT_NAME, CHECKPOINTS_NAME})
_SKIPPED_FOLDERS = frozenset({"node_modules", "__pycache__", "venv"})


def files_from(root: Path, suffixes: tuple[str, ...], first: Parts = ()) -> Iterator[Parts]:
    """Yield regular files below `root` with one of these suffixes, from `first` on, ordered by path parts.

    A root that is a file is the only one, whatever its name, as (its name,). Hidden names, symbolic links and folders
    that contain a data set are skipped. Raises SourceFailureError when a folder cannot be read.
    """
    if root.is_file():
        if (root.name,) >= first:
            yield (root.name,)
        return
    yield from _walk(root, (), suffixes, first)


def path_of(root: Path, parts: Parts) -> Path:
    """Return the path of a file of `files_from`."""
    return root if root.is_file() else root.joinpath(*parts)


def is_searched(name: str) -> bool:
    """Whether a folder with this name is searched for files when it is below another one."""
    return not name.startswith(".") and name not in _SKIPPED_FOLDERS


def is_data_set(name: str, content: Iterable[str]) -> bool:
    """Whether a folder with this name and content is a data set that was built among the files."""
    return name.endswith(UNFINISHED_SUFFIX) or any(one in _DATA_SET_NAMES for one in content)


def _walk(folder: Path, above: Parts, suffixes: tuple[str, ...], first: Parts) -> Iterator[Parts]:
    try:
        with os.scandir(folder) as entries:
            visible = sorted(
                (entry.name, entry.is_dir(follow_symlinks=False), entry.is_file(follow_symlinks=False))
                for entry in entries
                if not entry.name.startswith(".")
            )
    except OSError as error:
        raise SourceFailureError(f"{folder} cannot be read: {error.strerror or error}.") from error
    if above and is_data_set(above[-1], (name for name, _, _ in visible)):
        return
    for name, is_folder, is_file in visible:
        if first and name < first[0]:
            continue
        if is_file and name.lower().endswith(suffixes):
            yield (*above, name)
        elif is_folder and is_searched(name):
            below = first[1:] if first and name == first[0] else ()
            yield from _walk(folder / name, (*above, name), suffixes, below)


# (file, start place) -> records, each with the place after it. 0 is the beginning of a file.
FileReading = Callable[[Path, int], Iterator[tuple[SourceRecord, int]]]


@dataclass(frozen=True)
class FilesBefore:
    """Number and size of the files before a file: a new one among them would never be read."""

    count: int = 0
    size_bytes: int = 0

    def and_one_of(self, size_bytes: int) -> FilesBefore:
        """Return the counts with one file more."""
        return FilesBefore(self.count + 1, self.size_bytes + size_bytes)

    def has_grown_since(self, before: FilesBefore) -> bool:
        """Return whether there is more than before. Files that were read may be removed."""
        return self.count > before.count or (self.count == before.count and self.size_bytes != before.size_bytes)


@dataclass(frozen=True)
class FileSource:
    """Files below a folder, or one file. Files that appear later are read when their names come after those read."""

    name: str
    root: Path
    suffixes: tuple[str, ...]
    read: FileReading

    def open(self, position: Position) -> FileReader:
        """Start reading at the position. Raises DataError when the position is not one of such a source."""
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
        """`before` None: all files before the present one count as read."""
        self._source = source
        self._file = file
        self._place = place
        self._before = before

    def position(self) -> Position:
        """File and place after the last record, and the counts of the files before that file."""
        if not self._file:
            return {}
        file, before = "/".join(self._file), self._before
        if before is None:
            return {"file": file, "place": self._place}
        return {"file": file, "place": self._place, "files": before.count, "bytes": before.size_bytes}

    def records(self) -> Iterator[SourceRecord]:
        """Yield all records from the position on.

        Raises SourceFailureError for files that cannot be read now, SourceChangedError when the files before the
        position have grown.
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
        """Count the files before the resume position. Raises SourceChangedError when there are more than were read."""
        root, found, newest = self._source.root, FilesBefore(), (0, "")
        for file in takewhile(lambda file: file < self._file, files_from(root, self._source.suffixes)):
            try:
                status = path_of(root, file).stat()
            except FileNotFoundError:
                continue  # removed meanwhile
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


_DONE = 1  # the place after the only record of a file


def read_text_file(path: Path, place: int) -> Iterator[tuple[SourceRecord, int]]:
    """Yield the file's text, unless it was read. Bytes that are invalid in every known encoding become U+FFFD."""
    if place >= _DONE:
        return
    with path.open("rb") as file:
        data = file.read(MAX_RECORD_BYTES + 1)
    if len(data) > MAX_RECORD_BYTES:
        yield SourceRecord("", f"{path} has more than {MAX_RECORD_BYTES >> 20} MB"), _DONE
        return
    text = decode_text(data)
    yield (SourceRecord("", f"{path} is not text") if text is None else SourceRecord(text)), _DONE
