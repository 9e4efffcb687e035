"""Slices of a vector, and who reduces them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuroshard.consensus.slices import BLOCK, MAX_SLICES, MESSAGE_BYTES, SlicePlan, assign, draw, in_messages
from neuroshard.types import NodeId

uploads = st.lists(st.integers(0, 10**9), min_size=2, max_size=64)


@given(st.integers(1, 10**9))
def test_slices_cover_the_vector_in_whole_blocks(length: int) -> None:
    plan = SlicePlan(length)
    assert 1 <= plan.count <= MAX_SLICES
    assert plan.width % BLOCK == 0
    sizes = [plan.size(index) for index in range(plan.count)]
    assert sizes[:-1] == [plan.width] * (plan.count - 1)
    assert 0 < sizes[-1] <= plan.width
    assert sum(sizes) == length


def reducers_of(plan: SlicePlan, upload: dict[NodeId, int], seed: str, needed: int) -> Sequence[tuple[NodeId, ...]]:
    """Among friends one reducer, among strangers two."""
    return assign(plan, upload, seed) if needed == 1 else draw(plan, upload, seed, needed)


@given(st.integers(1, 10**7), uploads, st.integers(1, 2))
def test_every_slice_has_different_reducers(length: int, rates: list[int], needed: int) -> None:
    upload = {NodeId(f"n{number}"): rate for number, rate in enumerate(rates)}
    for one in reducers_of(SlicePlan(length), upload, "seed", needed):
        assert len(set(one)) == needed


@pytest.mark.parametrize("needed", [1, 2])
@pytest.mark.parametrize("count", [2, 4, 8, 16, 32, 64])
def test_nobody_reduces_much_more_than_its_share(count: int, needed: int) -> None:
    upload = {NodeId(f"n{number}"): 10 ** (number % 4) for number in range(count)}
    plan = SlicePlan(64 * BLOCK)
    share = Counter(node for one in reducers_of(plan, upload, "seed", needed) for node in one)
    assert max(share.values()) <= max(1.25 * needed * plan.count / count, -(-needed * plan.count // count))


def test_who_uploads_faster_reduces_more() -> None:
    upload = {NodeId("slow"): 100, NodeId("fast"): 120, NodeId("other"): 100, NodeId("fourth"): 100}
    share = Counter(node for one in assign(SlicePlan(64 * BLOCK), upload, "s") for node in one)
    assert share[NodeId("fast")] > share[NodeId("slow")]


@pytest.mark.parametrize("needed", [1, 2])
def test_the_seed_changes_the_reducers(needed: int) -> None:
    upload = {NodeId(f"n{number}"): 1 for number in range(8)}
    plan = SlicePlan(64 * BLOCK)
    assert reducers_of(plan, upload, "one", needed) != reducers_of(plan, upload, "two", needed)
    assert reducers_of(plan, upload, "one", needed) == reducers_of(plan, upload, "one", needed)


def test_no_choice_of_the_liars_makes_them_both_reducers_of_more_slices() -> None:
    """They may declare any upload and leave any of their names out: each try is free for the last one to decide."""
    plan, honest = SlicePlan(64 * BLOCK), [NodeId(f"honest {number}") for number in range(8)]
    liars = [NodeId(f"liar {number}") for number in range(4)]

    def taken(present: Sequence[NodeId], seed: str) -> int:
        drawn = draw(plan, [*honest, *present], seed, 2)
        return sum(set(one) <= set(liars) for one in drawn)

    shares = list[float]()
    for seed in map(str, range(20)):
        tries = [taken(some, seed) for size in range(2, 5) for some in combinations(liars, size)]
        assert max(tries) <= tries[-1] + 2  # all four take part
        shares.append(max(tries) / plan.count)
    assert sum(shares) / len(shares) < 1.5 * (4 * 3) / (12 * 11)  # of a draw without any choice


def test_a_lone_member_reduces_for_itself_and_without_members_nobody_does() -> None:
    for needed in (1, 2):
        (one,) = reducers_of(SlicePlan(10), {NodeId("a"): 1}, "seed", needed)
        assert one == ("a",)
        with pytest.raises(ValueError, match="has a reducer"):
            reducers_of(SlicePlan(10), {}, "seed", needed)


def test_messages_carry_all_slices_in_order_and_as_many_as_fit() -> None:
    slices = {index: bytes(size) for index, size in enumerate((MESSAGE_BYTES - 1, 1, 1, 2 * MESSAGE_BYTES, 5))}
    assert [list(some) for some in in_messages(slices)] == [[0, 1], [2], [3], [4]]
    assert list(in_messages({})) == []
