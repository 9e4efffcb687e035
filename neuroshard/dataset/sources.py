"""The sources of a population: readers for JSON Lines, Parquet and Hugging Face datasets.

The optional libraries are imported when a source needs them: `pip install 'neuroshard[genesis]'`."""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO, assert_never, cast

from neuroshard.dataset.file_source import TEXT_SUFFIXES, FileSource, read_text_file
from neuroshard.dataset.records import (
    FIRST_RECORDS,
    MAX_RECORD_BYTES,
    DocumentSource,
    Position,
    RecordReader,
    SourceChangedError,
    SourceFailureError,
    SourceRecord,
    missing_field,
)
from neuroshard.dataset.source_configuration import (
    SHIPPED_CONFIGURATION,
    PopulationConfiguration,
    SourceConfiguration,
    VocabularyConfiguration,
    load_configuration,
)
from neuroshard.errors import DataError, UsageError
from neuroshard.types import JsonValue

# These libraries are untyped: their values are checked where they are used.


def zstandard() -> Any:
    """Import the module. Raises UsageError when it is not installed."""
    return _extra("zstandard", "zstandard")


def parquet() -> Any:
    """Import pyarrow.parquet. Raises UsageError when it is not installed."""
    return _extra("pyarrow.parquet", "pyarrow")


def arrow_error() -> type[Exception]:
    """Return pyarrow's exception for unreadable files. Raises UsageError when it is not installed."""
    return _extra("pyarrow", "pyarrow").ArrowException


def datasets() -> Any:
    """Import Hugging Face's datasets. Raises UsageError when it is not installed."""
    return _extra("datasets", "datasets")


def _extra(module: str, package: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise UsageError(
            f"This source needs {package}, which is not installed.", "Install it: pip install 'neuroshard[genesis]'"
        ) from error


_RECORDS_A_STATE = 256  # reading the stream's state is slow: records in between are counted


@dataclass(frozen=True)
class HuggingFaceSource:
    """One split of a Hugging Face dataset."""

    name: str
    location: str
    subset: str | None
    split: str
    text_field: str
    revision: str | None = None

    def open(self, position: Position) -> HuggingFaceReader:
        """Start reading at the position. Raises UsageError without the library, DataError for a damaged position."""
        state, beyond = position.get("state"), position.get("beyond", 0)
        if not isinstance(state, Mapping | None) or not isinstance(beyond, int) or beyond < 0:
            raise DataError(f"The position of source {self.name!r} is damaged.", "Build a new data set.")
        datasets()
        return HuggingFaceReader(self, cast("Mapping[str, JsonValue] | None", state), beyond)


class HuggingFaceReader:
    """One reading. Its position is a state of the stream and the number of records read after it."""

    def __init__(self, source: HuggingFaceSource, state: Mapping[str, JsonValue] | None, beyond: int) -> None:
        self._source = source
        self._state = state
        self._beyond = beyond
        self._field_seen = False
        self._without_field = 0

    def position(self) -> Position:
        """Stream state and record count after the last record."""
        if self._state is None and self._beyond == 0:
            return {}
        return {"state": self._state, "beyond": self._beyond}

    def records(self) -> Iterator[SourceRecord]:
        """Yield all records from the position on. Raises SourceFailureError if the hub is unreachable, DataError."""
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
                "Check the name, and whether this computer can reach huggingface.co.",
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

    def _record(self, row: Mapping[str, object]) -> SourceRecord:
        text = row.get(self._source.text_field)
        if isinstance(text, str):
            self._field_seen = True
            return (
                SourceRecord(text)
                if len(text) <= MAX_RECORD_BYTES
                else SourceRecord("", "a document is over the limit")
            )
        self._without_field += 1
        if not self._field_seen and self._without_field >= FIRST_RECORDS:
            raise missing_field(self._source.name, self._source.text_field, list(row))
        return SourceRecord("", f"a document has no text under {self._source.text_field!r}")


def _http_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions of the hub's client for broken connections, which depend on its HTTP library."""
    from importlib import import_module, util

    libraries = [import_module(name) for name in ("httpx", "httpx2", "requests") if util.find_spec(name)]
    names = ("HTTPError", "RequestException")
    return tuple(getattr(library, name) for library in libraries for name in names if hasattr(library, name))


_MAX_WINDOW_BYTES = 1 << 27  # memory that a frame may ask for
_PACKED_BYTES = 2_048  # at a time: a block of 4 bytes may hold 128 KiB, so no more than 64 MiB come out at once


class ZstandardFile(io.RawIOBase):
    """The decompressed bytes of a file. Raises EOFError where it ends within a frame, ZstdError where it is damaged."""

    def __init__(self, packed: BinaryIO) -> None:
        self._packed = packed
        self._unpacker = zstandard().ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES)
        self._frame: Any = None
        self._input = b""
        self._output = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        """Fill the buffer with the available bytes; 0 at the end."""
        while not self._output:
            if not self._input:
                self._input = self._packed.read(_PACKED_BYTES)
            if not self._input:
                if self._frame is not None:
                    raise EOFError("the file ends within a Zstandard frame")
                return 0
            self._unpack()
        target = memoryview(buffer).cast("B")
        count = min(len(target), len(self._output))
        target[:count] = self._output[:count]
        self._output = self._output[count:]
        return count

    def _unpack(self) -> None:
        if self._frame is None:
            self._frame = self._unpacker.decompressobj()
        self._output = memoryview(self._frame.decompress(self._input))
        self._input = b""
        if self._frame.eof:
            self._input, self._frame = self._frame.unused_data, None


JSON_LINES_SUFFIXES = tuple(
    f".{form}{packed}" for form in ("jsonl", "ndjson", "json") for packed in ("", ".gz", ".zst")
)
_SKIP_BYTES = 1 << 20


@dataclass
class JsonLines:
    """Reads the files of one source and remembers whether the text field ever occurred."""

    source: str
    text_field: str
    waits_for_line_end: bool = False  # for a growing file, whose last line may be incomplete
    _field_seen: bool = False
    _without_field: int = 0

    def read(self, path: Path, place: int) -> Iterator[tuple[SourceRecord, int]]:
        """Yield records from byte `place` (decompressed) on. Raises SourceFailureError if damaged, DataError.

        DataError: the first thousand documents of this reading have no such field.
        """
        with path.open("rb") as raw, _unpacked(path, raw) as lines:
            try:
                if _packing(path):
                    _read_past(lines, place)
                else:
                    lines.seek(place)
                for line, size in _lines(lines):
                    if self.waits_for_line_end and not line.endswith(b"\n") and size <= MAX_RECORD_BYTES:
                        return
                    place += size
                    if size > MAX_RECORD_BYTES:
                        yield SourceRecord("", f"a line before byte {place} of {path} is over the limit"), place
                    elif line.strip():
                        yield self._record(line, f"line that ends at byte {place} of {path}"), place
            except (EOFError, zlib.error, gzip.BadGzipFile, *_zstd_errors(path)) as error:
                raise SourceFailureError(
                    f"{path} is damaged or not complete after {place:,} bytes: {error}.", "Fetch it again."
                ) from error

    def _record(self, line: bytes, place: str) -> SourceRecord:
        try:
            value: object = json.loads(line.decode("utf-8-sig", "replace"))
        except (ValueError, RecursionError) as error:
            return SourceRecord("", f"{place}: not JSON ({error})")
        if not isinstance(value, Mapping):
            return SourceRecord("", f"{place}: not an object")
        fields = cast("Mapping[str, object]", value)
        text = fields.get(self.text_field)
        if isinstance(text, str):
            self._field_seen = True
            return SourceRecord(text)
        self._without_field += 1
        if not self._field_seen and self._without_field >= FIRST_RECORDS:
            raise missing_field(self.source, self.text_field, list(fields))
        return SourceRecord("", f"{place}: no text under {self.text_field!r}")


def _packing(path: Path) -> str:
    """Return the suffix of a compressed file; empty for a plain one."""
    suffix = path.suffix.lower()
    return suffix if suffix in {".gz", ".zst"} else ""


def _unpacked(path: Path, raw: BinaryIO) -> BinaryIO:
    if _packing(path) == ".gz":
        return cast("BinaryIO", gzip.GzipFile(fileobj=raw, mode="rb"))
    if _packing(path) == ".zst":
        return io.BufferedReader(ZstandardFile(raw), 1 << 17)
    return raw


def _zstd_errors(path: Path) -> tuple[type[Exception], ...]:
    return (zstandard().ZstdError,) if _packing(path) == ".zst" else ()


def _read_past(lines: BinaryIO, byte_count: int) -> None:
    """Skip to a place in a decompressing stream, which must read everything before it."""
    while byte_count > 0:
        read = len(lines.read(min(byte_count, _SKIP_BYTES)))
        if read == 0:
            return
        byte_count -= read


def _lines(stream: BinaryIO) -> Iterator[tuple[bytes, int]]:
    """Yield lines with their sizes; a line over the limit is truncated, so it is never in memory as a whole."""
    while line := stream.readline(MAX_RECORD_BYTES + 1):
        size = len(line)
        if size > MAX_RECORD_BYTES:
            while not line.endswith(b"\n") and (line := stream.readline(_SKIP_BYTES)):
                size += len(line)
        yield line, size


_ROWS = 64  # at a time


@dataclass(frozen=True)
class ParquetRows:
    """Reads the Parquet files of one source."""

    source: str
    text_field: str

    def read(self, path: Path, place: int) -> Iterator[tuple[SourceRecord, int]]:
        """Yield records from row `place` on. Raises SourceFailureError if damaged, DataError without the column."""
        try:
            with parquet().ParquetFile(path, pre_buffer=False) as file:
                names = [str(name) for name in file.schema_arrow.names]
                if self.text_field not in names:
                    raise missing_field(self.source, self.text_field, names)
                yield from self._rows(file, path, place)
        except arrow_error() as error:
            raise SourceFailureError(f"{path} is damaged or not a Parquet file: {error}.", "Fetch it again.") from error

    def _rows(self, file: Any, path: Path, place: int) -> Iterator[tuple[SourceRecord, int]]:
        row = 0
        for group in range(file.num_row_groups):
            rows = int(file.metadata.row_group(group).num_rows)
            if row + rows <= place:
                row += rows
                continue
            for batch in file.iter_batches(_ROWS, row_groups=[group], columns=[self.text_field], use_threads=False):
                for value in batch.column(0):
                    row += 1
                    if row > place:
                        yield self._record(value, f"row {row - 1} of {path}"), row

    def _record(self, value: Any, place: str) -> SourceRecord:
        try:
            buffer = value.as_buffer() if hasattr(value, "as_buffer") else None
        except TypeError:
            buffer = None
        if buffer is None:
            return SourceRecord("", f"{place}: no text under {self.text_field!r}")
        if buffer.size > MAX_RECORD_BYTES:
            return SourceRecord("", f"{place} is over the limit")
        return SourceRecord(bytes(buffer).decode("utf-8", "replace"))


def open_document_source(source: SourceConfiguration, *, follows: bool = False) -> DocumentSource:
    """Open the reader for a configured source. With `follows`, the source may grow while it is read.

    Raises UsageError when a library that this kind needs is not installed.
    """
    name, root, field = source.name, Path(source.location), source.text_field
    match source.kind:
        case "text":
            return FileSource(name, root, TEXT_SUFFIXES, read_text_file)
        case "jsonl":
            return FileSource(name, root, JSON_LINES_SUFFIXES, JsonLines(name, field, follows).read)
        case "parquet":
            parquet()
            return FileSource(name, root, (".parquet",), ParquetRows(name, field).read)
        case "huggingface":
            datasets()
            return HuggingFaceSource(name, source.location, source.subset, source.split, field, source.revision)
        case _:
            assert_never(source.kind)


__all__ = [
    "SHIPPED_CONFIGURATION",
    "DocumentSource",
    "PopulationConfiguration",
    "Position",
    "RecordReader",
    "SourceChangedError",
    "SourceConfiguration",
    "SourceFailureError",
    "SourceRecord",
    "VocabularyConfiguration",
    "load_configuration",
    "open_document_source",
]
