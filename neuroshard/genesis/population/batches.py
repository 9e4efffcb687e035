"""From a source's records to batches of text for the tokeniser, each with a mark that says where the source stands.

A batch holds a bounded number of characters; a long document is cut into pieces that together have the same tokens as
the whole. Where batches end depends on the documents alone, so reading again from any mark gives the same batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from neuroshard.genesis.sources.records import Position, RecordReader
from neuroshard.types import JsonValue

BATCH_CHARACTERS = 1 << 17
_WHITE_SPACE = frozenset(" \t\n\x0b\x0c\r")  # as the split pattern has it

Note = Callable[[str], None]


@dataclass(frozen=True)
class Mark:
    """A place in a source: so many characters into the document that follows the position."""

    position: Position = field(default_factory=dict[str, JsonValue])
    character: int = 0
    documents: int = 0  # read whole so far
    skipped: int = 0  # records without text


@dataclass(frozen=True)
class Piece:
    """A part of a document, mostly all of it. BOS comes before its first piece and EOS after its last."""

    text: str
    begins: bool = True
    ends: bool = True


@dataclass(frozen=True)
class TextBatch:
    """Pieces in order, and where the source stands after them."""

    pieces: tuple[Piece, ...]
    mark: Mark


def text_batches(
    reader: RecordReader, start: Mark, note: Note, batch_characters: int = BATCH_CHARACTERS
) -> Iterator[TextBatch]:
    """Batches from `start`, which must be where the reader stands. Records without text are noted and counted."""
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
    """Pieces of text[start:], each with the place where it ends."""
    while True:
        end = _piece_end(text, start, start + most_characters)
        yield Piece(text[start:end], begins=start == 0, ends=end == len(text)), end
        if end == len(text):
            return
        start = end


def _piece_end(text: str, start: int, limit: int) -> int:
    """Where white space follows something else: the tokeniser begins a word there, so no token is torn.

    A text that has no such place is cut at the limit.
    """
    if limit >= len(text):
        return len(text)
    for space in " \n":
        found = limit
        while (found := text.rfind(space, start + 1, found)) > start:
            if text[found - 1] not in _WHITE_SPACE:
                return found
    return limit
