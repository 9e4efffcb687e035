from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuroshard.state.outer_state import may_download_averaged, may_serve_averaged, round_is_due


def due(counted: int = 0, members: int = 1, elapsed: float = 0.0) -> bool:
    return round_is_due(
        counted_sequences=counted,
        enough_sequences=500 * 8 * members,
        elapsed_seconds=elapsed,
        max_round_seconds=3600,
    )


def test_a_round_is_due_by_work_or_by_time() -> None:
    assert not due(3999)
    assert due(4000)
    assert not due(11_999, members=3)
    assert due(12_000, members=3)
    assert not due(1, elapsed=3599)
    assert due(1, elapsed=3600)
    assert not due(0, elapsed=1e9)  # nothing to contribute


@given(counted=st.integers(0, 10**6), more=st.integers(0, 10**6), members=st.integers(1, 50))
def test_more_work_never_makes_a_round_less_due(counted: int, more: int, members: int) -> None:
    assert due(counted + more, members) >= due(counted, members)


def test_senseless_counts_are_refused() -> None:
    with pytest.raises(ValueError, match="positive"):
        due(members=0)
    with pytest.raises(ValueError, match="not negative"):
        due(counted=-1)


def test_a_state_of_averaged_gradients_is_fetched_while_a_step_is_young() -> None:
    assert may_download_averaged(0, 1024, 0.0)
    assert may_download_averaged(102, 1024, 0.0)
    assert not may_download_averaged(103, 1024, 179.0)
    assert may_download_averaged(103, 1024, 180.0)  # its next step may be far away


def test_such_a_state_is_given_before_a_fifth_of_a_step_is_in() -> None:
    assert may_serve_averaged(204, 1024, 0.0)
    assert not may_serve_averaged(205, 1024, 0.0)
    assert not may_serve_averaged(4096, 1024, 59.0)
    assert may_serve_averaged(4096, 1024, 60.0)  # its next step may wait for who asks
