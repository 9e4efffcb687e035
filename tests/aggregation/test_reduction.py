from __future__ import annotations

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
    MultiKrum,
    Reduction,
    SliceRows,
    TrimmedMean,
    abstaining,
    needs_gram,
    reduce_slice,
    reduction_by,
    slice_statistics,
)
from tests.worlds.contributions import ATTACKS, aggregated, attacked, cut, honest_rows, judge

BLOCK = 4096
ALL: list[AggregatorConfig] = [Mean(), Median(), TrimmedMean(0.25), Krum(), MultiKrum(), CentredClipping()]


def reduced_by(config: AggregatorConfig, rows: torch.Tensor, work: list[float] | None = None) -> Reduction:
    total = slice_statistics(SliceRows.of(rows), with_gram=needs_gram(config))
    return reduction_by(config, total, judge(rows), tolerated=rows.shape[0] // 4, work=work)


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


def test_the_mean_weighs_by_declared_work_within_the_cap() -> None:
    rows = honest_rows(5, 5000)
    verdict, work = judge(rows), [100.0, 100.0, 150.0, 100.0, 1e9]
    shares = torch.tensor([100.0, 100.0, 150.0, 100.0, 200.0]) / 650.0 * torch.tensor(verdict.clip_factors)
    torch.testing.assert_close(aggregated(rows, Mean(), verdict=verdict, work=work), shares @ rows)
    for config in ALL[1:]:
        assert reduced_by(config, rows, work) == reduced_by(config, rows)


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
        reduced_by(Mean(), rows, [1.0, 2.0])
    with pytest.raises(ValueError, match="contributions"):
        reduction_by(Mean(), slice_statistics(SliceRows.of(rows[:2])), verdict)
    with pytest.raises(ValueError, match="shape"):
        reduce_slice(SliceRows.of(rows), reduced_by(Mean(), rows), out=torch.empty(99))


@pytest.mark.parametrize(
    ("work", "expected"),
    [
        ([], ()),
        ([0.0, 0.0], ()),
        ([100.0, 25.0, 100.0], ()),
        ([100.0, 24.0, 100.0], (1,)),
        ([100.0, -5.0, float("nan"), 100.0, 100.0, float("inf")], (1, 2, 5)),
        ([1e9, 100.0, 100.0], ()),  # who boasts does not make the others abstain
    ],
)
def test_less_than_a_quarter_of_the_median_work_abstains(work: list[float], expected: tuple[int, ...]) -> None:
    assert abstaining(work) == expected
