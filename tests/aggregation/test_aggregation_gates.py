from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from neuroshard.aggregation import (
    GateVerdict,
    Mean,
    MemberFacts,
    RejectionReason,
    SliceRows,
    abstaining,
    judge_statistics,
    slice_statistics,
)
from tests.worlds.contributions import aggregated, facts_of, judge

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


def test_zero_norms_and_directions_are_refused_each_with_its_reason() -> None:
    rows = honest_rows(17)
    rows[1] = 0
    rows[6] *= 12
    rows[8] *= 0.05
    rows[10] *= -1
    verdict = judge(rows)
    assert dict(verdict.refused) == {
        1: RejectionReason.ZERO,
        6: RejectionReason.NORM,
        8: RejectionReason.NORM,
        10: RejectionReason.DIRECTION,
    }
    assert verdict.abort_reason is None


@pytest.mark.parametrize("are_friends", [True, False])
def test_one_peer_counted_five_times_counts_once(are_friends: bool) -> None:
    """And none of them is refused: the bytes do not show which member copied."""
    rows = honest_rows(7)
    rows[3:7] = rows[0]
    verdict = judge(rows, are_friends=are_friends)
    assert verdict.accepted == tuple(range(7))
    assert [one.rows for one in verdict.clusters] == [(0, 3, 4, 5, 6), (1,), (2,)]
    assert {one.weight for one in verdict.clusters} == {1.0}
    alone = judge(rows[:3], are_friends=are_friends)
    factors = torch.tensor(verdict.clip_factors)[:3, None]
    torch.testing.assert_close(aggregated(rows, Mean(), verdict=verdict), (rows[:3] * factors).mean(dim=0))
    assert alone.accepted == (0, 1, 2)


def test_a_random_direction_is_refused_among_members_that_agree() -> None:
    rows = honest_rows(7, common=2.0)
    rows[3] = torch.randn(LENGTH, generator=torch.Generator().manual_seed(99)) * rows[0].norm() / LENGTH**0.5
    assert judge(rows).refused == {3: RejectionReason.DIRECTION}


def of_steps(steps: tuple[int, ...], seed: int, noise: float = 10.0) -> torch.Tensor:
    """Contributions of so many inner steps each: every step adds the common direction and noise of its own."""
    generator = torch.Generator().manual_seed(seed)
    direction = torch.randn(LENGTH, generator=generator)
    return torch.stack(
        [number * direction + noise * number**0.5 * torch.randn(LENGTH, generator=generator) for number in steps]
    )


@pytest.mark.parametrize("are_friends", [True, False])
@pytest.mark.parametrize("steps", [(12, 8, 1), (16, 16, 16, 5), (20, 12, 16, 16, 4)])
def test_a_slow_honest_member_is_not_refused_for_the_noise_of_few_steps(
    steps: tuple[int, ...], *, are_friends: bool
) -> None:
    for seed in range(20):
        rows = of_steps(steps, seed)
        work = tuple(float(number) for number in steps)
        facts = replace(MemberFacts.of_equals(len(steps), are_friends=are_friends), work=work)
        verdict = judge_statistics(slice_statistics(SliceRows.of(rows)), facts)
        assert verdict.refused == {}


@pytest.mark.parametrize("work", [1.0, 4.0, 16.0])
def test_who_declares_little_work_may_not_turn_against_the_others(work: float) -> None:
    rows = of_steps((16, 16, 16, 16), 1, noise=3.0)
    rows[3] *= -1
    facts = replace(MemberFacts.of_equals(4, are_friends=True), work=(16.0, 16.0, 16.0, work))
    assert judge_statistics(slice_statistics(SliceRows.of(rows)), facts).refused == {3: RejectionReason.DIRECTION}


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


@pytest.mark.parametrize("are_friends", [True, False])
def test_without_directions_the_other_gates_apply_and_nothing_is_clipped(are_friends: bool) -> None:
    """So gradients of single steps are judged, and among friends no norm is too large that is clipped anyway."""
    rows = honest_rows(9)
    rows[2] *= 3
    rows[4] *= -1
    rows[5] = 0
    rows[6] *= 12
    statistics = slice_statistics(SliceRows.of(rows), with_gram=True)
    verdict = judge_statistics(statistics, MemberFacts.of_equals(9, are_friends=are_friends), judges_direction=False)
    assert dict(verdict.refused) == {5: RejectionReason.ZERO, 6: RejectionReason.NORM}
    assert set(verdict.clip_factors) == {1.0}
    assert RejectionReason.DIRECTION in judge_statistics(statistics).refused.values()


def test_medians_cover_the_established_and_each_copy_once() -> None:
    assert MemberFacts.of_equals(3).counted == (True,) * 3
    facts = MemberFacts((1.0,) * 5, (False, True, True, True, False), (0, 0, 2, 2, 2))
    assert facts.counted == (False, True, True, False, False)  # the first row with these bytes changes no median


def test_facts_of_other_numbers_of_members_are_refused() -> None:
    total = slice_statistics(SliceRows.of(honest_rows(5)))
    with pytest.raises(ValueError, match="work of 4 members for 5"):
        judge_statistics(total, MemberFacts.of_equals(4))
    with pytest.raises(ValueError, match="same 2 members"):
        MemberFacts((1.0, 1.0), (True,), (0, 1))
    for originals in ((0, 2, 2), (0, 0, 1), (-1, 1, 2)):
        with pytest.raises(ValueError, match="first row"):
            MemberFacts((1.0,) * 3, (True,) * 3, originals)
    with pytest.raises(ValueError, match="Gram"):
        judge_statistics(slice_statistics(SliceRows.of(honest_rows(8))))


def test_any_number_of_refusals_leaves_a_step_while_one_is_accepted() -> None:
    rows = honest_rows(7)
    rows[0] = rows[1] = 0
    rows[2] = math.nan
    rows[3] *= -1
    verdict = judge(rows)
    assert (verdict.accepted, len(verdict.refused)) == ((4, 5, 6), 4)
    assert verdict.abort_reason is None


def test_among_friends_long_solo_work_counts_clipped() -> None:
    rows = honest_rows(5)
    rows[1] *= 200
    assert judge(rows).refused == {1: RejectionReason.NORM}
    verdict = judge(rows, are_friends=True)
    assert verdict.accepted == (0, 1, 2, 3, 4)
    assert 0.003 < verdict.clip_factors[1] < 0.008
    rows[1] /= 200 * 50
    assert judge(rows, are_friends=True).refused == {1: RejectionReason.NORM}  # too short to count


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
    assert judge(rows).accepted == (0,)


def test_opposed_members_around_a_zero_median_abort() -> None:
    rows = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
    assert judge(rows).abort_reason is not None


def test_other_types_are_refused() -> None:
    with pytest.raises(ValueError, match="fp32"):
        judge(torch.zeros(2, 3, dtype=torch.float64))
    with pytest.raises(ValueError, match="fp32"):
        judge(torch.zeros(0, 3))


def judged(rows: torch.Tensor, facts: MemberFacts) -> GateVerdict:
    return judge_statistics(slice_statistics(SliceRows.of(rows), with_gram=True, established=facts.counted), facts)


def test_who_did_too_little_work_is_neither_accepted_nor_refused() -> None:
    rows = honest_rows(4)
    rows[3] *= 1e6  # it would be refused
    verdict = judged(rows, replace(MemberFacts.of_equals(4), work=(100.0, 90.0, 80.0, 5.0)))
    assert (verdict.accepted, verdict.abstained, dict(verdict.refused)) == ((0, 1, 2), (3,), {})
    assert [one.weight for one in verdict.clusters] == [100.0, 90.0, 80.0]
    assert verdict.member_count == 4
    assert verdict.abort_reason is None


@pytest.mark.parametrize(
    ("work", "among_strangers", "among_friends"),
    [
        ([], (), ()),
        ([0.0, 0.0], (), ()),
        ([100.0, 25.0, 100.0], (), ()),
        ([100.0, 24.0, 100.0], (1,), ()),
        ([100.0, -5.0, float("nan"), 100.0, 100.0, float("inf")], (1, 2, 5), (1, 2, 5)),
        ([1e9, 100.0, 100.0], (), ()),  # a boast does not make the others abstain
    ],
)
def test_less_than_a_quarter_of_the_median_work_abstains(
    work: list[float], among_strangers: tuple[int, ...], among_friends: tuple[int, ...]
) -> None:
    everybody = [True] * len(work)
    assert abstaining(work, everybody) == among_strangers
    assert abstaining(work, everybody, are_friends=True) == among_friends


def test_the_work_of_others_makes_no_established_member_abstain() -> None:
    assert abstaining([100.0, 30.0, 1e6, 1e6, 1e6, 1.0], [True, True, *[False] * 4]) == (5,)


with_others = pytest.mark.parametrize("count", [3, 4, 5, 8, 12])


@with_others
def test_any_number_of_others_changes_no_verdict_on_the_established(count: int) -> None:
    rows, crowd = honest_rows(count, seed=count), 3 * count
    lies = -20 * rows.mean(dim=0) + torch.randn(crowd, LENGTH, generator=torch.Generator().manual_seed(7))
    alone = judge(rows)
    facts = MemberFacts((1.0,) * count + (1e6,) * crowd, (True,) * count + (False,) * crowd, tuple(range(4 * count)))
    verdict = judged(torch.cat([rows, lies]), facts)
    assert verdict.accepted == alone.accepted
    assert verdict.clip_factors == alone.clip_factors
    assert verdict.clusters == alone.clusters
    assert set(verdict.refused) == set(range(count, 4 * count))


@with_others
@pytest.mark.parametrize("common", [0.5, 1.0])  # mutual cosines of 0.2 and 0.5
def test_honest_others_are_accepted(count: int, common: float) -> None:
    """The center contains the established rows and not theirs, so their cosines with it are lower."""
    for seed in range(20):
        rows = honest_rows(count + 2, seed=seed, common=common)
        facts = replace(MemberFacts.of_equals(count + 2), established=(True,) * count + (False,) * 2)
        assert not judged(rows, facts).refused


def test_a_step_needs_an_established_contribution() -> None:
    rows = honest_rows(4)
    rows[0] = math.nan
    facts = replace(MemberFacts.of_equals(4), established=(True, False, False, False))
    assert "no contribution was accepted" in str(judged(rows, facts).abort_reason)
    facts = replace(facts, established=(False,) * 4)
    assert "no established member has contributed" in str(judged(honest_rows(4), facts).abort_reason)


def mimics(rows: torch.Tensor, target: int, liars: int, noise: float) -> torch.Tensor:
    """The rows with the last ones replaced by one row plus noise of this share of its norm."""
    generator = torch.Generator().manual_seed(3)
    result, scale = rows.clone(), noise * rows[target].norm() / LENGTH**0.5
    result[-liars:] = rows[target] + scale * torch.randn(liars, LENGTH, generator=generator)
    return result


@pytest.mark.parametrize("common", [0.55, 1.0, 3.0])
@pytest.mark.parametrize("count", [8, 16, 33])
def test_near_copies_count_as_one_and_no_honest_member_does(count: int, common: float) -> None:
    rows, liars = honest_rows(count, seed=count, common=common), count // 4
    assert all(len(one.rows) == 1 for one in judge(rows).clusters)
    verdict = judge(mimics(rows, 0, liars, 0.01))
    assert verdict.accepted == tuple(range(count))
    assert [one.rows for one in verdict.clusters if len(one.rows) > 1] == [(0, *range(count - liars, count))]
    assert {one.weight for one in verdict.clusters} == {1.0}
    friends = judge(mimics(rows, 0, liars, 0.01), are_friends=True)
    assert all(len(one.rows) == 1 for one in friends.clusters)


def test_fewer_than_eight_form_no_clusters_of_near_copies() -> None:
    verdict = judge(mimics(honest_rows(7), 0, 1, 0.01))
    assert all(len(one.rows) == 1 for one in verdict.clusters)


def test_a_liar_between_two_honest_members_joins_at_most_one_of_them() -> None:
    rows = honest_rows(12)
    rows[11] = (rows[0] + rows[1]) / 2  # a cosine of 0.87 with both, and 0.5 between these
    verdict = judge(rows)
    (shared,) = (one.rows for one in verdict.clusters if len(one.rows) > 1)
    assert shared in {(0, 11), (1, 11)}


@pytest.mark.parametrize("declared", [0.3, 1.0, 1e9])
@pytest.mark.parametrize("noise", [0.01, 0.3, 0.45])
def test_near_copies_make_the_copied_member_weigh_no_less(noise: float, declared: float) -> None:
    """Not by what they declare either. The shared contribution is the copied one, up to the noise of the copies."""
    rows = mimics(honest_rows(16), 0, 4, noise)
    rows[12:] *= rows[0].norm() / rows[12:].norm(dim=1, keepdim=True)
    verdict = judged(rows, replace(facts_of(rows), work=(1.0,) * 12 + (declared,) * 4))
    (shared,) = (one for one in verdict.clusters if 0 in one.rows)
    assert shared.rows == (0, 12, 13, 14, 15)
    assert shared.weight >= 1.0
    assert all(one.weight == 1.0 for one in verdict.clusters if one != shared)
    merged = rows[list(shared.rows)].mean(dim=0)
    assert torch.nn.functional.cosine_similarity(merged, rows[0], dim=0) > 0.95


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
    assert judge_statistics(total, MemberFacts.of_equals(count, are_friends=True)).accepted == tuple(range(count))


def test_a_sparse_contribution_against_the_others_is_refused() -> None:
    rows = sparse_rows(8)
    rows[3] = -3 * sparse_rows(8)[[0, 1, 2, 4, 5]].mean(dim=0)
    total = slice_statistics(SliceRows.of(rows), is_sparse=True)
    verdict = judge_statistics(total, MemberFacts.of_equals(8, are_friends=True))
    assert dict(verdict.refused) == {3: RejectionReason.DIRECTION}
