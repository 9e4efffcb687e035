from __future__ import annotations

import json
import math
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from neuroshard.aggregation import (
    AggregatorConfig,
    Mean,
    Median,
    TrimmedMean,
    aggregator_config,
    capped_weights,
    coordinate_median,
    make_aggregator,
    mean,
    trim_count,
    trimmed_mean,
)
from neuroshard.aggregation.sorting import comparators, sorted_rows
from neuroshard.aggregation.sums import dot_product
from neuroshard.config.run_parameters import OuterOptimization

VECTORS: dict[str, Any] = json.loads((Path(__file__).parents[1] / "vectors" / "aggregation.json").read_text())
CONFIGS: dict[str, Any] = {"mean": lambda _: Mean(), "median": lambda _: Median(), "trimmed_mean": TrimmedMean}
ALL: list[AggregatorConfig] = [Mean(), Median(), TrimmedMean(0.1), TrimmedMean(0.25)]


def rows_of(seed: int, count: int, length: int) -> torch.Tensor:
    return torch.randn(count, length, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("vector", VECTORS["aggregates"], ids=lambda v: f"{v['rule']}-{len(v['contributions'])}")
def test_golden_aggregates(vector: dict[str, Any]) -> None:
    aggregator = make_aggregator(CONFIGS[vector["rule"]](vector.get("trim_fraction")))
    aggregate = aggregator(torch.tensor(vector["contributions"], dtype=torch.float32))
    assert torch.equal(aggregate, torch.tensor(vector["aggregate"], dtype=torch.float32))


@pytest.mark.parametrize("vector", VECTORS["trim_counts"], ids=lambda v: f"{v['count']}x{v['trim_fraction']}")
def test_golden_trim_counts(vector: dict[str, Any]) -> None:
    assert trim_count(vector["count"], vector["trim_fraction"]) == vector["trim"]


def test_one_attacker_among_nine_is_trimmed() -> None:
    # "trimmed mean 10 %" that trims floor(9 * 0.1) = 0 gave 112
    rows = torch.tensor([[1.0]] * 8 + [[1000.0]])
    assert trimmed_mean(rows, 0.1).item() == 1.0


@given(count=st.integers(1, 200), fraction=st.floats(0, 0.5, exclude_max=True))
def test_trimming_never_takes_all_and_takes_enough(count: int, fraction: float) -> None:
    trim = trim_count(count, fraction)
    assert count - 2 * trim >= 1
    if count >= 3:
        assert trim >= 1
    assert trim >= min(count * fraction - 1e-6, (count - 1) // 2)


@pytest.mark.parametrize("fraction", [-0.1, 0.5, 1.0, math.nan])
def test_an_impossible_trim_fraction_is_refused(fraction: float) -> None:
    with pytest.raises(ValueError, match="trim_fraction"):
        make_aggregator(TrimmedMean(fraction))


@given(honest=st.lists(st.floats(-1, 1), min_size=9, max_size=9), lie=st.floats(-1e6, 1e6))
def test_trimmed_mean_and_median_stay_within_the_honest_range(honest: list[float], lie: float) -> None:
    rows = torch.tensor([*honest, lie], dtype=torch.float64)[:, None]
    for result in (trimmed_mean(rows, 0.1).item(), coordinate_median(rows).item()):
        assert min(honest) - 1e-9 <= result <= max(honest) + 1e-9


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1000), count=st.integers(1, 40), length=st.integers(1, 70))
def test_results_equal_the_plain_formula(seed: int, count: int, length: int) -> None:
    rows = rows_of(seed, count, length)
    ordered = np.sort(rows.double().numpy(), axis=0)
    trim = trim_count(count, 0.25)
    expected = {
        "trimmed": ordered[trim : count - trim].mean(axis=0),
        "median": np.median(ordered, axis=0),
        "mean": ordered.mean(axis=0),
    }
    actual = {"trimmed": trimmed_mean(rows, 0.25), "median": coordinate_median(rows), "mean": mean(rows)}
    for name, value in expected.items():
        np.testing.assert_allclose(actual[name].numpy(), value, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("config", ALL, ids=str)
def test_robust_results_do_not_depend_on_order_or_threads(config: AggregatorConfig) -> None:
    rows = rows_of(1, 7, 70_000)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append(make_aggregator(config)(rows))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    if not isinstance(config, Mean):
        assert torch.equal(make_aggregator(config)(rows[[3, 1, 6, 0, 5, 2, 4]]), results[0])


@pytest.mark.parametrize("config", ALL, ids=str)
def test_negative_zero_is_zero(config: AggregatorConfig) -> None:
    rows = torch.tensor([[-0.0], [0.0], [-0.0]])
    assert math.copysign(1.0, make_aggregator(config)(rows).item()) == 1.0


@pytest.mark.parametrize("config", ALL, ids=str)
def test_a_single_contribution_is_the_result_without_a_copy(config: AggregatorConfig) -> None:
    rows = rows_of(2, 1, 9)
    result = make_aggregator(config)(rows)
    assert torch.equal(result, rows[0])
    assert result.data_ptr() == rows.data_ptr()


@pytest.mark.parametrize("shape", [(0, 3), (3,), (1, 2, 3)])
def test_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    for config in ALL:
        with pytest.raises(ValueError, match="shape"):
            make_aggregator(config)(torch.zeros(shape))


@pytest.mark.parametrize("lie", [1e9, math.inf, math.nan, -1e9, 0.0])
@pytest.mark.parametrize("honest", [1, 2, 4])
def test_a_declared_weight_does_not_win(lie: float, honest: int) -> None:
    rows = torch.tensor([[1.0]] * honest + [[100.0]])
    result = mean(rows, [50.0] * honest + [lie]).item()
    most = (honest * 1.0 + 2 * 100.0) / (honest + 2)  # the share of twice the median weight
    assert 1.0 <= result <= most + 1e-4


def test_weights_count_within_the_cap() -> None:
    assert capped_weights([100, 150, 120]) == (100, 150, 120)
    assert capped_weights([100, 1e9, math.nan, -5]) == (100, 200, 0, 0)
    assert mean(torch.tensor([[0.0], [3.0]]), [100, 200]).item() == 2.0


def test_a_member_without_a_usable_weight_does_not_even_spoil_the_sum() -> None:
    assert mean(torch.tensor([[2.0], [math.nan]]), [1.0, math.nan]).item() == 2.0


def test_unusable_weights_are_an_error() -> None:
    with pytest.raises(ValueError, match="usable"):
        capped_weights([0.0, math.nan])
    with pytest.raises(ValueError, match="1 weights for 2"):
        mean(torch.zeros(2, 1), [1.0])


def test_a_runs_parameters_name_the_aggregator() -> None:
    assert aggregator_config(OuterOptimization(trim_fraction=0.25)) == TrimmedMean(0.25)
    assert aggregator_config(OuterOptimization(aggregator="median")) == Median()
    assert aggregator_config(OuterOptimization(aggregator="mean")) == Mean()


@pytest.mark.parametrize("count", range(1, 11))
def test_the_sorting_network_sorts_everything(count: int) -> None:
    # the 0-1 principle: a network that sorts all zeros and ones sorts all values (Knuth 3, 5.3.4 Z)
    columns = torch.tensor(list(product((0.0, 1.0), repeat=count))).T
    assert torch.equal(sorted_rows(columns), columns.sort(dim=0).values)
    assert all(low < high < count for low, high in comparators(count))


@pytest.mark.parametrize("count", [31, 32, 33, 40])
def test_many_rows_are_sorted_too(count: int) -> None:
    rows = rows_of(3, count, 50)
    assert torch.equal(sorted_rows(rows), rows.sort(dim=0).values)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1000), length=st.sampled_from([1, 2, 65_535, 65_536, 65_537, 140_000]))
def test_dot_products_are_exact_to_float64(seed: int, length: int) -> None:
    left, right = rows_of(seed, 2, length)
    products = (left.double() * right.double()).tolist()
    bound = math.fsum(map(abs, products)) * 1e-14
    assert dot_product(left, right) == pytest.approx(math.fsum(products), rel=0, abs=bound)


def test_a_dot_product_is_finite_exactly_when_the_numbers_are() -> None:
    huge = torch.full((100_000,), 3e38)
    assert math.isfinite(dot_product(huge, huge))
    for bad in (math.nan, math.inf, -math.inf):
        huge[99_999] = bad
        assert not math.isfinite(dot_product(huge, huge))
