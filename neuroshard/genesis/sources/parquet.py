"""Parquet files: a text column, read a few rows at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neuroshard.genesis.sources.extras import arrow_error, parquet
from neuroshard.genesis.sources.records import MAX_RECORD_BYTES, Record, SourceFailureError, missing_field

_ROWS = 64  # at a time


@dataclass(frozen=True)
class ParquetRows:
    """Reads files of one source."""

    source: str
    text_field: str

    def read(self, path: Path, place: int) -> Iterator[tuple[Record, int]]:
        """Records from row `place` on. Raises SourceFailureError for a damaged file, DataError without the column."""
        try:
            with parquet().ParquetFile(path, pre_buffer=False) as file:
                names = [str(name) for name in file.schema_arrow.names]
                if self.text_field not in names:
                    raise missing_field(self.source, self.text_field, names)
                yield from self._rows(file, path, place)
        except arrow_error() as error:
            raise SourceFailureError(f"{path} is damaged or no Parquet file: {error}.", "Fetch it again.") from error

    def _rows(self, file: Any, path: Path, place: int) -> Iterator[tuple[Record, int]]:
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

    def _record(self, value: Any, place: str) -> Record:
        try:
            buffer = value.as_buffer() if hasattr(value, "as_buffer") else None
        except TypeError:
            buffer = None
        if buffer is None:
            return Record("", f"{place}: no text under {self.text_field!r}")
        if buffer.size > MAX_RECORD_BYTES:
            return Record("", f"{place} is over the limit")
        return Record(bytes(buffer).decode("utf-8", "replace"))
