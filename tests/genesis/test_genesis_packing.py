from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuroshard.dataset.packing import ShardPlan, cut_shards, default_merge_count, plan_shards, section_characters
from neuroshard.dataset.served_files import RangeResponse, range_response
from neuroshard.errors import DataError


@given(st.integers(16_384, 10**9))
def test_every_folder_has_sixteen_shards_and_wastes_little(total: int) -> None:
    plan = plan_shards(total)
    assert plan.shard_count >= 16
    assert 1_024 <= plan.tokens_per_shard <= 2_500_000
    assert 0 <= total - plan.shard_count * plan.tokens_per_shard < plan.shard_count


def test_too_little_text_is_told() -> None:
    with pytest.raises(DataError, match="Add more text"):
        plan_shards(16_383)


def test_shards_are_consecutive_pieces() -> None:
    shards = list(cut_shards(np.arange(11, dtype=np.uint32), ShardPlan(3, 3)))
    assert [shard.tolist() for shard in shards] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]


def test_sizes_follow_the_text() -> None:
    assert [default_merge_count(size) for size in (0, 2_300_000, 10**9)] == [256, 1_916, 31_734]
    assert [section_characters(size) for size in (0, 4_000_000, 10**9)] == [1_000, 3_906, 20_000]


TAG = '"tag"'


@pytest.mark.parametrize(
    ("range_header", "if_range", "if_none_match", "answer"),
    [
        (None, None, None, RangeResponse(200, 0, 100)),
        ("bytes=0-", None, None, RangeResponse(206, 0, 100)),
        ("bytes=10-19", None, None, RangeResponse(206, 10, 20)),
        ("bytes=90-500", None, None, RangeResponse(206, 90, 100)),
        ("bytes=-5", None, None, RangeResponse(206, 95, 100)),
        ("bytes=-500", None, None, RangeResponse(206, 0, 100)),
        ("bytes=100-", None, None, RangeResponse(416)),
        ("bytes=-0", None, None, RangeResponse(416)),
        ("bytes=20-10", None, None, RangeResponse(200, 0, 100)),
        ("bytes=0-1,5-6", None, None, RangeResponse(200, 0, 100)),
        ("bytes=-", None, None, RangeResponse(200, 0, 100)),
        ("lines=1-2", None, None, RangeResponse(200, 0, 100)),
        ("bytes=10-", TAG, None, RangeResponse(206, 10, 100)),
        ("bytes=10-", '"other"', None, RangeResponse(200, 0, 100)),
        ("bytes=10-", "Wed, 21 Oct 2015 07:28:00 GMT", None, RangeResponse(200, 0, 100)),
        (None, None, TAG, RangeResponse(304)),
        ("bytes=0-1", None, f'"x", W/{TAG}', RangeResponse(304)),
        (None, None, "*", RangeResponse(304)),
        (None, None, '"x"', RangeResponse(200, 0, 100)),
    ],
)
def test_conditions_and_ranges(
    range_header: str | None, if_range: str | None, if_none_match: str | None, answer: RangeResponse
) -> None:
    got = range_response(100, TAG, range_header=range_header, if_range=if_range, if_none_match=if_none_match)
    assert got == answer


@given(st.text(max_size=30), st.integers(0, 200))
def test_no_range_header_reaches_outside_the_file(header: str, size: int) -> None:
    for text in (header, f"bytes={header}"):
        got = range_response(size, TAG, range_header=text, if_range=None, if_none_match=None)
        assert 0 <= got.start <= got.stop <= size
