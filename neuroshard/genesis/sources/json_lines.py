"""JSON Lines, plain or packed with gzip or Zstandard: one object a line, its text under a named field."""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from neuroshard.genesis.sources.extras import zstandard
from neuroshard.genesis.sources.records import (
    FIRST_RECORDS,
    MAX_RECORD_BYTES,
    Record,
    SourceFailureError,
    missing_field,
)
from neuroshard.genesis.sources.zstandard_file import ZstandardFile

JSON_LINES_SUFFIXES = tuple(
    f".{form}{packed}" for form in ("jsonl", "ndjson", "json") for packed in ("", ".gz", ".zst")
)
_SKIP_BYTES = 1 << 20


@dataclass
class JsonLines:
    """Reads files of one source; remembers whether the text field was ever there."""

    source: str
    text_field: str
    waits_for_line_end: bool = False  # a file that grows: its last line may be half written
    _field_seen: bool = False
    _without_field: int = 0

    def read(self, path: Path, place: int) -> Iterator[tuple[Record, int]]:
        """Records from byte `place` (unpacked) on. Raises SourceFailureError for a damaged or cut archive, DataError.

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
                        yield Record("", f"a line before byte {place} of {path} is over the limit"), place
                    elif line.strip():
                        yield self._record(line, f"line that ends at byte {place} of {path}"), place
            except (EOFError, zlib.error, gzip.BadGzipFile, *_zstd_errors(path)) as error:
                raise SourceFailureError(
                    f"{path} is damaged or not complete after {place:,} bytes: {error}.", "Fetch it again."
                ) from error

    def _record(self, line: bytes, place: str) -> Record:
        try:
            value: object = json.loads(line.decode("utf-8-sig", "replace"))
        except (ValueError, RecursionError) as error:
            return Record("", f"{place}: not JSON ({error})")
        if not isinstance(value, Mapping):
            return Record("", f"{place}: not an object")
        fields = cast("Mapping[str, object]", value)
        text = fields.get(self.text_field)
        if isinstance(text, str):
            self._field_seen = True
            return Record(text)
        self._without_field += 1
        if not self._field_seen and self._without_field >= FIRST_RECORDS:
            raise missing_field(self.source, self.text_field, list(fields))
        return Record("", f"{place}: no text under {self.text_field!r}")


def _packing(path: Path) -> str:
    """The suffix that says how a file is packed; empty for a plain one."""
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
    """Go to a place in an unpacking stream, which must read all that comes before it."""
    while byte_count > 0:
        read = len(lines.read(min(byte_count, _SKIP_BYTES)))
        if read == 0:
            return
        byte_count -= read


def _lines(stream: BinaryIO) -> Iterator[tuple[bytes, int]]:
    """Lines with their sizes; of a line over the limit only the size is right, so that it is never held whole."""
    while line := stream.readline(MAX_RECORD_BYTES + 1):
        size = len(line)
        if size > MAX_RECORD_BYTES:
            while not line.endswith(b"\n") and (line := stream.readline(_SKIP_BYTES)):
                size += len(line)
        yield line, size
