"""Fragments cover every number of a vector exactly once, and what is put into one leaves the others as they are."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from neuroshard.optim.outer import SPARTA_SLICES, STREAMED_FRAGMENTS, Fragment, layered_fragment, strided_slice


def layers_of(first: int, size: int, count: int) -> list[tuple[int, int]]:
    return [(first + number * size, first + (number + 1) * size) for number in range(count)]


def places(fragment: Fragment) -> list[int]:
    return fragment.of(torch.arange(fragment.length)).tolist()


@given(st.integers(SPARTA_SLICES, 300_000))
def test_slices_share_a_vector_out(length: int) -> None:
    slices = [strided_slice(length, index) for index in range(SPARTA_SLICES)]
    assert sorted(place for one in slices for place in places(one)) == list(range(length))
    if length >= 1000:  # five percent each
        assert all(abs(one.size / length - 0.05) < 0.005 for one in slices)


@given(st.integers(0, 50), st.integers(1, 40), st.integers(0, 13), st.integers(0, 50))
def test_layered_fragments_share_a_vector_out(before: int, size: int, count: int, after: int) -> None:
    length = before + size * count + after + STREAMED_FRAGMENTS
    layers = layers_of(before, size, count)
    fragments = [layered_fragment(length, layers, index) for index in range(STREAMED_FRAGMENTS)]
    assert sorted(place for one in fragments for place in places(one)) == list(range(length))
    assert max(one.size for one in fragments) - min(one.size for one in fragments) <= 1


def test_a_layered_fragment_has_whole_layers_and_its_share_of_the_rest() -> None:
    layers = layers_of(8, 10, 9)  # 8 numbers of embeddings, 9 layers, 6 of the head: the ninth layer is left over
    fragment = layered_fragment(104, layers, 1)
    assert fragment.stretches == ((6, 8), (18, 28), (58, 68), (88, 92))
    assert fragment.size == 26


def test_a_slice_takes_every_twentieth_block() -> None:
    fragment = strided_slice(4096 * 20 * 16 + 5, 1)
    assert fragment.stretches[:2] == ((4096, 8192), (21 * 4096, 22 * 4096))
    assert strided_slice(4096 * 20 * 16 + 5, 0).stretches[-1] == (4096 * 20 * 16, 4096 * 20 * 16 + 5)


def test_what_is_put_into_a_fragment_leaves_the_rest() -> None:
    fragment, vector = strided_slice(100, 7), torch.arange(100.0)
    changed = fragment.replaced(vector, torch.full((fragment.size,), -1.0))
    assert torch.equal(vector, torch.arange(100.0))
    assert set(torch.nonzero(changed != vector).flatten().tolist()) == set(places(fragment))
    assert (fragment.of(changed) == -1).all()


def test_the_whole_vector_is_not_copied() -> None:
    vector = torch.zeros(5)
    assert Fragment.whole(5).of(vector) is vector
    assert Fragment.whole(5).replaced(vector, numbers := torch.ones(5)) is numbers


def test_what_is_no_fragment_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one number"):
        Fragment(5, ())
    with pytest.raises(ValueError, match="in order"):
        Fragment(5, ((3, 4), (0, 1)))
    with pytest.raises(ValueError, match="in order"):
        Fragment(5, ((3, 6),))
    with pytest.raises(ValueError, match="cannot be split into 20 fragments"):
        strided_slice(19, 0)
    with pytest.raises(ValueError, match="0 to 3, not 4"):
        layered_fragment(100, [], 4)
    with pytest.raises(ValueError, match="vector of 5 numbers"):
        Fragment.whole(5).of(torch.zeros(4))
    with pytest.raises(ValueError, match="vector of 2 numbers"):
        Fragment(5, ((1, 3),)).put(torch.zeros(3), torch.zeros(5))
