from __future__ import annotations

import json
import math
from functools import reduce
from itertools import pairwise, permutations, product
from operator import add
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from neuroshard.aggregation import (
    AggregatorConfig,
    CentredClipping,
    Krum,
    Mean,
    Median,
    MemberFacts,
    TrimmedMean,
    aggregator_config,
    aggregator_name,
    capped_weights,
    needs_gram,
    trim_count,
)
from neuroshard.aggregation.slices import (
    BLOCK,
    LANES,
    comparators,
    dot_product,
    fold_products,
    folded,
    middle_rows,
    weighted_middle_mean,
)
from neuroshard.config.run_parameters import OuterOptimization
from tests.worlds.contributions import accepting_all, aggregated

VECTORS: dict[str, Any] = json.loads((Path(__file__).parents[1] / "vectors" / "aggregation.json").read_text())
CONFIGS: dict[str, Any] = {
    "mean": lambda _: Mean(),
    "median": lambda _: Median(),
    "trimmed_mean": TrimmedMean,
    "krum": lambda _: Krum(),
}
COORDINATE_WISE: list[AggregatorConfig] = [Mean(), Median(), TrimmedMean(0.1), TrimmedMean(0.25)]
ALL: list[AggregatorConfig] = [*COORDINATE_WISE, Krum(), CentredClipping()]


def rows_of(seed: int, count: int, length: int) -> torch.Tensor:
    return torch.randn(count, length, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("vector", VECTORS["aggregates"], ids=lambda v: f"{v['rule']}-{len(v['contributions'])}")
def test_golden_aggregates(vector: dict[str, Any]) -> None:
    config = CONFIGS[vector["rule"]](vector.get("trim_fraction"))
    rows = torch.tensor(vector["contributions"], dtype=torch.float32)
    result = aggregated(rows, config, tolerated=vector.get("tolerated", 0))
    assert torch.equal(result, torch.tensor(vector["aggregate"], dtype=torch.float32))


@pytest.mark.parametrize("vector", VECTORS["trim_counts"], ids=lambda v: f"{v['count']}x{v['trim_fraction']}")
def test_golden_trim_counts(vector: dict[str, Any]) -> None:
    assert trim_count(vector["count"], vector["trim_fraction"]) == vector["trim"]


def test_one_attacker_among_nine_is_trimmed() -> None:
    # "trimmed mean 10 %" that trims floor(9 * 0.1) = 0 gave 112
    assert aggregated(torch.tensor([[1.0]] * 8 + [[1000.0]]), TrimmedMean(0.1)).item() == 1.0


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
        trim_count(1, fraction)


@settings(max_examples=50, deadline=None)
@given(
    honest=st.lists(st.floats(-1, 1, width=32), min_size=9, max_size=9),
    lie=st.floats(-1e6, 1e6, width=32),
    config=st.sampled_from([TrimmedMean(0.1), Median(), Krum()]),
)
def test_one_lie_does_not_lead_out_of_the_honest_range(
    honest: list[float], lie: float, config: AggregatorConfig
) -> None:
    rows = torch.tensor([*honest, lie])[:, None]
    result = aggregated(rows, config, tolerated=1).item()
    low, high = min(honest), max(honest)
    if isinstance(config, Krum):  # a lie just beyond the range may be chosen, at a neighbour's distance
        low, high = low - (high - low), high + (high - low)
    assert low - 1e-6 <= result <= high + 1e-6


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1000), count=st.integers(1, 40), length=st.integers(1, 70))
def test_results_equal_the_plain_formula(seed: int, count: int, length: int) -> None:
    rows = rows_of(seed, count, length)
    ordered = np.sort(rows.double().numpy(), axis=0)
    trim = trim_count(count, 0.25)
    expected = {
        TrimmedMean(0.25): ordered[trim : count - trim].mean(axis=0),
        Median(): np.median(ordered, axis=0),
        Mean(): ordered.mean(axis=0),
    }
    for config, value in expected.items():
        np.testing.assert_allclose(aggregated(rows, config).numpy(), value, rtol=1e-6, atol=1e-7)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1000), order=st.permutations(range(7)), config=st.sampled_from(ALL))
def test_the_order_of_the_members_is_nothing(seed: int, order: list[int], config: AggregatorConfig) -> None:
    rows = rows_of(seed, 7, 5000)
    result, other = aggregated(rows, config, tolerated=2), aggregated(rows[order], config, tolerated=2)
    if isinstance(config, Median | TrimmedMean):
        assert torch.equal(result, other)
    else:  # sums of the same numbers in another order
        torch.testing.assert_close(result, other, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("config", ALL, ids=str)
def test_negative_zero_is_zero(config: AggregatorConfig) -> None:
    rows = torch.tensor([[-0.0, 1.0], [0.0, 1.0], [-0.0, 1.0]])
    assert math.copysign(1.0, aggregated(rows, config)[0].item()) == 1.0


@pytest.mark.parametrize("config", ALL, ids=str)
def test_a_single_contribution_is_the_result(config: AggregatorConfig) -> None:
    rows = rows_of(2, 1, 9)
    assert torch.equal(aggregated(rows, config, tolerated=1), rows[0])


@pytest.mark.parametrize("config", ALL, ids=str)
def test_equal_contributions_are_their_own_aggregate(config: AggregatorConfig) -> None:
    rows = rows_of(3, 1, 500).expand(6, -1)
    torch.testing.assert_close(aggregated(rows, config, tolerated=1), rows[0], rtol=2e-7, atol=0.0)


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (3,), (1, 2, 3)])
def test_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="shape"):
        aggregated(torch.zeros(shape), Mean())


@pytest.mark.parametrize("lie", [1e9, math.inf, math.nan, -1e9, 0.0])
@pytest.mark.parametrize("honest", [1, 2, 4])
def test_a_declared_weight_does_not_win(lie: float, honest: int) -> None:
    rows = torch.tensor([[1.0]] * honest + [[100.0]])
    result = aggregated(rows, Mean(), verdict=accepting_all(len(rows), [50.0] * honest + [lie])).item()
    most = (honest * 1.0 + 2 * 100.0) / (honest + 2)  # the share of twice the median weight
    assert 1.0 <= result <= most + 1e-4


def test_weights_count_within_the_cap() -> None:
    everybody = [True] * 4
    assert capped_weights([100, 150, 120], everybody[:3]) == (100, 150, 120)
    assert capped_weights([100, 1e9, math.nan, -5], everybody) == (100, 200, 0, 0)
    verdict = accepting_all(2, [100, 200])
    assert aggregated(torch.tensor([[0.0], [3.0]]), Mean(), verdict=verdict).item() == 2.0


def test_the_work_of_others_changes_no_cap() -> None:
    assert capped_weights([100, 120, 1e6, 1e6, 1e6], [True, True, False, False, False]) == (100, 120, 200, 200, 200)
    assert capped_weights([7.0, 9.0], [False, False]) == (1.0, 1.0)


@pytest.mark.parametrize("nothing", [0.0, -3.0, math.nan, math.inf, 1e308])
def test_where_nobody_says_what_it_did_all_weigh_the_same(nothing: float) -> None:
    assert capped_weights([nothing] * 3, [True] * 3) == (1.0, 1.0, 1.0)


def weighted_trimmed_by_definition(rows: torch.Tensor, weights: list[float], trim: int) -> list[float]:
    """Of every column: the mean over all orders of equal numbers of what is left of the sorted numbers."""
    found = list[float]()
    for column in rows.T.tolist():
        numerators, denominators = list[float](), list[float]()
        orders = [order for order in permutations(range(len(column))) if is_sorted([column[i] for i in order])]
        for order in orders:
            left = order[trim : len(column) - trim]
            numerators.append(math.fsum(weights[i] * column[i] for i in left))
            denominators.append(math.fsum(weights[i] for i in left))
        found.append(math.fsum(numerators) / math.fsum(denominators))
    return found


def is_sorted(values: list[float]) -> bool:
    return all(one <= other for one, other in pairwise(values))


@settings(max_examples=60, deadline=None)
@given(
    columns=st.lists(st.lists(st.integers(-2, 2), min_size=5, max_size=5), min_size=1, max_size=6),
    weights=st.lists(st.sampled_from([50.0, 100.0, 120.0]), min_size=5, max_size=5),
    trim=st.integers(0, 2),
)
def test_weights_count_after_trimming_and_equal_numbers_share_the_places(
    columns: list[list[int]], weights: list[float], trim: int
) -> None:
    rows = torch.tensor(columns, dtype=torch.float32).T.contiguous()
    middle, low, high = weighted_middle_mean(rows.numpy().copy(), weights, trim)
    np.testing.assert_allclose(middle, weighted_trimmed_by_definition(rows, weights, trim), rtol=1e-12, atol=1e-12)
    ordered = rows.sort(dim=0).values
    assert (low.tolist(), high.tolist()) == (ordered[trim].tolist(), ordered[-1 - trim].tolist())


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1000), order=st.permutations(range(9)))
def test_the_order_of_members_with_other_weights_is_nothing(seed: int, order: list[int]) -> None:
    rows, work = rows_of(seed, 9, 3000).mul(3).round(), [100.0, 90.0, 130.0, 200.0, 55.0, 100.0, 70.0, 300.0, 110.0]
    result = aggregated(rows, TrimmedMean(0.25), verdict=accepting_all(9, work))
    other = aggregated(rows[order], TrimmedMean(0.25), verdict=accepting_all(9, [work[i] for i in order]))
    torch.testing.assert_close(result, other, rtol=1e-6, atol=1e-9)


def test_a_runs_parameters_name_the_aggregator() -> None:
    assert aggregator_config(OuterOptimization(aggregator="trimmed_mean", trim_fraction=0.25)) == TrimmedMean(0.25)
    names = {"median": Median(), "mean": Mean(), "krum": Krum(), "centred_clipping": CentredClipping()}
    for name, config in names.items():
        assert aggregator_config(OuterOptimization(aggregator=name)) == config  # type: ignore[arg-type]


def test_some_aggregators_and_the_search_for_near_copies_need_a_gram_matrix() -> None:
    few, many = MemberFacts.of_equals(7), MemberFacts.of_equals(8)
    assert [needs_gram(config, few) for config in ALL] == [False] * 4 + [True] * 2
    assert all(needs_gram(config, many) for config in ALL)
    assert not needs_gram(Mean(), MemberFacts.of_equals(8, are_friends=True))


@pytest.mark.parametrize("count", range(1, 11))
def test_the_sorting_network_finds_the_middle_of_everything(count: int) -> None:
    # the 0-1 principle: a network that is right for all zeros and ones is right for all values (Knuth 3, 5.3.4 Z)
    columns = torch.tensor(list(product((0.0, 1.0), repeat=count))).T
    for trim in range((count + 1) // 2):
        middle = np.sort(middle_rows(columns.numpy().copy(), trim), axis=0)
        assert np.array_equal(middle, columns.sort(dim=0).values[trim : count - trim].numpy())
    assert all(low < high < count for low, high in comparators(count))


@pytest.mark.parametrize("count", [31, 32, 33, 40])
def test_many_rows_are_sorted_too(count: int) -> None:
    rows = rows_of(3, count, 50).numpy()
    assert np.array_equal(np.sort(middle_rows(rows.copy(), 3), axis=0), np.sort(rows, axis=0)[3:-3])


def test_products_are_summed_in_the_order_that_is_said() -> None:
    left, right = rows_of(5, 2, 3 * BLOCK).numpy().astype(np.float64)
    lanes, scratch = np.empty((1, 3, LANES)), np.empty(3 * BLOCK)
    fold_products(left, right, scratch, lanes[0])
    for block, found in enumerate(folded(lanes)[0]):
        products = [a * b for a, b in zip(left.tolist(), right.tolist(), strict=True)][BLOCK * block :][:BLOCK]
        sums = [reduce(add, products[lane::LANES]) for lane in range(LANES)]
        while len(sums) > 1:
            half = len(sums) // 2
            sums = [a + b for a, b in zip(sums[:half], sums[half:], strict=True)]
        assert found == sums[0]


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


def test_aggregators_have_names_with_their_settings() -> None:
    configs = (TrimmedMean(0.25), Median(), Mean(), Krum(), CentredClipping())
    names = ["trimmed_mean(0.25)", "median", "mean", "krum", "centred_clipping"]
    assert [aggregator_name(config) for config in configs] == names
