"""The gates before an aggregate: the whole contributions that are accepted, the clipping of each, and its weight.

Pure functions of statistics of the contributions: all members with the same statistics reach the same verdict.
Earlier checks decide which members may contribute (well-formed, signed, one per wallet).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import sqrt
from statistics import median, median_low

import numpy as np

from neuroshard.aggregation.slice_statistics import MIN_ROBUST_MEMBERS, SliceStatistics

MAX_WEIGHT_RATIO = 2.0  # relative to the median declared weight
MIN_WORK_RATIO = 0.25  # relative to the median declared work
MOST_WORK = 2.0**53  # tokens; a larger claim counts as no work


def capped_weights(declared: Sequence[float]) -> tuple[float, ...]:
    """Weights of the contributions: at most twice the (lower) median of the members that did any work.

    Work is self-declared. A value that is not finite, negative or beyond 2^53 counts as none. If no member did any
    work, all weights are equal.
    """
    work = _believed(declared)
    done = [amount for amount in work if amount > 0]
    if not done:
        return (1.0,) * len(work)
    cap = MAX_WEIGHT_RATIO * median_low(done)
    return tuple(min(amount, cap) for amount in work)


def abstaining(declared: Sequence[float]) -> tuple[int, ...]:
    """Row numbers of members with less than a quarter of the (lower) median work of those that did any.

    Their contributions would be mostly noise. If no member did any work, none abstains.
    """
    work = _believed(declared)
    done = [amount for amount in work if amount > 0]
    fewest = MIN_WORK_RATIO * median_low(done) if done else 0.0
    return tuple(i for i, amount in enumerate(work) if amount < fewest)


def _believed(declared: Sequence[float]) -> list[float]:
    return [amount if 0 < amount <= MOST_WORK else 0.0 for amount in declared]  # both comparisons are false for NaN


MIN_NORM_RATIO, MAX_NORM_RATIO = 0.1, 10.0


class RejectionReason(StrEnum):
    """The reason why a contribution was refused, in words for the owner."""

    NOT_FINITE = "it contains numbers that are not finite"
    ZERO = "it is zero"
    COPY = "it is a copy of another member's"
    NORM = "its norm is far from the median norm"
    DIRECTION = "its direction disagrees with the majority"


@dataclass(frozen=True)
class GateVerdict:
    """The result of the gates for n contributions, by row number.

    `robust` is False for fewer than 3 contributions: then the result has no protection from a wrong member.
    """

    accepted: tuple[int, ...]
    refused: Mapping[int, RejectionReason]
    clip_factors: tuple[float, ...]  # of the accepted rows, in (0, 1], exact in fp32
    robust: bool
    abstained: tuple[int, ...] = ()  # rows with too little work to count, which are not judged

    @property
    def member_count(self) -> int:
        """Number of contributions in the round."""
        return self.judged_count + len(self.abstained)

    @property
    def judged_count(self) -> int:
        """Number of contributions that count."""
        return len(self.accepted) + len(self.refused)

    @property
    def abort_reason(self) -> str | None:
        """The reason why the round must be abandoned, or None."""
        limit = max_refused(self.judged_count)
        if not self.accepted:
            return f"no contribution was accepted: {', '.join(sorted(set(self.refused.values())))}"
        if len(self.refused) > limit:
            return f"{len(self.refused)} of {self.judged_count} contributions were refused, at most {limit} may be"
        return None


def max_refused(members: int) -> int:
    """floor((n - 1) / 3): with more refused members, the majority itself is in doubt."""
    return (members - 1) // 3


def judge_statistics(
    total: SliceStatistics,
    copies: Collection[int] = (),
    work: Sequence[float] | None = None,
    *,
    judges_direction: bool = True,
) -> GateVerdict:
    """Verdict over n contributions from the statistics of the whole vector, by the gates in their order.

    The gates: finite; not zero; not a copy; norm within [0.1, 10] of the median norm; cosine with the center above
    max(0, half the median cosine); then clipping to the median norm. A median covers the rows that passed the gates
    before. Only the center covers all rows, because it is computed before any is judged. `copies` names the rows
    that equal an earlier one; the earlier one stays, because the bytes do not show which member copied. With fewer
    than 3 contributions there is no majority for norm and direction: only the first three gates apply, and nothing
    is clipped. Without `judges_direction` the gates before that one apply, and nothing is clipped either: it would
    refuse most gradients of single steps, which are mostly noise. By `work`, each member's declared work, some
    members abstain: see `abstaining`. Raises ValueError for a copy that is not a row, or for work of another number
    of members.
    """
    if work is not None and len(work) != total.count:
        raise ValueError(f"work of {len(work)} members for {total.count} contributions")
    if not all(0 <= row < total.count for row in copies):
        raise ValueError(f"copies are rows below {total.count}, got {sorted(copies)}")
    abstained = () if work is None else abstaining(work)
    norms = {row: sqrt(square) for row, square in enumerate(total.squared_norms) if row not in abstained}
    refused = _broken(total, copies, norms.keys())
    robust = len(norms) >= MIN_ROBUST_MEMBERS
    left = _left(norms, refused)
    if not robust or not left:
        return GateVerdict(left, refused, (1.0,) * len(left), robust, abstained)
    median_norm = median(norms[i] for i in left)
    for i in left:
        if not MIN_NORM_RATIO * median_norm <= norms[i] <= MAX_NORM_RATIO * median_norm:
            refused[i] = RejectionReason.NORM
    if not judges_direction:
        left = _left(norms, refused)
        return GateVerdict(left, refused, (1.0,) * len(left), robust, abstained)
    _refuse_directions(total, norms, refused)
    accepted = _left(norms, refused)
    factors = tuple(_fp32(min(1.0, median_norm / norms[i])) for i in accepted)
    return GateVerdict(accepted, refused, factors, robust, abstained)


def _broken(total: SliceStatistics, copies: Collection[int], rows: Iterable[int]) -> dict[int, RejectionReason]:
    refused: dict[int, RejectionReason] = {}
    for i in rows:
        if not total.finite[i]:
            refused[i] = RejectionReason.NOT_FINITE
        elif total.squared_norms[i] == 0.0:
            refused[i] = RejectionReason.ZERO
        elif i in copies:
            refused[i] = RejectionReason.COPY
    return refused


def _refuse_directions(total: SliceStatistics, norms: Mapping[int, float], refused: dict[int, RejectionReason]) -> None:
    left = _left(norms, refused)
    if not left:
        return
    center_norm = sqrt(total.center_squared_norm)
    # the cosine between honest members is only 0.2-0.3 after the first round, so the bound follows the median
    cosines = {i: total.center_dots[i] / (norms[i] * center_norm) if center_norm > 0 else 0.0 for i in left}
    bound = max(0.0, 0.5 * median(cosines.values()))
    for i, cosine in cosines.items():
        if not cosine > bound:
            refused[i] = RejectionReason.DIRECTION


def _fp32(value: float) -> float:
    """The nearest fp32 number: contributions are multiplied in fp32."""
    return float(np.float32(value))


def _left(norms: Mapping[int, float], refused: Mapping[int, RejectionReason]) -> tuple[int, ...]:
    return tuple(i for i in norms if i not in refused)
