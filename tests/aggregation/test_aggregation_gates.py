from __future__ import annotations

import math

import pytest
import torch

from neuroshard.aggregation import Mean, RejectionReason, SliceRows, judge_statistics, max_refused, slice_statistics
from tests.worlds.contributions import aggregated, judge

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
    assert verdict.refused == {2: RejectionReason.NOT_FINITE}
    assert verdict.abort_reason is None
    assert aggregated(rows, Mean(), verdict=verdict).isfinite().all()


def test_zero_copies_norms_and_directions_are_refused_each_with_its_reason() -> None:
    rows = honest_rows(17)
    rows[1] = 0
    rows[4] = rows[3]
    rows[6] *= 12
    rows[8] *= 0.05
    rows[10] *= -1
    verdict = judge(rows)
    assert dict(verdict.refused) == {
        1: RejectionReason.ZERO,
        4: RejectionReason.COPY,
        6: RejectionReason.NORM,
        8: RejectionReason.NORM,
        10: RejectionReason.DIRECTION,
    }
    assert verdict.abort_reason is None


def test_one_peer_counted_five_times_counts_once() -> None:
    rows = honest_rows(13)
    rows[9:13] = rows[0]
    verdict = judge(rows)
    assert dict(verdict.refused) == dict.fromkeys(range(9, 13), RejectionReason.COPY)
    assert verdict.accepted == tuple(range(9))


def test_a_random_direction_is_refused_among_members_that_agree() -> None:
    rows = honest_rows(7, common=2.0)
    rows[3] = torch.randn(LENGTH, generator=torch.Generator().manual_seed(99)) * rows[0].norm() / LENGTH**0.5
    assert judge(rows).refused == {3: RejectionReason.DIRECTION}


def test_long_contributions_are_clipped_to_the_median_norm() -> None:
    rows = honest_rows(5)
    rows[1] *= 4
    verdict = judge(rows)
    norms = rows.double().norm(dim=1)
    assert verdict.accepted == (0, 1, 2, 3, 4)
    assert verdict.clip_factors[1] == pytest.approx((norms.median() / norms[1]).item())
    assert (norms * torch.tensor(verdict.clip_factors)).max().item() <= norms.median().item() * (1 + 1e-6)
    expected = (rows.double() * torch.tensor(verdict.clip_factors)[:, None]).mean(dim=0).float()
    torch.testing.assert_close(aggregated(rows, Mean(), verdict=verdict), expected)


def test_without_directions_the_other_gates_apply_and_nothing_is_clipped() -> None:
    """So gradients of single steps are judged."""
    rows = honest_rows(9)
    rows[2] *= 3
    rows[4] *= -1
    rows[5] = 0
    rows[6] *= 12
    statistics = slice_statistics(SliceRows.of(rows))
    verdict = judge_statistics(statistics, judges_direction=False)
    assert dict(verdict.refused) == {5: RejectionReason.ZERO, 6: RejectionReason.NORM}
    assert set(verdict.clip_factors) == {1.0}
    assert RejectionReason.DIRECTION in judge_statistics(statistics).refused.values()


def test_copies_are_named_by_who_compared_them() -> None:
    total = slice_statistics(SliceRows.of(honest_rows(5)))
    assert judge_statistics(total, {3}).refused == {3: RejectionReason.COPY}
    with pytest.raises(ValueError, match="below 5"):
        judge_statistics(total, {5})


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


def test_opposed_members_around_a_zero_median_abort() -> None:
    rows = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
    assert judge(rows).abort_reason is not None


def test_other_types_are_refused() -> None:
    with pytest.raises(ValueError, match="fp32"):
        judge(torch.zeros(2, 3, dtype=torch.float64))
    with pytest.raises(ValueError, match="fp32"):
        judge(torch.zeros(0, 3))


def test_who_did_too_little_work_is_neither_accepted_nor_refused() -> None:
    rows = honest_rows(4)
    rows[3] *= 1e6  # it would be refused
    verdict = judge_statistics(slice_statistics(SliceRows.of(rows)), work=[100.0, 90.0, 80.0, 5.0])
    assert (verdict.accepted, verdict.abstained, dict(verdict.refused)) == ((0, 1, 2), (3,), {})
    assert verdict.member_count == 4
    assert verdict.abort_reason is None
    with pytest.raises(ValueError, match="work of 3 members"):
        judge_statistics(slice_statistics(SliceRows.of(rows)), work=[1.0, 1.0, 1.0])


def sparse_rows(count: int, seed: int = 0) -> torch.Tensor:
    """The 16 largest of 512 numbers with a weak common direction, as top-k leaves them: hardly two share a place."""
    rows = honest_rows(count, seed, common=0.5)
    kept = rows.abs().topk(16, dim=1).indices
    return torch.zeros_like(rows).scatter(1, kept, rows.gather(1, kept))


@pytest.mark.parametrize("count", range(3, 9))
def test_sparse_contributions_are_measured_against_their_mean(count: int) -> None:
    rows = sparse_rows(count, seed=count)
    total = slice_statistics(SliceRows.of(rows), is_sparse=True)
    mean = rows.double().mean(dim=0)
    assert total.center_dots == pytest.approx((rows.double() @ mean).tolist())
    assert total.center_squared_norm == pytest.approx(mean.square().sum().item())
    assert judge_statistics(total).accepted == tuple(range(count))


def test_a_sparse_contribution_against_the_others_is_refused() -> None:
    rows = sparse_rows(8)
    rows[3] = -3 * sparse_rows(8)[[0, 1, 2, 4, 5]].mean(dim=0)
    total = slice_statistics(SliceRows.of(rows), is_sparse=True)
    assert dict(judge_statistics(total).refused) == {3: RejectionReason.DIRECTION}
