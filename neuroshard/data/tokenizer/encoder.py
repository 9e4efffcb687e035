"""The fast encoder and the decoder. Encoding runs in tiktoken with our ranks, where rank = id - 10."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import tiktoken
from numpy.typing import NDArray

from neuroshard.data.tokenizer.reference import encode_reference, encode_word, every_token_encodes_to_itself, merge_ids
from neuroshard.data.tokenizer.splitting import replace_surrogates, split_words
from neuroshard.data.tokenizer.stream import StreamDecoder, unknown_id
from neuroshard.data.tokenizer.table import BOS, EOS, FIRST_BYTE_ID, TokenizerTable, token_bytes
from neuroshard.errors import DataError

TokenIds = NDArray[np.uint32]

MAX_CACHED_WORDS = 200_000
_SAMPLE_TEXT = (
    "It's a check: the fast encoder must agree with the plain one. 1234567 tokens,\tdon\u2019t   stop\n\n  here; "
    "\u00e9\u00e8 \u4f60\u597d \U0001f600 \u2014 \x00\x7f <|endoftext|> <s> aaaaaaaa The theory of the other thing."
)


class Tokenizer:
    """Text to ids and back, by one table."""

    def __init__(self, table: TokenizerTable) -> None:
        """Raises DataError when the fast encoder disagrees with the reference on a sample text."""
        self.table = table
        self._pieces = token_bytes(table)
        self._encode_plain = self._fast_encoder() if every_token_encodes_to_itself(table) else CachedEncoder(table)
        if self._encode_plain(_SAMPLE_TEXT).tolist() != encode_reference(table, _SAMPLE_TEXT):
            raise DataError("The tokenizer table cannot be used: the encoder disagrees with the reference.")

    @property
    def size(self) -> int:
        """The number of ids in use; every id that `encode` gives is lower."""
        return len(self._pieces)

    def encode(self, text: str, *, bos: bool = False, eos: bool = False) -> TokenIds:
        """Ids of a text, uint32 of shape (n,). What looks like a special token in the text is encoded as text."""
        ids = self._encode_plain(replace_surrogates(text))
        return np.concatenate([[BOS] * bos, ids, [EOS] * eos], dtype=np.uint32, casting="unsafe") if bos or eos else ids

    def encode_documents(self, documents: Iterable[str]) -> Iterator[TokenIds]:
        """Ids of each document in turn, BOS before it and EOS after it."""
        for document in documents:
            yield self.encode(document, bos=True, eos=True)

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The exact bytes the ids stand for; special ids are skipped. Raises DataError for an unknown id."""
        return b"".join([self._pieces[self._checked(identifier)] for identifier in ids])

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the ids; bytes that are not UTF-8 become U+FFFD. Raises DataError only for an unknown id."""
        return self.decode_bytes(ids).decode("utf-8", "replace")

    def decoder(self) -> StreamDecoder:
        """A decoder that takes ids one at a time."""
        return StreamDecoder(self._pieces)

    def _checked(self, identifier: int) -> int:
        if not 0 <= identifier < len(self._pieces):
            raise unknown_id(identifier, len(self._pieces))
        return identifier

    def _fast_encoder(self) -> FastEncoder:
        return FastEncoder(self.table.pattern, self._pieces[FIRST_BYTE_ID:])


class FastEncoder:
    """tiktoken with our ranks; right for tables whose every token encodes to itself."""

    def __init__(self, pattern: str, pieces: Sequence[bytes]) -> None:
        self._encoding = tiktoken.Encoding(
            "neuroshard",
            pat_str=pattern,
            mergeable_ranks={piece: rank for rank, piece in enumerate(pieces)},
            special_tokens={},  # so nothing in a text can become a special id
        )

    def __call__(self, text: str) -> TokenIds:
        """Ids of a text without surrogates."""
        ranks = self._encoding.encode_to_numpy(text, disallowed_special=())
        return np.add(ranks, FIRST_BYTE_ID, dtype=np.uint32)


class CachedEncoder:
    """The reference with a memory of words, for tables of other makers that tiktoken's rule would read differently."""

    def __init__(self, table: TokenizerTable) -> None:
        self._pattern = table.pattern
        self._ids_of_pairs = merge_ids(table)
        self._known: dict[str, list[int]] = {}

    def __call__(self, text: str) -> TokenIds:
        """Ids of a text without surrogates."""
        ids: list[int] = []
        for word in split_words(text, self._pattern):
            known = self._known.get(word)
            if known is None:
                known = encode_word(word.encode(), self._ids_of_pairs)
                if len(self._known) < MAX_CACHED_WORDS:
                    self._known[word] = known
            ids += known
        return np.array(ids, dtype=np.uint32)
