from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from neuroshard.aggregation import (
    AggregatorConfig,
    CentredClipping,
    GateVerdict,
    Krum,
    Mean,
    Median,
    MemberFacts,
    Reduction,
    SliceRows,
    TrimmedMean,
    judge_statistics,
    reduce_slice,
    reduction_by,
    slice_statistics,
)
from tests.worlds.contributions import ATTACKS, aggregated, attacked, cut, facts_of, honest_rows, judge

BLOCK = 4096
ALL: list[AggregatorConfig] = [Mean(), Median(), TrimmedMean(0.25), Krum(), CentredClipping()]


def reduced_by(config: AggregatorConfig, rows: torch.Tensor, facts: MemberFacts | None = None) -> Reduction:
    facts = facts_of(rows) if facts is None else facts
    total = slice_statistics(SliceRows.of(rows), with_gram=True, established=facts.counted)
    return reduction_by(config, total, judge_statistics(total, facts), tolerated=sum(facts.established) // 4)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    count=st.integers(5, 9),
    attack=st.sampled_from(ATTACKS),
    edges=st.lists(st.integers(1, 4), max_size=3, unique=True),
    config=st.sampled_from(ALL),
)
def test_wherever_the_vector_is_cut_the_aggregate_has_the_same_bytes(
    seed: int, count: int, attack: str, edges: list[int], config: AggregatorConfig
) -> None:
    rows = attacked(honest_rows(count, 4 * BLOCK + 77, seed), attack, count // 4, seed)
    reduction = reduced_by(config, rows)
    parts = [reduce_slice(part, reduction) for part in cut(rows, [edge * BLOCK for edge in sorted(edges)])]
    assert torch.equal(torch.cat(parts), reduce_slice(SliceRows.of(rows), reduction))


@pytest.mark.parametrize("config", ALL, ids=str)
def test_the_aggregate_is_that_of_the_clipped_accepted_rows(config: AggregatorConfig) -> None:
    rows = attacked(honest_rows(9, 20_000), "x100", 2)
    rows[5] *= 4
    verdict = judge(rows)
    clipped = rows[list(verdict.accepted)] * torch.tensor(verdict.clip_factors)[:, None]
    assert min(verdict.clip_factors) < 0.5
    torch.testing.assert_close(
        aggregated(rows, config, verdict=verdict), aggregated(clipped, config), rtol=1e-6, atol=1e-7
    )


def test_mean_and_trimmed_mean_weigh_by_declared_work_within_the_cap() -> None:
    rows = honest_rows(5, 5000)
    facts = replace(facts_of(rows), work=(100.0, 100.0, 150.0, 100.0, 1e9))
    factors = torch.tensor(judge(rows).clip_factors)
    weights = torch.tensor([100.0, 100.0, 150.0, 100.0, 200.0])
    whole = SliceRows.of(rows)
    torch.testing.assert_close(reduce_slice(whole, reduced_by(Mean(), rows, facts)), weights / 650.0 * factors @ rows)
    order = (rows * factors[:, None]).argsort(dim=0)[1:-1]
    left = (rows * factors[:, None]).gather(0, order)
    expected = (left * weights[order]).sum(dim=0) / weights[order].sum(dim=0)
    torch.testing.assert_close(reduce_slice(whole, reduced_by(TrimmedMean(), rows, facts)), expected)
    for config in (Median(), Krum(), CentredClipping()):
        assert reduced_by(config, rows, facts) == reduced_by(config, rows)


@pytest.mark.parametrize("config", ALL, ids=str)
def test_near_copies_are_reduced_as_their_mean(config: AggregatorConfig) -> None:
    rows = honest_rows(9, 9000, seed=4)
    rows[7:] = rows[0] + 0.01 * rows[7:]
    merged = torch.cat([rows[[0, 7, 8]].mean(dim=0)[None], rows[1:7]])
    verdict = judge(rows)
    assert [one.rows for one in verdict.clusters if len(one.rows) > 1] == [(0, 7, 8)]
    verdict = replace(verdict, clip_factors=(1.0,) * 9)
    result = aggregated(rows, config, verdict=verdict, tolerated=2)
    torch.testing.assert_close(result, aggregated(merged, config), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("config", ALL, ids=str)
def test_others_count_for_at_most_an_eighth(config: AggregatorConfig) -> None:
    """However many they are, and whatever they declare. What they agree on still counts."""
    rows = honest_rows(12, 9000, seed=5)
    rows[6:] = rows[:6].mean(dim=0) + 0.3 * rows[6:].roll(1, dims=1)
    alone = reduce_slice(SliceRows.of(rows[:6]), reduced_by(config, rows[:6]))
    facts = replace(MemberFacts.of_equals(12), work=(1.0,) * 6 + (1e6,) * 6, established=(True,) * 6 + (False,) * 6)
    result = reduce_slice(SliceRows.of(rows), reduced_by(config, rows, facts))
    moved = (result - alone).norm()
    assert 0.001 < moved / alone.norm() < 0.125
    low, high = rows[:6].min(dim=0).values, rows[:6].max(dim=0).values
    if not isinstance(config, Mean | Krum | CentredClipping):
        assert ((result >= low - 1e-6) & (result <= high + 1e-6)).all()


def test_a_few_others_weigh_what_they_declare() -> None:
    rows = honest_rows(13, 5000)
    facts = replace(MemberFacts.of_equals(13), established=(True,) * 12 + (False,))
    expected = (rows * torch.tensor(judge_of(rows, facts).clip_factors)[:, None]).mean(dim=0)
    torch.testing.assert_close(reduce_slice(SliceRows.of(rows), reduced_by(Mean(), rows, facts)), expected)


def judge_of(rows: torch.Tensor, facts: MemberFacts) -> GateVerdict:
    return judge_statistics(slice_statistics(SliceRows.of(rows), with_gram=True, established=facts.counted), facts)


def test_the_result_may_lie_where_a_row_lay() -> None:
    rows = honest_rows(5, 3 * BLOCK + 9)
    reduction = reduced_by(TrimmedMean(), rows)
    expected = reduce_slice(SliceRows.of(rows), reduction)
    result = reduce_slice(SliceRows.of(rows), reduction, out=rows[2])
    assert result.data_ptr() == rows[2].data_ptr()
    assert torch.equal(rows[2], expected)


def test_one_contribution_is_its_own_aggregate() -> None:
    rows = honest_rows(1, 5000)
    for config in ALL:
        assert torch.equal(reduce_slice(SliceRows.of(rows), reduced_by(config, rows)), rows[0])


def test_what_cannot_be_reduced_is_refused() -> None:
    rows = honest_rows(3, 100)
    verdict = judge(rows)
    with pytest.raises(ValueError, match="abandoned"):
        reduced_by(Mean(), torch.zeros(3, 100))
    with pytest.raises(ValueError, match="Gram"):
        reduction_by(Krum(), slice_statistics(SliceRows.of(rows)), verdict)
    with pytest.raises(ValueError, match="contributions"):
        reduction_by(Mean(), slice_statistics(SliceRows.of(rows[:2])), verdict)
    with pytest.raises(ValueError, match="shape"):
        reduce_slice(SliceRows.of(rows), reduced_by(Mean(), rows), out=torch.empty(99))
