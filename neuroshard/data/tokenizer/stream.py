"""Decoding token by token, for generation: text comes out as soon as its bytes are a complete character."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from neuroshard.data.tokenizer.table import FIRST_BYTE_ID
from neuroshard.errors import DataError


class StreamDecoder:
    """Turns ids into text piece by piece, holding back the bytes of an unfinished UTF-8 character."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        """`pieces` holds the byte string of every id."""
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, identifier: int) -> str:
        """The text that this id completes, perhaps none; special ids add nothing. DataError for an unknown id."""
        if not 0 <= identifier < len(self._pieces):
            raise unknown_id(identifier, len(self._pieces))
        if identifier < FIRST_BYTE_ID:
            return ""
        return self._decoder.decode(self._pieces[identifier])

    def finish(self) -> str:
        """What is left at the end: U+FFFD when a character stayed unfinished, else nothing."""
        return self._decoder.decode(b"", final=True)


def unknown_id(identifier: int, size: int) -> DataError:
    """The error for an id that no table entry explains."""
    return DataError(f"Token id {identifier} is unknown; this tokenizer has the ids 0..{size - 1}.")
