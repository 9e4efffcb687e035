from __future__ import annotations

import math
import struct
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from neuroshard.aggregation import (
    MalformedStatisticsError,
    SliceRows,
    SliceStatistics,
    judge_statistics,
    read_statistics,
    slice_statistics,
    statistics_bytes,
    statistics_size,
    sum_statistics,
)
from tests.worlds.contributions import ATTACKS, attacked, cut, facts_of, honest_rows, judge

BLOCK = 4096


@pytest.mark.parametrize("count", [1, 2, 3, 8, 33])
@pytest.mark.parametrize("length", [1, 4095, 4096, 15_000])
def test_statistics_are_what_their_names_say(count: int, length: int) -> None:
    rows = honest_rows(count, length, seed=count)
    exact = rows.double()
    center = torch.quantile(exact, 0.5, dim=0, interpolation="midpoint")
    if count < 3:
        center.zero_()  # there is no majority
    found = slice_statistics(SliceRows.of(rows), with_gram=True)
    assert found.finite == (True,) * count
    assert found.gram is not None
    torch.testing.assert_close(torch.tensor(found.gram, dtype=torch.float64), exact @ exact.T, rtol=1e-12, atol=1e-9)
    assert found.squared_norms == pytest.approx((exact**2).sum(dim=1).tolist(), rel=1e-12)
    assert found.center_dots == pytest.approx((exact @ center).tolist(), rel=1e-12, abs=1e-9)
    assert found.center_squared_norm == pytest.approx((center @ center).item(), rel=1e-12)


@pytest.mark.parametrize("is_sparse", [False, True])
def test_the_center_is_that_of_the_established(is_sparse: bool) -> None:
    rows = honest_rows(7, 9000)
    rows[5:] *= 1e6
    rows[4, 5000] = math.inf
    established = [True, True, False, True, True, False, False]
    found = slice_statistics(SliceRows.of(rows), established=established, is_sparse=is_sparse)
    alone = slice_statistics(SliceRows.of(rows[established]), is_sparse=is_sparse)
    assert found.center_squared_norm == alone.center_squared_norm > 0
    assert [found.center_dots[row] for row in (0, 1, 3, 4)] == list(alone.center_dots)
    few = slice_statistics(SliceRows.of(rows), established=[True, True, *[False] * 5], is_sparse=is_sparse)
    assert few.center_squared_norm == 0.0  # there is no majority
    assert few.squared_norms == found.squared_norms


def test_the_gram_matrix_changes_nothing_else() -> None:
    rows = SliceRows.of(honest_rows(6, 9000))
    plain, full = slice_statistics(rows), slice_statistics(rows, with_gram=True)
    assert plain.gram is None
    assert SliceStatistics(full.finite, full.squared_norms, full.center_dots, full.center_squared_norm) == plain


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    count=st.integers(1, 9),
    attack=st.sampled_from(ATTACKS),
    edges=st.lists(st.integers(1, 4), max_size=3, unique=True),
)
def test_wherever_the_vector_is_cut_the_verdict_is_the_same(
    seed: int, count: int, attack: str, edges: list[int]
) -> None:
    rows = attacked(honest_rows(count, 4 * BLOCK + 77, seed), attack, count // 3, seed)
    established = facts_of(rows).counted
    sums = partial(slice_statistics, with_gram=True, established=established)
    parts = [sums(part) for part in cut(rows, [edge * BLOCK for edge in sorted(edges)])]
    whole = sums(SliceRows.of(rows))
    total = sum_statistics(parts)
    assert total.finite == whole.finite
    assert total.center_dots == pytest.approx(whole.center_dots, rel=1e-12, abs=1e-9 * total.center_squared_norm)
    verdict = judge_statistics(total, facts_of(rows))
    assert verdict == judge_statistics(whole, facts_of(rows))
    assert verdict == judge(rows)
    assert sum_statistics(parts[::-1]) == total


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_broken_row_has_zeros_and_does_not_touch_the_others(bad: float) -> None:
    rows = honest_rows(5, 3 * BLOCK)
    rows[1, BLOCK] = bad
    found = slice_statistics(SliceRows.of(rows), with_gram=True)
    assert found.finite == (True, False, True, True, True)
    assert found.squared_norms[1] == found.center_dots[1] == 0.0
    assert found.gram is not None
    assert not any(found.gram[1])
    center = rows.median(dim=0).values
    without = rows[[0, 2, 3, 4]].double().sort(dim=0).values[1:3].mean(dim=0)
    center = torch.where(torch.arange(3 * BLOCK) // BLOCK == 1, without, center.double())
    expected = (rows.double() @ center).tolist()
    assert [found.center_dots[i] for i in (0, 2, 3, 4)] == pytest.approx([expected[i] for i in (0, 2, 3, 4)])


def test_where_nobody_is_finite_there_is_nothing() -> None:
    found = slice_statistics(SliceRows.of(torch.full((3, 5000), math.nan)))
    assert found == SliceStatistics((False,) * 3, (0.0,) * 3, (0.0,) * 3, 0.0)


def test_the_largest_numbers_do_not_overflow() -> None:
    found = slice_statistics(SliceRows.of(torch.full((3, 9000), torch.finfo(torch.float32).max)), with_gram=True)
    assert found.finite == (True,) * 3
    assert found.squared_norms[0] == pytest.approx(9000 * torch.finfo(torch.float32).max ** 2)


def test_rows_are_decoded_block_by_block_and_in_order() -> None:
    asked: list[tuple[int, int, int]] = []
    rows = honest_rows(40, 10 * BLOCK + 5)

    def decode(row: int, start: int, stop: int, out: torch.Tensor) -> None:
        asked.append((row, start, stop))
        out.copy_(rows[row, start:stop])

    assert slice_statistics(SliceRows(40, 10 * BLOCK + 5, decode)) == slice_statistics(SliceRows.of(rows))
    for row in range(40):
        ranges = [(start, stop) for which, start, stop in asked if which == row]
        assert [start for start, _ in ranges] == [0, *(stop for _, stop in ranges[:-1])]
        assert ranges[-1][1] == 10 * BLOCK + 5
        assert all(start % BLOCK == 0 for start, _ in ranges)


def test_statistics_of_different_contributions_do_not_add_up() -> None:
    two, three = (slice_statistics(SliceRows.of(honest_rows(n, 100))) for n in (2, 3))
    full = slice_statistics(SliceRows.of(honest_rows(2, 100)), with_gram=True)
    for parts in ([], [two, three], [two, full]):
        with pytest.raises(ValueError, match="same contributions"):
            sum_statistics(parts)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), count=st.integers(1, 12), attack=st.sampled_from(ATTACKS), with_gram=st.booleans())
def test_what_is_written_is_read(seed: int, count: int, attack: str, with_gram: bool) -> None:
    rows = attacked(honest_rows(count, 300, seed), attack, count // 2, seed)
    statistics = slice_statistics(SliceRows.of(rows), with_gram=with_gram)
    data = statistics_bytes(statistics)
    assert len(data) == statistics_size(count, with_gram=with_gram)
    assert read_statistics(memoryview(data), count, with_gram=with_gram) == statistics


def form_of(flags: list[int], sums: list[float]) -> bytes:
    return bytes(flags) + struct.pack(f"<{len(sums)}d", *sums)


@pytest.mark.parametrize(
    ("data", "with_gram"),
    [
        (b"", False),
        (form_of([1, 1], [1.0, 1.0, 1.0, 1.0, 1.0]) + b"\0", False),
        (form_of([1, 2], [1.0, 1.0, 1.0, 1.0, 1.0]), False),
        (form_of([1, 1], [1.0, math.nan, 1.0, 1.0, 1.0]), False),
        (form_of([1, 1], [1.0, 1.0, 1.0, math.inf, 1.0]), False),
        (form_of([1, 1], [1.0, 1.0, 1.0, 1e300, 1.0]), False),
        (form_of([1, 1], [-1.0, 1.0, 1.0, 1.0, 1.0]), False),
        (form_of([1, 1], [1.0, 1.0, 1.0, 1.0, -1.0]), False),
        (form_of([1, 1], [1.0, 1.0, -0.0, 1.0, 1.0]), False),
        (form_of([1, 0], [1.0, 1.0, 1.0, 0.0, 1.0]), False),
        (form_of([1, 0], [1.0, 0.0, 1.0, 1.0, 1.0]), False),
        (form_of([1, 0], [1.0, 0.0, 1.0, 0.0, 1.0, 0.5]), True),
        (form_of([1, 1], [1.0, 1.0, 1.0, 1.0, 1.0]), True),
        (bytes([1, 1]) + bytes.fromhex("010000000000f07f") + bytes(32), False),  # a NaN that signals
    ],
)
def test_other_bytes_are_no_statistics(data: bytes, with_gram: bool) -> None:
    with pytest.raises(MalformedStatisticsError):
        read_statistics(data, 2, with_gram=with_gram)


def test_statistics_of_nobody_are_none() -> None:
    with pytest.raises(MalformedStatisticsError):
        read_statistics(form_of([], [1.0]), 0, with_gram=False)


@settings(max_examples=300, deadline=None)
@given(data=st.binary(min_size=25, max_size=25), count=st.integers(0, 2), with_gram=st.booleans())
def test_any_bytes_are_read_or_refused(data: bytes, count: int, with_gram: bool) -> None:
    try:
        statistics = read_statistics(data, count, with_gram=with_gram)
    except MalformedStatisticsError:
        return
    assert statistics_bytes(statistics) == data


@pytest.mark.parametrize(
    "fields",
    [
        ((), (), (), 0.0),
        ((True,), (1.0, 1.0), (1.0,), 0.0),
        ((True,), (1.0,), (1.0,), 0.0, ((1.0, 2.0),)),
        ((True,), (1.0,), (1.0,), 0.0, ((2.0,),)),
        ((True, True), (1.0, 1.0), (1.0, 1.0), 0.0, ((1.0, 0.5), (0.4, 1.0))),
        ((True, False), (1.0, 0.0), (1.0, 0.0), 0.0, ((1.0, 0.5), (0.5, 0.0))),
    ],
)
def test_fields_that_contradict_each_other_are_refused(fields: tuple[object, ...]) -> None:
    with pytest.raises(ValueError, match=r"statistics|Gram|finite"):
        SliceStatistics(*fields)  # type: ignore[arg-type]
