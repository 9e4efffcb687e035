"""Byte-level BPE: the table and its file, the learner, the fast encoder and the plain reference encoder."""

from neuroshard.data.tokenizer.encoder import StreamDecoder, Tokenizer, encode_reference
from neuroshard.data.tokenizer.learner import count_words, learn_from_counts, learn_merges
from neuroshard.data.tokenizer.table import (
    BOS,
    EOS,
    FIRST_BYTE_ID,
    FIRST_MERGE_ID,
    LLAMA_PATTERN,
    PAD,
    SPLIT_PATTERN,
    UNK,
    TokenizerTable,
    byte_table,
    replace_surrogates,
    split_words,
    token_bytes,
)

__all__ = [
    "BOS",
    "EOS",
    "FIRST_BYTE_ID",
    "FIRST_MERGE_ID",
    "LLAMA_PATTERN",
    "PAD",
    "SPLIT_PATTERN",
    "UNK",
    "StreamDecoder",
    "Tokenizer",
    "TokenizerTable",
    "byte_table",
    "count_words",
    "encode_reference",
    "learn_from_counts",
    "learn_merges",
    "replace_surrogates",
    "split_words",
    "token_bytes",
]
