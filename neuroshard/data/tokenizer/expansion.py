"""Ids of a grown tokenizer table, written with a smaller vocabulary: a merge that this lacks becomes its parts."""

from __future__ import annotations

from array import array
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from neuroshard.data.tokenizer.table import FIRST_MERGE_ID, TokenizerTable
from neuroshard.errors import DataError

MAX_PARTS = 1 << 24  # of all merges of a table together; 64 MB
_CHUNK_TOKENS = 1 << 17  # bounds the memory of intermediate results
Tokens: TypeAlias = "NDArray[np.unsignedinteger[Any]]"


class Expansion:
    """Takes every id at or above `vocabulary_size` apart, again and again, until only lower ids remain.

    The same text comes out, in more tokens; which ones depends on the table and the vocabulary alone.
    Raises DataError when the parts of all merges would fill the memory.
    """

    def __init__(self, table: TokenizerTable, vocabulary_size: int) -> None:
        if vocabulary_size < FIRST_MERGE_ID:
            raise ValueError(f"a vocabulary has at least {FIRST_MERGE_ID} ids, got {vocabulary_size}")
        beyond = table.merges[vocabulary_size - FIRST_MERGE_ID :]
        counts = array("q", [1]) * vocabulary_size
        for first, second in beyond:
            counts.append(counts[first] + counts[second])
        self._counts = np.frombuffer(counts, dtype=np.int64)  # (ids,) lower ids that each id becomes
        self._starts = np.cumsum(self._counts) - self._counts  # (ids,) where they begin in the parts
        total = int(self._starts[-1] + self._counts[-1])
        if total > MAX_PARTS:
            raise DataError(
                f"The tokenizer table cannot be read with a vocabulary of {vocabulary_size:,} ids: its merges have "
                f"{total:,} parts, at most {MAX_PARTS:,} are accepted.",
                "Create a run with a larger vocabulary.",
            )
        self._parts = _parts_of(beyond, self._starts, self._counts, vocabulary_size)

    def expand(self, tokens: Tokens, most_tokens: int) -> Tokens:
        """(m,) ids below the vocabulary for (n,) ids of the table, m >= n.

        Raises DataError when m would exceed `most_tokens`; the ids themselves must have been checked.
        """
        pieces = [tokens[start : start + _CHUNK_TOKENS] for start in range(0, len(tokens), _CHUNK_TOKENS)]
        total = sum(int(self._counts[piece].sum()) for piece in pieces)
        if total > most_tokens:
            raise DataError(
                f"A shard would have {total:,} tokens in the run's vocabulary, at most {most_tokens:,} fit."
            )
        expanded = np.empty(total, dtype=self._parts.dtype)
        filled = 0
        for piece in pieces:
            counts = self._counts[piece]
            ends = np.cumsum(counts)
            shifts = np.repeat(self._starts[piece] - (ends - counts), counts)
            places: NDArray[np.int64] = np.arange(len(shifts), dtype=np.int64) + shifts
            expanded[filled : filled + len(places)] = self._parts[places]
            filled += len(places)
        return expanded


def _parts_of(
    beyond: tuple[tuple[int, int], ...], starts: NDArray[np.int64], counts: NDArray[np.int64], vocabulary_size: int
) -> Tokens:
    """The lower ids of all ids one after another; an id of the vocabulary is its own part."""
    parts = array("I", range(vocabulary_size))
    begins, lengths = starts.tolist(), counts.tolist()
    for first, second in beyond:
        parts += parts[begins[first] : begins[first] + lengths[first]]
        parts += parts[begins[second] : begins[second] + lengths[second]]
    return np.array(parts, dtype=np.uint16 if vocabulary_size <= 1 << 16 else np.uint32)
