from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neuroshard.data.tokenizer import (
    TokenizerTable,
    byte_table,
    count_words,
    learn_from_counts,
    learn_merges,
    token_bytes,
)
from neuroshard.data.tokenizer.encoder import encode_word, every_token_encodes_to_itself, merge_ids

VECTORS = json.loads((Path(__file__).parent.parent / "vectors" / "tokenizer.json").read_text())

texts = st.lists(st.text(alphabet="abcd \u00e9'", max_size=40), max_size=12)


def learn_slowly(word_counts: Counter[str], merge_count: int) -> list[tuple[int, int]]:
    """The definition, word for word: recount every pair after every merge."""
    merges: list[tuple[int, int]] = []
    while len(merges) < merge_count:
        ids_of_pairs = {pair: 266 + i for i, pair in enumerate(merges)}
        counts: Counter[tuple[int, int]] = Counter()
        for word, count in word_counts.items():
            for pair in pairwise(encode_word(word.encode(), ids_of_pairs)):
                counts[pair] += count
        frequent = [(-count, pair) for pair, count in counts.items() if count >= 2]
        if not frequent:
            break
        merges.append(min(frequent)[1])
    return merges


@pytest.mark.parametrize("vector", VECTORS["learning"], ids=lambda vector: str(vector["why"]))
def test_golden_merges(vector: dict[str, object]) -> None:
    texts, count = vector["texts"], vector["merge_count"]
    assert isinstance(texts, list)
    assert isinstance(count, int)
    assert [list(pair) for pair in learn_merges(texts, count).merges] == vector["merges"]


@given(texts, st.integers(0, 25))
@settings(max_examples=60)
def test_learning_equals_its_definition(documents: list[str], merge_count: int) -> None:
    word_counts = count_words(documents)
    # Overlapping pairs (aaa) are counted as adjacent pairs in both.
    assert list(learn_from_counts(word_counts, merge_count).merges) == learn_slowly(word_counts, merge_count)


@given(texts, st.integers(0, 20), st.integers(0, 20))
@settings(max_examples=60)
def test_growing_in_two_halves_equals_learning_at_once(documents: list[str], first: int, second: int) -> None:
    at_once = learn_merges(documents, first + second)
    assert learn_merges(documents, second, base=learn_merges(documents, first)) == at_once


@given(texts, texts, st.integers(0, 15))
@settings(max_examples=60)
def test_a_table_that_grew_on_other_text_keeps_its_past_and_stays_canonical(
    first: list[str], second: list[str], merge_count: int
) -> None:
    base = learn_merges(first, merge_count, source="first")
    grown = learn_merges(second, merge_count, base=base, source="second")
    assert grown.merges[: len(base.merges)] == base.merges
    assert every_token_encodes_to_itself(grown)
    assert len(set(token_bytes(grown)[10:])) == grown.next_merge_id - 10
    assert sum(grown.sources_contributed.values()) == len(grown.merges)
    assert TokenizerTable.load(grown.to_json()) == grown


def test_the_order_of_texts_does_not_matter() -> None:
    documents = ["the cat sat", "on the mat", "that hat", "cat hat"]
    assert learn_merges(documents, 20) == learn_merges(documents[::-1], 20)


def test_a_byte_string_that_exists_is_not_learned_again() -> None:
    # A foreign table spells "abc" as a + bc, which plain merging of "ab" first can never reach.
    a, b, c = (10 + ord(letter) for letter in "abc")
    foreign = TokenizerTable(merges=((a, b), (b, c), (a, 267)), vocab_size=269)
    assert not every_token_encodes_to_itself(foreign)
    grown = learn_merges(["abc abc abc"], 10, base=foreign)
    pieces = token_bytes(grown)[10:]
    assert len(pieces) == len(set(pieces))


def test_learning_stops_when_nothing_repeats() -> None:
    assert learn_merges(["abc"], 10).merges == ()
    assert learn_merges([], 10) == learn_merges([], 0)


def test_learning_tells_how_far_it_is() -> None:
    told: list[float] = []
    words = {f"{a}{b}{c}": 2 for a in "abcdefgh" for b in "abcdefgh" for c in "abcdefgh"}
    learn_from_counts(words, 300, progress=told.append)
    assert told == sorted(told)
    assert told


def test_every_learned_token_is_its_own_encoding() -> None:
    documents = ["she sells sea shells by the sea shore", "the shells she sells are surely seashells"] * 3
    table = learn_merges(documents, 100)
    ids_of_pairs = merge_ids(table)
    for identifier, piece in enumerate(token_bytes(table)[266:], start=266):
        assert encode_word(piece, ids_of_pairs) == [identifier]


@given(st.lists(st.tuples(st.integers(0, 11), st.integers(0, 11)), max_size=12))
@settings(max_examples=300)
def test_the_fast_check_of_a_table_equals_encoding_every_token(choices: list[tuple[int, int]]) -> None:
    merges: list[tuple[int, int]] = []
    pieces = token_bytes(byte_table())
    alphabet = [10 + ord("a"), 10 + ord("b")]
    for first, second in choices:
        pair = (alphabet[first % len(alphabet)], alphabet[second % len(alphabet)])
        piece = pieces[pair[0]] + pieces[pair[1]]
        if piece not in pieces and len(piece) < 64:
            alphabet.append(len(pieces))
            pieces.append(piece)
            merges.append(pair)
    table = TokenizerTable(tuple(merges), 266 + len(merges))
    ids_of_pairs = merge_ids(table)
    reached = all(encode_word(piece, ids_of_pairs) == [i] for i, piece in enumerate(pieces) if i >= 266)
    assert every_token_encodes_to_itself(table) == reached
