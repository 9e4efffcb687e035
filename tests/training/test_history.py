from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neuroshard.status.snapshot import LossPoint
from neuroshard.training.record import LossCurve, merge_neighbours, successive_noise


def points(count: int) -> list[LossPoint]:
    return [LossPoint(i, float(i), 10 - i / count, 1e-3, 100 * i) for i in range(1, count + 1)]


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 12_000))
def test_memory_is_bounded_and_nothing_falls_out_at_either_end(count: int) -> None:
    history = LossCurve(capacity=200)
    for point in points(count):
        history.add(point)
    assert len(history) <= 200
    assert history.snapshot()[-1].step == count
    steps = [point.step for point in history.snapshot()]
    assert steps == sorted(set(steps))
    assert steps[0] <= max(1, count // 50)  # the beginning is not blurred
    assert all(b - a <= max(1, count // 50) for a, b in pairwise(steps))
    assert [point.step for point in history.recent(3)] == list(range(max(1, count - 2), count + 1))


def test_the_snapshot_has_at_most_1000_points_and_is_made_once() -> None:
    history = LossCurve(points(1_999))
    first = history.snapshot()
    assert len(first) == 1_000
    assert history.snapshot() is first
    history.add(LossPoint(2_000, 0.0, 1.0, 0.0, 0))
    assert history.snapshot() is not first
    assert history.recent(3)[-1].step == 2_000


def test_merging_keeps_the_mean_loss_and_the_last_place() -> None:
    merged = merge_neighbours(points(5), 2)
    assert [(point.step, point.tokens) for point in merged] == [(2, 200), (4, 400), (5, 500)]
    assert merged[0].loss == pytest.approx((9.8 + 9.6) / 2)


def test_noise_does_not_see_a_trend() -> None:
    assert successive_noise([float(i % 2) for i in range(100)]) == pytest.approx(2**-0.5)
    assert successive_noise([i / 1000 for i in range(100)]) < 1e-3
    assert successive_noise([1.0]) == 0


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 5_000), st.integers(0, 3_000))
def test_a_restored_curve_goes_on_as_evenly(before: int, after: int) -> None:
    history = LossCurve(capacity=200)
    every = points(before + after)
    for point in every[:before]:
        history.add(point)
    history = LossCurve(history.snapshot(), capacity=200)
    for point in every[before:]:
        history.add(point)
    steps = [point.step for point in history.snapshot()]
    assert steps[-1] == before + after
    assert len(steps) <= 200
    assert len(steps) >= min(50, (before + after) // 2)


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 6_000), st.integers(1, 700))
def test_a_snapshot_that_adds_to_the_last_one_equals_one_made_at_once(count: int, every: int) -> None:
    looked_at, fresh = LossCurve(), LossCurve()
    for index, point in enumerate(points(count)):
        looked_at.add(point)
        fresh.add(point)
        if index % every == 0:
            looked_at.snapshot()
    assert looked_at.snapshot() == fresh.snapshot()
