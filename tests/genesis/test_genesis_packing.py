from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuroshard.dataset.packing import default_merge_count, section_characters
from neuroshard.dataset.served_files import RangeResponse, range_response


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
