"""Converts a source's records to text batches, and their token ids to shards with resume marks. Pure.

A batch has a bounded number of characters; a long document is cut into pieces that together have the same tokens as the
whole. Batch boundaries depend on the documents alone, so reading again from any mark gives the same batches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from neuroshard.dataset.records import Position, RecordReader
from neuroshard.types import JsonValue

BATCH_CHARACTERS = 1 << 17

SkipNote = Callable[[str], None]


@dataclass(frozen=True)
class Mark:
    """A place in a source: a number of characters into the document that follows the position."""

    position: Position = field(default_factory=dict[str, JsonValue])
    character: int = 0
    documents: int = 0  # completely read
    skipped: int = 0  # records without text


@dataclass(frozen=True)
class Piece:
    """A part of a document, usually all of it. BOS comes before its first piece and EOS after its last."""

    text: str
    begins: bool = True
    ends: bool = True


@dataclass(frozen=True)
class TextBatch:
    """Pieces in order, and the source's mark after them."""

    pieces: tuple[Piece, ...]
    mark: Mark


def text_batches(
    reader: RecordReader, start: Mark, note: SkipNote, batch_characters: int = BATCH_CHARACTERS
) -> Iterator[TextBatch]:
    """Yield batches from `start`, which must be the reader's place. Records without text are reported and counted."""
    mark, pieces, size = start, list[Piece](), 0
    for record in reader.records():
        if record.problem or not record.text.strip():
            mark = _passed_over(mark, reader.position())
            note(record.problem or "an empty document")
            continue
        for piece, end in cut(record.text, mark.character, batch_characters):
            pieces.append(piece)
            size += len(piece.text)
            if piece.ends:
                mark = Mark(reader.position(), 0, mark.documents + 1, mark.skipped)
            else:
                mark = Mark(mark.position, end, mark.documents, mark.skipped)
            if size >= batch_characters or not piece.ends:
                yield TextBatch(tuple(pieces), mark)
                pieces, size = [], 0
    if pieces:
        yield TextBatch(tuple(pieces), mark)


def _passed_over(mark: Mark, position: Position) -> Mark:
    return Mark(position, 0, mark.documents, mark.skipped + 1)


def cut(text: str, start: int, most_characters: int) -> Iterator[tuple[Piece, int]]:
    """Yield pieces of text[start:], each with the place where it ends."""
    while True:
        end = _piece_end(text, start, start + most_characters)
        yield Piece(text[start:end], begins=start == 0, ends=end == len(text)), end
        if end == len(text):
            return
        start = end


def _piece_end(text: str, start: int, limit: int) -> int:
    """Return where white space follows another character: the tokeniser starts a word there, so no token is split.

    A line end can belong to the word of a sign before it, but not to that of a letter or digit. A text without such a
    place is cut at the limit.
    """
    if limit >= len(text):
        return len(text)
    for space in " \n":
        found = limit
        while (found := text.rfind(space, start + 1, found)) > start:
            before = text[found - 1]
            if before.isalnum() or (space == " " and not before.isspace()):
                return found
    return limit


Ids = NDArray[np.unsignedinteger[Any]]
NO_TOKENS: Ids = np.empty(0, dtype=np.uint16)


@dataclass(frozen=True)
class PackedShard:
    """A shard's ids (count,) and the state after it: reading resumes at the mark, after the leftover (n,)."""

    ids: Ids
    mark: Mark
    leftover: Ids


class Packer:
    """Collects batches of ids until there are enough for a shard."""

    def __init__(self, mark: Mark, leftover: Ids = NO_TOKENS) -> None:
        """Start at the mark of a checkpoint with its leftover, or at the beginning of the source."""
        self._batches = deque([(leftover, mark)])
        self.tokens = len(leftover)

    @property
    def reached(self) -> Mark:
        """The source's mark after all ids that were added."""
        return self._batches[-1][1]

    def add(self, ids: Ids, mark: Mark) -> None:
        """Add the ids (n,) of one batch, which ends at the mark."""
        self._batches.append((ids, mark))
        self.tokens += len(ids)

    def cut(self, count: int) -> PackedShard:
        """Take `count` ids from the front; at least that number must be present."""
        if not 0 < count <= self.tokens:
            raise ValueError(f"cannot cut {count} of {self.tokens} tokens")
        parts: list[Ids] = []
        missing = count
        ids, mark = self._batches.popleft()
        while len(ids) < missing:
            parts.append(ids)
            missing -= len(ids)
            ids, mark = self._batches.popleft()
        leftover = ids[missing:]
        parts.append(ids[:missing])
        self._batches.appendleft((leftover, mark))
        self.tokens -= count
        return PackedShard(np.concatenate(parts), mark, leftover)
