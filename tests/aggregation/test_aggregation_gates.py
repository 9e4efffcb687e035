from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from neuroshard.aggregation import Refusal, clipped, judge, make_aggregator, max_refused
from neuroshard.aggregation.averages import TrimmedMean

LENGTH = 500


def honest_rows(count: int, seed: int = 0, common: float = 1.0) -> torch.Tensor:
    """Contributions with a common direction and a noise of their own of the same strength."""
    generator = torch.Generator().manual_seed(seed)
    direction = torch.randn(LENGTH, generator=generator)
    return common * direction + torch.randn(count, LENGTH, generator=generator)


@pytest.mark.parametrize("count", range(1, 12))
@pytest.mark.parametrize("common", [0.55, 1.0, 3.0])  # mutual cosines of about 0.23, 0.5 and 0.9
def test_honest_members_are_accepted(count: int, common: float) -> None:
    verdict = judge(honest_rows(count, seed=count, common=common))
    assert verdict.accepted == tuple(range(count))
    assert verdict.abort_reason is None
    assert verdict.robust == (count >= 3)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, LENGTH - 1])
def test_one_number_that_is_not_finite_refuses_the_whole_contribution(bad: float, place: int) -> None:
    rows = honest_rows(5)
    rows[2, place] = bad
    verdict = judge(rows)
    assert verdict.refused == {2: Refusal.NOT_FINITE}
    assert verdict.abort_reason is None
    assert clipped(rows, verdict).isfinite().all()


def test_zero_copies_norms_and_directions_are_refused_each_with_its_reason() -> None:
    rows = honest_rows(17)
    rows[1] = 0
    rows[4] = rows[3]
    rows[6] *= 12
    rows[8] *= 0.05
    rows[10] *= -1
    verdict = judge(rows)
    assert dict(verdict.refused) == {
        1: Refusal.ZERO,
        4: Refusal.COPY,
        6: Refusal.NORM,
        8: Refusal.NORM,
        10: Refusal.DIRECTION,
    }
    assert verdict.abort_reason is None


def test_one_peer_counted_five_times_counts_once() -> None:
    rows = honest_rows(13)
    rows[9:13] = rows[0]
    verdict = judge(rows)
    assert dict(verdict.refused) == dict.fromkeys(range(9, 13), Refusal.COPY)
    assert verdict.accepted == tuple(range(9))


def test_a_random_direction_is_refused_among_members_that_agree() -> None:
    rows = honest_rows(7, common=2.0)
    rows[3] = torch.randn(LENGTH, generator=torch.Generator().manual_seed(99)) * rows[0].norm() / LENGTH**0.5
    assert judge(rows).refused == {3: Refusal.DIRECTION}


def test_long_contributions_are_clipped_to_the_median_norm() -> None:
    rows = honest_rows(5)
    rows[1] *= 4
    verdict = judge(rows)
    norms = rows.double().norm(dim=1)
    result = clipped(rows, verdict).double().norm(dim=1)
    assert verdict.accepted == (0, 1, 2, 3, 4)
    assert verdict.clip_factors[1] == pytest.approx((norms.median() / norms[1]).item())
    assert result.max().item() <= norms.median().item() * (1 + 1e-6)


def test_what_is_accepted_is_clipped_where_it_lies() -> None:
    """A round has memory for its members' vectors, and for no copies of them."""
    rows = honest_rows(7)
    rows[2] = 0
    rows[4] *= 4
    verdict = judge(rows)
    assert verdict.refused == {2: Refusal.ZERO}
    expected = rows[list(verdict.accepted)] * torch.tensor(verdict.clip_factors)[:, None]
    result = clipped(rows, verdict)
    assert result.data_ptr() == rows.data_ptr()
    assert torch.equal(result, expected)


def test_too_many_refusals_abort() -> None:
    assert [max_refused(n) for n in (1, 2, 3, 4, 6, 7, 10)] == [0, 0, 0, 1, 1, 2, 3]
    rows = honest_rows(7)
    rows[0] = rows[1] = 0
    assert judge(rows).abort_reason is None
    rows[2] = math.nan
    assert judge(rows).abort_reason == "3 of 7 contributions were refused, at most 2 may be"


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("value", [0.0, math.nan])
def test_nothing_accepted_aborts(count: int, value: float) -> None:
    verdict = judge(torch.full((count, 4), value))
    assert verdict.accepted == ()
    assert "no contribution was accepted" in str(verdict.abort_reason)


def test_two_members_have_no_majority_so_neither_is_judged_by_the_other() -> None:
    rows = honest_rows(2)
    rows[1] *= -50
    verdict = judge(rows)
    assert verdict.accepted == (0, 1)
    assert verdict.clip_factors == (1.0, 1.0)
    assert not verdict.robust
    rows[1] = math.nan
    assert "1 of 2" in str(judge(rows).abort_reason)


def test_a_group_of_one_is_passed_through_without_a_copy() -> None:
    rows = honest_rows(1)
    assert clipped(rows, judge(rows)).data_ptr() == rows.data_ptr()


def test_opposed_members_around_a_zero_median_abort() -> None:
    rows = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
    assert judge(rows).abort_reason is not None


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    count=st.integers(4, 13),
    attack=st.sampled_from(["sign", "scale", "noise", "nan", "copy", "zero", "constant"]),
)
def test_a_third_of_liars_keeps_the_aggregate_near_the_honest_mean(seed: int, count: int, attack: str) -> None:
    rows = honest_rows(count, seed=seed, common=1.5)
    liars = max_refused(count)
    honest = rows[liars:].clone()
    noise = torch.randn(liars, LENGTH, generator=torch.Generator().manual_seed(seed + 1))
    rows[:liars] = {
        "sign": -rows[:liars],
        "scale": rows[:liars] * 1e6,
        "noise": noise * 5,
        "nan": noise * math.nan,
        "copy": honest[:1].expand(liars, LENGTH),
        "zero": noise * 0,
        "constant": torch.ones(liars, LENGTH) * 2,
    }[attack]
    verdict = judge(rows)
    assert verdict.abort_reason is None
    aggregate = make_aggregator(TrimmedMean(0.25))(clipped(rows, verdict))
    center = honest.mean(dim=0)
    cosine = torch.nn.functional.cosine_similarity(aggregate, center, dim=0).item()
    assert cosine > 0.9
    assert aggregate.norm() <= 1.5 * center.norm()


def test_other_types_are_refused() -> None:
    with pytest.raises(ValueError, match="fp32"):
        judge(torch.zeros(2, 3, dtype=torch.float64))
    with pytest.raises(ValueError, match="fp32"):
        judge(torch.zeros(0, 3))
