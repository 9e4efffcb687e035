"""The table as other programs read it gives our ids for every text, and our text for every id."""

from __future__ import annotations

import json
from pydoc_data import topics

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from neuroshard.data.tokenizer import FIRST_BYTE_ID, Tokenizer, TokenizerTable, byte_table, learn_merges
from neuroshard.data.tokenizer.byte_level import byte_characters, huggingface_tokenizer, token_texts

TEXTS = [topics.topics[name] for name in sorted(topics.topics)]
TABLE = learn_merges(TEXTS[:10], 300)
CHARACTERS = st.characters(exclude_categories=["Cs"])
LIKELY = st.sampled_from("aeiou'\u2019stdm 0123456789\t\n\x0b\x85\xa0\u2003.,-_<>|\u0301\u4f60\U0001f600")


def their_tokenizer(table: TokenizerTable) -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer.from_str(json.dumps(huggingface_tokenizer(table)))
    made.encode_special_tokens = True  # as tokenizer_config.json has transformers do
    return made


@pytest.mark.parametrize("table", [TABLE, byte_table()], ids=["learned", "bytes"])
def test_real_text_has_our_ids_there(table: TokenizerTable) -> None:
    ours, theirs = Tokenizer(table), their_tokenizer(table)
    for text in TEXTS[:20]:
        ids = theirs.encode(text).ids
        assert ids == ours.encode(text, bos=True).tolist()
        assert theirs.decode(ids) == text


@given(st.one_of(st.text(CHARACTERS), st.text(LIKELY), st.text("a1 \n", max_size=300)))
def test_any_text_has_our_ids_there(text: str) -> None:
    ours, theirs = Tokenizer(TABLE), their_tokenizer(TABLE)
    assert theirs.encode(text).ids == ours.encode(text, bos=True).tolist()


def test_what_looks_like_a_special_token_stays_text() -> None:
    special = token_texts(TABLE)[:FIRST_BYTE_ID]
    text = f"a {' '.join(special)} b"
    ids = their_tokenizer(TABLE).encode(text).ids
    assert ids == Tokenizer(TABLE).encode(text, bos=True).tolist()
    assert min(ids[1:]) >= FIRST_BYTE_ID


def test_a_merge_that_spells_a_special_name_takes_nothing_from_it() -> None:
    """No learner of ours makes one, but a table may come from elsewhere."""
    pieces = [FIRST_BYTE_ID + value for value in b"<|pad|>"]
    merges, last = [], pieces[0]
    for following in pieces[1:]:
        merges.append((last, following))
        last = FIRST_BYTE_ID + 256 + len(merges) - 1
    texts = token_texts(TokenizerTable(tuple(merges), 300))
    assert texts[-1] == "<|pad|>"
    assert texts[0] == "<|<|pad|>|>"
    assert len(set(texts)) == len(texts)


def test_the_characters_of_bytes_are_those_of_gpt_2() -> None:
    characters = byte_characters()
    assert len(set(characters)) == 256
    assert (characters[0x20], characters[0x0A], characters[0x41], characters[0xFF]) == (
        "\u0120", "\u010a", "A", "\u00ff",
    )  # fmt: skip
    assert set(characters) == set(tokenizers.pre_tokenizers.ByteLevel.alphabet())
