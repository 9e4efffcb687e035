"""Plain text files, one document each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from neuroshard.genesis.plain_text import decode_text
from neuroshard.genesis.sources.records import MAX_RECORD_BYTES, Record

_DONE = 1  # the place after the only record of a file


def read_text_file(path: Path, place: int) -> Iterator[tuple[Record, int]]:
    """The file's text, unless it was read. Bytes that are no text of any encoding we know become U+FFFD."""
    if place >= _DONE:
        return
    with path.open("rb") as file:
        data = file.read(MAX_RECORD_BYTES + 1)
    if len(data) > MAX_RECORD_BYTES:
        yield Record("", f"{path} has more than {MAX_RECORD_BYTES >> 20} MB"), _DONE
        return
    text = decode_text(data)
    yield (Record("", f"{path} is not text") if text is None else Record(text)), _DONE
