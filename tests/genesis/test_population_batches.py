from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuroshard.data.tokenizer import BOS, EOS, LLAMA_PATTERN, Tokenizer, byte_table, learn_merges
from neuroshard.dataset.batches import Mark, Packer, cut, text_batches
from neuroshard.dataset.encoding import encode_pieces
from neuroshard.dataset.packing import common_shard_tokens
from neuroshard.dataset.population_state import Checkpoints, SourceCheckpoint, parse_checkpoints
from neuroshard.dataset.sources import Position, SourceRecord
from neuroshard.errors import DataError

EVERY_PLANE = "".join(chr(plane << 16 | low) + " " for plane in range(17) for low in (0x41, 0x1F600 & 0xFFFF, 0xFFFD))
TOKENIZER = Tokenizer(learn_merges(["the cat sat on the mat, the cat sat  on the hat\n" * 30], 40))
LIKE_LLAMA = Tokenizer(learn_merges(["the cat sat on the mat.\nthe hat\n"] * 5, 60, byte_table(LLAMA_PATTERN)))
texts = st.text(alphabet="ab, .1'\n\t \u3000\u4f60\U0001f600\ud800", max_size=300)


@dataclass
class ListedReader:
    """Records given in the test; a position is how many were read."""

    listed: list[str]
    at: int = 0

    def records(self) -> Iterator[SourceRecord]:
        while self.at < len(self.listed):
            self.at += 1
            text = self.listed[self.at - 1]
            yield SourceRecord("", text[1:]) if text.startswith("!") else SourceRecord(text)

    def position(self) -> Position:
        return {"at": self.at} if self.at else {}


def at(position: Position) -> int:
    place = position.get("at", 0)
    assert isinstance(place, int)
    return place


def silent(_: str) -> None:
    """Problems nobody looks at."""


@given(texts, st.integers(2, 60), st.sampled_from([TOKENIZER, LIKE_LLAMA]))
def test_the_pieces_of_a_document_have_the_tokens_of_the_whole(text: str, most: int, tokenizer: Tokenizer) -> None:
    pieces = list(cut(text, 0, most))
    assert "".join(piece.text for piece, _ in pieces) == text
    assert all(len(piece.text) <= most for piece, _ in pieces)
    assert [piece.begins for piece, _ in pieces] == [True] + [False] * (len(pieces) - 1)
    assert [piece.ends for piece, _ in pieces] == [False] * (len(pieces) - 1) + [True]
    torn = any(text[end - 1 : end].strip() and text[end : end + 1].strip() for _, end in pieces[:-1])
    white = any(not text[end - 1 : end].strip() for _, end in pieces[:-1])
    signed = any(not text[end - 1].isalnum() and text[end] in "\r\n" for _, end in pieces[:-1])  # as ".\n" of Llama
    if not torn and not white and not signed:
        ids = encode_pieces(tokenizer, [piece for piece, _ in pieces])
        assert ids.tolist() == tokenizer.encode(text, bos=True, eos=True).tolist()


@pytest.mark.parametrize("tokenizer", [TOKENIZER, LIKE_LLAMA])
@pytest.mark.parametrize("line", ["the cat sat on the mat, the cat sat  on the hat\n", "the-cat.\nsat\n"])
def test_a_long_document_is_cut_where_no_token_is_torn(tokenizer: Tokenizer, line: str) -> None:
    text = line * 200
    expected = tokenizer.encode(text, bos=True, eos=True).tolist()
    for most in range(480, 500):
        pieces = [piece for piece, _ in cut(text, 0, most)]
        assert len(pieces) > 4
        assert encode_pieces(tokenizer, pieces).tolist() == expected


@given(st.lists(st.one_of(texts, st.just("!bad"), st.just(" \n ")), max_size=12), st.integers(5, 80))
def test_batches_from_any_mark_on_are_the_same(listed: list[str], size: int) -> None:
    """The property that makes a resumed build equal to one that never stopped."""
    batches = list(text_batches(ListedReader(listed), Mark(), silent, size))
    for number, batch in enumerate(batches):
        reader = ListedReader(listed, at(batch.mark.position))
        assert list(text_batches(reader, batch.mark, silent, size)) == batches[number + 1 :]
        assert sum(len(piece.text) for piece in batch.pieces) < 300 + size
    documents = [text for text in listed if text.strip() and not text.startswith("!")]
    assert "".join(piece.text for batch in batches for piece in batch.pieces) == "".join(documents)
    if batches:
        assert batches[-1].mark.documents == len(documents)
        assert sum(piece.begins for batch in batches for piece in batch.pieces) == len(documents)


def test_records_without_text_are_counted_and_told() -> None:
    told: list[str] = []
    (batch,) = text_batches(ListedReader(["!no JSON", "", "\t \n", "text"]), Mark(), told.append)
    assert told == ["no JSON", "an empty document", "an empty document"]
    assert (batch.mark.documents, batch.mark.skipped) == (1, 3)


def test_every_plane_of_unicode_comes_back() -> None:
    (batch,) = text_batches(ListedReader([EVERY_PLANE]), Mark(), silent)
    ids = encode_pieces(TOKENIZER, batch.pieces)
    assert (ids[0], ids[-1]) == (BOS, EOS)
    assert TOKENIZER.decode(ids.tolist()) == EVERY_PLANE


@given(st.lists(st.integers(0, 30), max_size=12), st.integers(1, 40))
def test_shards_and_leftovers_are_all_the_tokens(sizes: list[int], count: int) -> None:
    everything = np.arange(sum(sizes), dtype=np.uint16)
    packer, start = Packer(Mark()), 0
    for number, size in enumerate(sizes):
        packer.add(everything[start : start + size], Mark(documents=number + 1))
        start += size
    used = 0
    while packer.tokens >= count:
        shard = packer.cut(count)
        assert shard.ids.tolist() == everything[used : used + count].tolist()
        used += count
        read = sum(sizes[: shard.mark.documents])
        assert shard.leftover.tolist() == everything[used:read].tolist()  # nothing beyond the mark
        again = Packer(shard.mark, shard.leftover)
        assert (again.tokens, again.reached) == (read - used, shard.mark)
    with pytest.raises(ValueError, match="cannot cut"):
        packer.cut(count)


@given(st.lists(st.tuples(st.integers(0, 200_000), st.integers(1, 40)), min_size=1, max_size=4))
def test_the_common_size_fills_sixteen_shards(supplies: list[tuple[int, int]]) -> None:
    try:
        size = common_shard_tokens(supplies, 50_000)
    except DataError:
        assert sum(min(most, tokens // 1_024) for tokens, most in supplies) < 16
        return
    assert 1_024 <= size <= 50_000
    assert sum(min(most, tokens // size) for tokens, most in supplies) >= 16
    total = sum(tokens for tokens, _ in supplies)
    assert all(tokens >= size for tokens, _ in supplies if tokens >= max(1_024, total / 256))


def test_checkpoints_are_read_as_they_were_written() -> None:
    mark = Mark({"file": "a/b", "place": 3}, 7, 11, 2)
    source = SourceCheckpoint("jsonl", 40, mark, np.array([1, 70_000], dtype=np.uint32), 3, 9, "2025-01-01", 60)
    written = Checkpoints("ab" * 32, 300, 2_048, 10, 20_000, (b"\1" * 32, b"\2" * 32), {"s": source})
    read = parse_checkpoints(written.to_json())
    assert read.to_json() == written.to_json()
    assert read.sources["s"].mark == mark
    assert read.sources["s"].leftover.tolist() == [1, 70_000]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"total_shards":10', '"total_shards":1'),
        ('"leftover_tokens":[1]', '"leftover_tokens":[-1]'),
        ('"leftover_tokens":[1]', '"leftover_tokens":[1.5]'),
        ('"character":0', '"character":-1'),
        ('"format_version":2', '"format_version":3'),
        ('"shards":3', '"shards":3,"more":1'),
        ("{", "", ),
        ('"tokens_per_shard":2048', '"tokens_per_shard":null'),
    ],
)  # fmt: skip
def test_damaged_checkpoints_are_told(old: str, new: str) -> None:
    source = SourceCheckpoint("jsonl", 40, Mark(), np.array([1], dtype=np.uint32), 3, 9)
    text = Checkpoints("ab" * 32, 300, 2_048, 10, 20_000, (b"\1" * 32, b"\2" * 32), {"s": source}).to_json().decode()
    assert old in text
    with pytest.raises(DataError, match=r"checkpoints\.json is damaged"):
        parse_checkpoints(text.replace(old, new, 1).encode())
