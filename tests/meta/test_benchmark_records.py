"""Benchmarks state their uncertainty honestly, however few measurements they have."""

from __future__ import annotations

from math import inf

import pytest

from benchmarks.record import mean_with_interval


@pytest.mark.parametrize(
    ("values", "half_width"),
    [
        ([1.0, 3.0], 12.706),  # 12.706 * sqrt(2) / sqrt(2)
        ([1.0, 2.0, 3.0], 4.303 / 3**0.5),
        ([5.0], inf),
        ([0.0, 1.0] * 16, 2.042 * (8 / 31) ** 0.5 / 32**0.5),
    ],
)
def test_an_interval_is_that_of_students_t(values: list[float], half_width: float) -> None:
    mean, half = mean_with_interval(values)
    assert mean == sum(values) / len(values)
    assert half == pytest.approx(half_width)
