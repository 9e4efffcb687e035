from __future__ import annotations

import gc
import json
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from neuroshard.data.tokenizer import (
    BOS,
    EOS,
    LLAMA_PATTERN,
    SPLIT_PATTERN,
    Tokenizer,
    TokenizerTable,
    byte_table,
    count_words,
    encode_reference,
    learn_merges,
    replace_surrogates,
    split_words,
)
from neuroshard.data.tokenizer.encoder import CachedEncoder, FastEncoder
from neuroshard.data.tokenizer.table import EXPRESSIONS, MAX_WORD_CHARACTERS
from neuroshard.errors import DataError

VECTORS = json.loads((Path(__file__).parent.parent / "vectors" / "tokenizer.json").read_text())
TEXT = (
    "The tokenizer learns the most frequent pairs first; then it's encoded, it isn't decoded.\n\n"
    "    def encode(text: str) -> list[int]:\n        return [1, 22, 333]\n"
    "Caf\u00e9 na\u00efve \u4f60\u597d\u4f60\u597d \U0001f600\U0001f600 don\u2019t \u2014 stop.   "
    "Aaaa aaaa aaaaaaa.\r\n\t"
) * 3
LEARNED = Tokenizer(learn_merges([TEXT], 150))
BYTES = Tokenizer(byte_table())
# Text near what was learned, so that merges happen, mixed with anything at all.
any_text = st.lists(st.one_of(st.text(max_size=12), st.sampled_from(split_words(TEXT)))).map("".join)
surrogates = st.text(alphabet=st.characters(categories=["Cs", "L", "Zs"]), max_size=12)


@pytest.mark.parametrize("vector", VECTORS["without_merges"], ids=lambda vector: repr(vector["text"]))
def test_golden_ids(vector: dict[str, object]) -> None:
    text = str(vector["text"])
    assert BYTES.encode(text, bos=True, eos=True).tolist() == vector["ids"]


@pytest.mark.parametrize("vector", VECTORS["split"], ids=lambda vector: repr(vector["text"]))
def test_golden_split(vector: dict[str, object]) -> None:
    assert split_words(str(vector["text"])) == vector["pieces"]


@given(any_text)
@example("\x00\x00 \x1c\x1d\x85\u2028\u3000\ufeff")
@example(" " * 200 + "x")
@example("'s'\u2019ll''re")
@settings(max_examples=150)
def test_fast_and_plain_encoder_agree_and_round_trip(text: str) -> None:
    ids = LEARNED.encode(text)
    assert ids.dtype == np.uint32
    assert ids.tolist() == encode_reference(LEARNED.table, text)
    assert LEARNED.decode(ids.tolist()) == text
    assert LEARNED.decode_bytes(ids.tolist()) == text.encode()


@given(any_text)
def test_words_join_to_the_text_and_are_short(text: str) -> None:
    words = split_words(text)
    assert "".join(words) == text
    assert all(0 < len(word) <= 65 for word in words)


@given(surrogates)
@example("\ud800")
@example("a\udfff\ud83d\ude00\ud83d")
def test_lone_surrogates_become_the_replacement_character(text: str) -> None:
    expected = replace_surrogates(text)
    expected.encode()  # UTF-8 can hold it
    assert LEARNED.encode(text).tolist() == encode_reference(LEARNED.table, text)
    assert LEARNED.decode(LEARNED.encode(text).tolist()) == expected


def test_surrogate_pairs_become_their_character() -> None:
    assert replace_surrogates("x\ud83d\ude00y") == "x\U0001f600y"
    assert replace_surrogates("x\ude00\ud83dy") == "x\ufffd\ufffdy"


@pytest.mark.parametrize("plane", range(17))
def test_every_plane_splits_and_encodes_alike(plane: int) -> None:
    points = [plane * 0x10000 + offset for offset in range(0, 0x10000, 7)]
    text = "".join(chr(point) + ("a" if point % 3 else " ") for point in points if not 0xD800 <= point < 0xE000)
    assert LEARNED.encode(text).tolist() == encode_reference(LEARNED.table, text)
    assert LEARNED.decode(LEARNED.encode(text).tolist()) == text


def test_what_looks_special_is_text() -> None:
    for text in ("<|endoftext|>", "<s></s>", "[PAD]", "<bos>", "<|im_start|>"):
        ids = LEARNED.encode(text)
        assert ids.min() >= 10
        assert LEARNED.decode(ids.tolist()) == text


def test_documents_stand_between_bos_and_eos() -> None:
    for text in ("one", "", "two"):
        ids = LEARNED.encode(text, bos=True, eos=True)
        assert (ids[0], ids[-1]) == (BOS, EOS)
        assert (ids[1:-1] >= 10).all()


@given(st.lists(st.integers(0, LEARNED.size - 1)))
def test_any_known_ids_decode(ids: list[int]) -> None:
    decoder = LEARNED.decoder()
    streamed = "".join(decoder.feed(identifier) for identifier in ids) + decoder.finish()
    assert streamed == LEARNED.decode(ids)


@pytest.mark.parametrize("identifier", [-1, LEARNED.size, 2**40])
def test_an_unknown_id_is_refused(identifier: int) -> None:
    with pytest.raises(DataError, match=f"{identifier} is unknown"):
        LEARNED.decode([identifier])
    with pytest.raises(DataError, match="is unknown"):
        LEARNED.decoder().feed(identifier)


def test_the_stream_decoder_holds_back_unfinished_characters() -> None:
    decoder = BYTES.decoder()
    told = [decoder.feed(identifier) for identifier in BYTES.encode("a\U0001f600").tolist()]
    assert told == ["a", "", "", "", "\U0001f600"]
    assert decoder.finish() == ""
    decoder.feed(10 + 0xF0)
    assert decoder.finish() == "\ufffd"


@pytest.mark.parametrize(
    "text", ["a" * 10**6, " " * 10**6, "." * 10**6, "\n" * 10**6 + "x"], ids=["a", "space", "dot", "newline"]
)
def test_a_monotonous_text_neither_hangs_nor_crashes(text: str) -> None:
    assert LEARNED.decode(LEARNED.encode(text).tolist()) == text


def test_a_table_that_tiktoken_would_read_differently_is_read_by_the_plain_rule() -> None:
    # "abc" = a + bc, but ab comes first: by pairs "abc" stays (ab, c), by joined bytes it would become one token.
    a, b, c = (10 + ord(letter) for letter in "abc")
    table = TokenizerTable(merges=((a, b), (b, c), (a, 267)), vocab_size=269)
    tokenizer = Tokenizer(table)
    for text in ("abc", "abc abc bc ab", "aabbcc abcabc"):
        assert tokenizer.encode(text).tolist() == encode_reference(table, text)
    assert tokenizer.encode("abc").tolist() == [266, c]


@given(any_text)
@settings(max_examples=40)
def test_the_cached_encoder_equals_the_reference(text: str) -> None:
    assert CachedEncoder(LEARNED.table)(text).tolist() == encode_reference(LEARNED.table, text)


def test_the_patterns_use_nothing_that_differs_between_engines() -> None:
    assert set(EXPRESSIONS) == {SPLIT_PATTERN, LLAMA_PATTERN}
    for expression in EXPRESSIONS.values():
        assert re.search(r"\\[swdbpSWDBP]", expression) is None


LIKE_LLAMA = Tokenizer(learn_merges([TEXT], 150, byte_table(LLAMA_PATTERN)))


@given(any_text)
@example("\x00\x00 \x1c\x1d\x85\u2028\u3000\ufeff")
@example("\u00b2\u0661\u2167 \U0001d7d8\U00020000 x\r\n \r\n ")
@example("'S'\u2019lL''Re'")
@settings(max_examples=150)
def test_with_the_pattern_of_llama_the_encoders_agree_too(text: str) -> None:
    ids = LIKE_LLAMA.encode(text)
    assert ids.tolist() == encode_reference(LIKE_LLAMA.table, text)
    assert LIKE_LLAMA.decode(ids.tolist()) == text
    assert "".join(split_words(text, LLAMA_PATTERN)) == text


@given(st.text())
def test_words_are_the_same_without_the_ranges_above_the_first_plane(text: str) -> None:
    """A character of another plane, in a word of its own, decides which of two expressions splits the whole text."""
    assert split_words(f"{text}\n\u0041\n\U0001f600", LLAMA_PATTERN)[:-1] == split_words(f"{text}\nA\n", LLAMA_PATTERN)


@pytest.mark.parametrize(
    "text", ["ab" * 500_000, " " * 1_500_000 + "x", "." * 500_000, "\n" * 500_000, " \n" * 500_000]
)
def test_words_of_any_length_are_encoded_in_reasonable_time(text: str) -> None:
    """The second pattern has no limit on words; tiktoken's expressions fail at a million spaces."""
    assert LIKE_LLAMA.decode(LIKE_LLAMA.encode(text).tolist()) == text
    assert count_words([text], LLAMA_PATTERN).total() > 0


def test_long_words_are_learned_from_in_parts() -> None:
    counts = count_words(["a" * 200], LLAMA_PATTERN)
    assert counts == {"a" * MAX_WORD_CHARACTERS: 3, "a" * 5: 1}


def test_a_table_whose_tokens_encode_otherwise_is_refused_where_words_can_be_long() -> None:
    a, b, c = (10 + ord(letter) for letter in "abc")
    with pytest.raises(DataError, match="encodes to other tokens"):
        Tokenizer(TokenizerTable(((a, b), (b, c), (a, 267)), 269, LLAMA_PATTERN))


def test_a_tokenizer_that_has_encoded_nothing_keeps_no_encoder() -> None:
    def encoders() -> int:
        return sum(type(one) is FastEncoder for one in gc.get_objects())  # isinstance asks lazy modules

    gc.collect()
    before = encoders()
    tokenizer = Tokenizer(LEARNED.table)
    assert tokenizer.size == LEARNED.size
    assert encoders() == before
    first, second = tokenizer.encode(TEXT), tokenizer.encode(TEXT)
    assert first.tolist() == second.tolist() == LEARNED.encode(TEXT).tolist()
    assert encoders() in (before + 1, before + 2)  # LEARNED may have made its own
