from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from neuroshard.aggregation import (
    AggregatorConfig,
    CentredClipping,
    Cluster,
    GateVerdict,
    Krum,
    Mean,
    Median,
    MemberFacts,
    RejectionReason,
    SliceRows,
    TooFewContributionsError,
    TrimmedMean,
    judge_statistics,
    reduction_by,
    slice_statistics,
)
from neuroshard.aggregation.reduction import centred_clipping_weights, krum_order
from tests.worlds.contributions import ATTACKS, accepting_all, aggregated, attacked, honest_rows, judge

ROBUST: list[AggregatorConfig] = [TrimmedMean(0.25), Median(), Krum(), CentredClipping()]


def krum_by_definition(rows: torch.Tensor, tolerated: int) -> list[float]:
    """Scores: the smallest sum of squared distances to any n - f - 2 others."""
    count = rows.shape[0]
    scores: list[float] = []
    for i in range(count):
        distances = [float((rows[i].double() - rows[j].double()).square().sum()) for j in range(count) if j != i]
        scores.append(min(sum(chosen) for chosen in combinations(distances, count - tolerated - 2)))
    return scores


def centred_clipping_by_definition(rows: torch.Tensor, iterations: int) -> torch.Tensor:
    vectors = rows.double()
    center = torch.zeros(rows.shape[1], dtype=torch.float64)
    for _ in range(iterations):
        differences = vectors - center
        distances = differences.norm(dim=1)
        radius = torch.quantile(distances, 0.5, interpolation="midpoint")
        shares = torch.where(distances > radius, radius / distances, 1.0)
        center = center + (differences * shares[:, None]).mean(dim=0)
    return center


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), tolerated=st.integers(0, 2), more=st.integers(0, 3), length=st.integers(1, 60))
def test_krum_is_what_it_is_defined_to_be(seed: int, tolerated: int, more: int, length: int) -> None:
    count = 2 * tolerated + 3 + more
    rows = torch.randn(count, length, generator=torch.Generator().manual_seed(seed))
    scores = krum_by_definition(rows, tolerated)
    order = sorted(range(count), key=scores.__getitem__)
    if tolerated and scores[order[-tolerated]] - scores[order[-tolerated - 1]] < 1e-9:
        return  # a tie at the border: either is right
    expected = rows[order[: count - tolerated]].double().mean(dim=0).float()
    torch.testing.assert_close(aggregated(rows, Krum(), tolerated=tolerated), expected)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), count=st.integers(1, 9), length=st.integers(1, 60))
def test_centred_clipping_is_what_it_is_defined_to_be(seed: int, count: int, length: int) -> None:
    rows = honest_rows(count, length, seed)
    expected = centred_clipping_by_definition(rows, 10).float()
    torch.testing.assert_close(aggregated(rows, CentredClipping()), expected, rtol=1e-4, atol=1e-5)


def test_the_center_is_a_weighted_mean_in_which_what_is_far_counts_little() -> None:
    rows = attacked(honest_rows(9, 200), "x100", 2)
    gram = slice_statistics(SliceRows.of(rows), with_gram=True).gram
    assert gram is not None
    weights = centred_clipping_weights(gram)
    assert sum(weights) == pytest.approx(1.0, abs=0.05)
    assert max(weights[:2]) < 0.1 * min(weights[2:])


@pytest.mark.parametrize(("count", "tolerated"), [(2, 0), (4, 1), (6, 2)])
def test_krum_is_refused_to_so_few_that_it_could_choose_a_liar(count: int, tolerated: int) -> None:
    # n = 3 with f = 1 once returned the attacker
    with pytest.raises(TooFewContributionsError, match=rf"needs {2 * tolerated + 3} contributions.*are {count}"):
        aggregated(honest_rows(count, 50), Krum(), tolerated=tolerated)
    aggregated(honest_rows(2 * tolerated + 3, 50), Krum(), tolerated=tolerated)


def test_a_refused_member_is_one_of_the_tolerated() -> None:
    rows = attacked(honest_rows(5, 400), "zero", 1)
    verdict = judge(rows)
    assert len(verdict.refused) == 1
    honest = rows[1:] * torch.tensor(verdict.clip_factors)[:, None]
    result = aggregated(rows, Krum(), verdict=verdict, tolerated=1)  # four are left, and no liar among them
    torch.testing.assert_close(result, honest.mean(dim=0))


def test_a_copy_is_one_of_the_tolerated() -> None:
    rows = honest_rows(5, 400)
    rows[4] = rows[1]
    expected = aggregated(rows[:4], Mean())
    torch.testing.assert_close(aggregated(rows, Krum(), verdict=unclipped(judge(rows)), tolerated=1), expected)


def test_refused_others_are_none_of_the_tolerated() -> None:
    """Names are free: a liar that brings some to be refused must not make Krum trust its contribution."""
    rows = attacked(honest_rows(9, 400), "x100", 1)
    rows[7:] = 0.0
    established = (True,) * 7 + (False,) * 2
    facts = replace(MemberFacts.of_equals(9), established=established)
    total = slice_statistics(SliceRows.of(rows), with_gram=True, established=established)
    verdict = judge_statistics(total, facts)
    assert set(verdict.refused) == {0, 7, 8}
    trusting = replace(verdict, refused={7: RejectionReason.ZERO, 8: RejectionReason.ZERO}, accepted=tuple(range(7)))
    clusters = tuple(Cluster((row,)) for row in range(7))
    trusting = replace(trusting, clusters=clusters, clip_factors=(1.0,) * 7)
    assert 0 not in reduction_by(Krum(), total, trusting, tolerated=1).rows


def unclipped(verdict: GateVerdict) -> GateVerdict:
    return replace(verdict, clip_factors=(1.0,) * len(verdict.accepted))


def test_two_that_are_each_others_only_neighbour_are_told_apart_by_their_lengths() -> None:
    gram = slice_statistics(SliceRows.of(torch.tensor([[3.0], [2.0], [9.0]])), with_gram=True).gram
    assert gram is not None
    assert krum_order(gram, 0) == (1, 0, 2)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), attack=st.sampled_from(ATTACKS), config=st.sampled_from(ROBUST))
def test_a_quarter_of_liars_does_not_turn_the_aggregate(seed: int, attack: str, config: AggregatorConfig) -> None:
    """Gates and aggregator together, as a round that tolerates floor(n / 4) liars uses them."""
    count, liars = 11, 2
    rows = attacked(honest_rows(count, 600, seed), attack, liars, seed)
    verdict = judge(rows)
    assert verdict.abort_reason is None
    assert not set(verdict.refused) & set(range(liars, count))
    check_near_honest_mean(aggregated(rows, config, verdict=verdict, tolerated=liars), rows[liars:], config)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), count=st.integers(4, 13), attack=st.sampled_from(ATTACKS))
def test_a_third_of_liars_does_not_turn_the_trimmed_mean(seed: int, count: int, attack: str) -> None:
    liars = (count - 1) // 3
    rows = attacked(honest_rows(count, 600, seed), attack, liars, seed)
    verdict = judge(rows)
    assert verdict.abort_reason is None
    check_near_honest_mean(aggregated(rows, TrimmedMean(0.25), verdict=verdict), rows[liars:], TrimmedMean(0.25))


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    attack=st.sampled_from(["sign flip", "x100", "noise", "zero", "ALIE", "inner product"]),
    config=st.sampled_from(ROBUST),
)
def test_the_aggregators_hold_without_the_gates(seed: int, attack: str, config: AggregatorConfig) -> None:
    count, liars = 11, 2
    rows = attacked(honest_rows(count, 600, seed), attack, liars, seed)
    result = aggregated(rows, config, verdict=accepting_all(count), tolerated=liars)
    check_near_honest_mean(result, rows[liars:], config)


def check_near_honest_mean(result: torch.Tensor, honest: torch.Tensor, config: AggregatorConfig) -> None:
    center = honest.mean(dim=0)
    cosine = torch.nn.functional.cosine_similarity(result, center, dim=0).item()
    assert cosine > 0.9
    assert 0.5 * center.norm() < result.norm() < 1.5 * center.norm()


def test_the_liars_that_krum_must_not_choose_are_not_chosen() -> None:
    rows = attacked(honest_rows(11, 300), "x100", 2)
    total = slice_statistics(SliceRows.of(rows), with_gram=True)
    assert not {0, 1} & set(reduction_by(Krum(), total, accepting_all(11), tolerated=2).rows)
    assert total.gram is not None
    assert set(krum_order(total.gram, 2)[-2:]) == {0, 1}
