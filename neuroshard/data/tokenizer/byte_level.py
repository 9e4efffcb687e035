"""A tokenizer table in the byte-level form of GPT-2, which other programs read: every byte is a visible character."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from neuroshard.data.chat_template import JINJA
from neuroshard.data.tokenizer.table import (
    BOS,
    EOS,
    EXPRESSIONS,
    FIRST_BYTE_ID,
    PAD,
    SPECIAL_WORDS,
    UNK,
    TokenizerTable,
    token_bytes,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from neuroshard.types import JsonValue

_VISIBLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_CODE_POINT = re.compile(r"\\U([0-9a-f]{8})|\\u([0-9a-f]{4})")


def byte_characters() -> list[str]:
    """Return the character of each byte: itself when it is visible, otherwise one from U+0100 on."""
    hidden = {value: chr(0x100 + i) for i, value in enumerate(sorted(set(range(256)) - set(_VISIBLE)))}
    return [hidden.get(value, chr(value)) for value in range(256)]


def token_texts(table: TokenizerTable) -> list[str]:
    """Return the text of every id below next_merge_id, all different; special ids have names that no merge spells."""
    characters = byte_characters()
    texts = ["".join(characters[value] for value in piece) for piece in token_bytes(table)[FIRST_BYTE_ID:]]
    taken = frozenset(texts)
    names = [_free_name(SPECIAL_WORDS.get(i, f"reserved_{i}"), taken) for i in range(FIRST_BYTE_ID)]
    return names + texts


def merge_texts(table: TokenizerTable, texts: Sequence[str]) -> list[tuple[str, str]]:
    """Return the two halves of every merge in the order they were learned."""
    return [(texts[first], texts[second]) for first, second in table.merges]


def huggingface_tokenizer(table: TokenizerTable) -> dict[str, JsonValue]:
    """Return `tokenizer.json` of the `tokenizers` library: the same ids for every text, and BOS before it."""
    texts = token_texts(table)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    split = {
        "type": "Split",
        "pattern": {"Regex": _literal(EXPRESSIONS[table.pattern])},
        "behavior": "Isolated",
        "invert": False,
    }
    begin: dict[str, JsonValue] = {"SpecialToken": {"id": texts[BOS], "type_id": 0}}
    first: dict[str, JsonValue] = {"Sequence": {"id": "A", "type_id": 0}}
    second: dict[str, JsonValue] = {"Sequence": {"id": "B", "type_id": 0}}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added_token(identifier, texts[identifier]) for identifier in range(FIRST_BYTE_ID)],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [begin, first],
            "pair": [begin, first, second],
            "special_tokens": {texts[BOS]: {"id": texts[BOS], "ids": [BOS], "tokens": [texts[BOS]]}},
        },
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {text: identifier for identifier, text in enumerate(texts)},
            "merges": [list(pair) for pair in merge_texts(table, texts)],
        },
    }


def huggingface_tokenizer_config(table: TokenizerTable, sequence_length: int) -> dict[str, JsonValue]:
    """Return the matching `tokenizer_config.json`: text that looks like a special token stays text, as it does here."""
    texts = token_texts(table)
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": texts[PAD],
        "bos_token": texts[BOS],
        "eos_token": texts[EOS],
        "unk_token": texts[UNK],
        "split_special_tokens": True,
        "clean_up_tokenization_spaces": False,
        "model_max_length": sequence_length,
        "chat_template": JINJA,
    }


def _free_name(word: str, taken: frozenset[str]) -> str:
    name = f"<|{word}|>"
    while name in taken:
        name = f"<|{name}|>"
    return name


def _literal(pattern: str) -> str:
    """Return a known pattern with characters instead of escapes that the other library's engine does not support."""
    return _CODE_POINT.sub(lambda match: chr(int(match[1] or match[2], 16)), pattern)


def _added_token(identifier: int, content: str) -> dict[str, JsonValue]:
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": identifier, "content": content, **plain, "special": True}
