"""Encoding and decoding: the fast encoder, the plain reference encoder, and the decoder for generated text.

The fast encoder runs in tiktoken with our ranks, where rank = id - 10. The reference encoder is short and slow; tests
compare the fast encoder with it, and `Tokenizer` falls back to it."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise

import numpy as np
import tiktoken
from numpy.typing import NDArray

from neuroshard.data.tokenizer.table import (
    BOS,
    EOS,
    EXPRESSIONS,
    FIRST_BYTE_ID,
    FIRST_MERGE_ID,
    SPECIAL_WORDS,
    SPLIT_PATTERN,
    Pair,
    TokenizerTable,
    replace_surrogates,
    split_words,
    token_bytes,
)
from neuroshard.errors import DataError


class StreamDecoder:
    """Turns ids into text piece by piece, holding back the bytes of an unfinished UTF-8 character."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        """`pieces` holds the byte string of every id."""
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, identifier: int) -> str:
        """Return the text that this id completes, possibly none; special ids add nothing. Raises DataError."""
        if not 0 <= identifier < len(self._pieces):
            raise unknown_id(identifier, len(self._pieces))
        if identifier < FIRST_BYTE_ID:
            return ""
        return self._decoder.decode(self._pieces[identifier])

    def finish(self) -> str:
        """Return U+FFFD if a character stayed unfinished, otherwise an empty text."""
        return self._decoder.decode(b"", final=True)


def unknown_id(identifier: int, size: int) -> DataError:
    """Return the error for an id that has no table entry."""
    return DataError(f"Token id {identifier} is unknown; this tokenizer has the ids 0..{size - 1}.")


def merge_ids(table: TokenizerTable) -> dict[Pair, int]:
    """Map each pair of the table to the id that it merges into."""
    return {pair: FIRST_MERGE_ID + i for i, pair in enumerate(table.merges)}


def encode_word(word: bytes, ids_of_pairs: Mapping[Pair, int]) -> list[int]:
    """Encode one word: merge the pair learned first, leftmost first, until no pair is in the table."""
    ids = [FIRST_BYTE_ID + value for value in word]
    while len(ids) > 1:
        pairs = enumerate(pairwise(ids))
        candidates = [(ids_of_pairs[pair], i) for i, pair in pairs if pair in ids_of_pairs]
        if not candidates:
            break
        merged, at = min(candidates)
        ids[at : at + 2] = [merged]
    return ids


def encode_reference(table: TokenizerTable, text: str) -> list[int]:
    """Encode a text without BOS and EOS; lone surrogates count as U+FFFD."""
    ids_of_pairs = merge_ids(table)
    words = split_words(replace_surrogates(text), table.pattern)
    return [identifier for word in words for identifier in encode_word(word.encode(), ids_of_pairs)]


def every_token_encodes_to_itself(table: TokenizerTable) -> bool:
    """Return whether the reference encodes every merged token's bytes as that token's own id.

    This is the condition under which merging by rank of the joined bytes (tiktoken) equals merging by pair: the merges
    inside a span that nothing crosses depend on the span's bytes alone, so two adjacent tokens that spell a known token
    are always that token's own two halves. A learned table meets it by construction.

    Token t = (a, b) fails when, while a and b are being assembled, some earlier merge joins a token on a's right edge
    with one on b's left edge. x on the edge of a lives until the merge p_x that swallows it, y until p_y; a merge m of
    (x, y) comes first when m < p_x and m <= p_y (of equal merges the leftmost is applied first).
    """
    ids_of_pairs = merge_ids(table)
    for identifier, (first, second) in enumerate(table.merges, start=FIRST_MERGE_ID):
        left = _edge(table, first, identifier, side=1)
        right = _edge(table, second, identifier, side=0)
        for x, x_ends in left:
            for y, y_ends in right:
                merged = ids_of_pairs.get((x, y))
                if merged is not None and merged < x_ends and merged <= y_ends and merged != identifier:
                    return False
    return True


def _edge(table: TokenizerTable, token: int, swallowed_by: int, side: int) -> list[Pair]:
    """Return the tokens on one edge of a token's tree, each with the id of the merge that ends it; side 1 is right."""
    edge = [(token, swallowed_by)]
    while token >= FIRST_MERGE_ID:
        swallowed_by, token = token, table.merges[token - FIRST_MERGE_ID][side]
        edge.append((token, swallowed_by))
    return edge


TokenIds = NDArray[np.uint32]

MAX_CACHED_WORDS = 200_000
_SAMPLE_TEXT = (
    "It's a check: the fast encoder must agree with the plain one. 1234567 tokens,\tdon\u2019t   stop\n\n  here; "
    "\u00e9\u00e8 \u4f60\u597d \U0001f600 \u2014 \x00\x7f <|endoftext|> <s> aaaaaaaa The theory of the other thing."
)


class Tokenizer:
    """Encodes and decodes text with one table."""

    def __init__(self, table: TokenizerTable) -> None:
        """Raises DataError when the fast encoder disagrees with the reference on a sample text.

        The plain encoder takes the square of a word's length, so it serves only the pattern whose words are short.
        """
        self.table = table
        self._pieces = token_bytes(table)
        self._is_fast = every_token_encodes_to_itself(table)
        if not self._is_fast and table.pattern != SPLIT_PATTERN:
            raise DataError("The tokenizer table cannot be used: a token's text encodes to other tokens.")
        if self._new_encoder()(_SAMPLE_TEXT).tolist() != encode_reference(table, _SAMPLE_TEXT):
            raise DataError("The tokenizer table cannot be used: the encoder disagrees with the reference.")

    @property
    def size(self) -> int:
        """The number of ids in use; every id that `encode` gives is lower."""
        return len(self._pieces)

    def encode(self, text: str, *, bos: bool = False, eos: bool = False) -> TokenIds:
        """Encode a text as uint32 (n,). Text that looks like a special token is encoded as text."""
        ids = self._encode_plain(replace_surrogates(text))
        return np.concatenate([[BOS] * bos, ids, [EOS] * eos], dtype=np.uint32, casting="unsafe") if bos or eos else ids

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """Return the exact bytes of the ids; special ids are skipped. Raises DataError for an unknown id."""
        return b"".join([self._pieces[self._checked(identifier)] for identifier in ids])

    def decode(self, ids: Iterable[int]) -> str:
        """Decode the ids; bytes that are not UTF-8 become U+FFFD. Raises DataError only for an unknown id."""
        return self.decode_bytes(ids).decode("utf-8", "replace")

    def decoder(self) -> StreamDecoder:
        """Return a decoder that takes ids one at a time."""
        return StreamDecoder(self._pieces)

    def token_content(self, identifier: int) -> bytes:
        """Return the bytes of one id; none for a special id, and for one that a larger vocabulary leaves unused."""
        return self._pieces[identifier] if identifier < len(self._pieces) else b""

    def token_text(self, identifier: int) -> str:
        """Return one id as text: its characters, escaped bytes if they are not UTF-8, or the name of a special id."""
        content = self.token_content(identifier)
        if not content:
            return f"<|{SPECIAL_WORDS.get(identifier, f'unused_{identifier}')}|>"
        try:
            return content.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{value:02x}" for value in content)

    def _checked(self, identifier: int) -> int:
        if not 0 <= identifier < len(self._pieces):
            raise unknown_id(identifier, len(self._pieces))
        return identifier

    @cached_property
    def _encode_plain(self) -> FastEncoder | CachedEncoder:
        """Made when a text is encoded: it takes more than 6 MB, and a node that trains on token ids encodes none."""
        return self._new_encoder()

    def _new_encoder(self) -> FastEncoder | CachedEncoder:
        if self._is_fast:
            return FastEncoder(self.table.pattern, self._pieces[FIRST_BYTE_ID:])
        return CachedEncoder(self.table)


class FastEncoder:
    """tiktoken with our ranks; right for tables whose every token encodes to itself."""

    def __init__(self, pattern: str, pieces: Sequence[bytes]) -> None:
        ranks = {piece: rank for rank, piece in enumerate(pieces)}
        # Without special tokens, nothing in a text can become a special id.
        self._encoding = tiktoken.Encoding(
            "neuroshard", pat_str=EXPRESSIONS[pattern], mergeable_ranks=ranks, special_tokens={}
        )
        self._whole = tiktoken.Encoding("pieces", pat_str="(?s:.+)", mergeable_ranks=ranks, special_tokens={})
        self._pattern = pattern

    def __call__(self, text: str) -> TokenIds:
        """Return the ids of a text without surrogates."""
        try:
            ranks = self._encoding.encode_to_numpy(text, disallowed_special=())
        except ValueError:  # a million spaces in a row are too much for its expressions, though not for ours
            words = split_words(text, self._pattern)
            ranks = np.concatenate([self._whole.encode_to_numpy(word, disallowed_special=()) for word in words])
        return np.add(ranks, FIRST_BYTE_ID, dtype=np.uint32)


class CachedEncoder:
    """The reference with a cache of words, for other makers' tables, which tiktoken's rule would read differently."""

    def __init__(self, table: TokenizerTable) -> None:
        self._pattern = table.pattern
        self._ids_of_pairs = merge_ids(table)
        self._known: dict[str, list[int]] = {}

    def __call__(self, text: str) -> TokenIds:
        """Return the ids of a text without surrogates."""
        ids: list[int] = []
        for word in split_words(text, self._pattern):
            known = self._known.get(word)
            if known is None:
                known = encode_word(word.encode(), self._ids_of_pairs)
                if len(self._known) < MAX_CACHED_WORDS:
                    self._known[word] = known
            ids += known
        return np.array(ids, dtype=np.uint32)
