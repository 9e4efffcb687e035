"""The gates before an aggregate: the whole contributions that are accepted, the clipping of each, and its weight.

Pure functions of statistics of the contributions: all members with the same statistics reach the same verdict.
Earlier checks decide which members may contribute (well-formed, signed, one per wallet).

All medians and deviations are those of the established members. The others are judged against them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import sqrt
from statistics import median, median_low

import numpy as np

from neuroshard.aggregation.slice_statistics import MIN_ROBUST_MEMBERS, GramMatrix, SliceStatistics

MAX_WEIGHT_RATIO = 2.0  # relative to the median declared weight
MIN_WORK_RATIO = 0.25  # relative to the median declared work
MOST_WORK = 2.0**53  # tokens; a larger claim counts as no work
MAX_OTHERS_SHARE = 0.125  # of the weight, of all members together that are not established
MIN_NORM_RATIO, MAX_NORM_RATIO = 0.1, 10.0
MIN_CLUSTERED_MEMBERS = 8  # established; with fewer the deviation of their cosines says little
NEAR_COPY_DEVIATIONS = 6.0


class RejectionReason(StrEnum):
    """The reason why a contribution was refused, in words for the owner."""

    NOT_FINITE = "it contains numbers that are not finite"
    ZERO = "it is zero"
    NORM = "its norm is far from the median norm"
    DIRECTION = "its direction disagrees with the majority"


@dataclass(frozen=True)
class MemberFacts:
    """The facts about the members of a round that are not in their contributions, by row number.

    Raises ValueError if the fields are of different numbers of members.
    """

    work: tuple[float, ...]  # declared tokens or sequences since the last round
    established: tuple[bool, ...]  # the others change no median and have an eighth of the weight
    originals: tuple[int, ...]  # the first row with the same bytes, which is the row itself if it is not a copy
    are_friends: bool = False  # then no norm is too large, no near-copies are searched, and nobody abstains

    def __post_init__(self) -> None:
        count = len(self.work)
        if len(self.established) != count or len(self.originals) != count:
            raise ValueError(f"work, established and originals must be of the same {count} members")
        if any(not 0 <= first <= row or self.originals[first] != first for row, first in enumerate(self.originals)):
            raise ValueError(f"an original is the first row with the same bytes, got {self.originals}")

    @property
    def counted(self) -> tuple[bool, ...]:
        """Whether medians cover the row: it is established, and no copy of another row that is."""
        counted, seen = list[bool](), set[int]()
        for is_established, original in zip(self.established, self.originals, strict=True):
            counted.append(is_established and original not in seen)
            if is_established:
                seen.add(original)
        return tuple(counted)

    @classmethod
    def of_equals(cls, count: int, *, are_friends: bool = False) -> MemberFacts:
        """`count` established members with equal work and different contributions."""
        return cls((1.0,) * count, (True,) * count, tuple(range(count)), are_friends)


@dataclass(frozen=True)
class Cluster:
    """Accepted contributions that count as one member: a single one, or copies and near-copies of each other."""

    rows: tuple[int, ...]
    weight: float = 1.0
    is_established: bool = True


@dataclass(frozen=True)
class GateVerdict:
    """The result of the gates for n contributions, by row number.

    `robust` is False if fewer than 3 different established contributions are finite and not zero: then the result
    has no protection from a wrong member.
    """

    accepted: tuple[int, ...]
    refused: Mapping[int, RejectionReason]
    clip_factors: tuple[float, ...]  # of the accepted rows, in (0, 1], exact in fp32
    clusters: tuple[Cluster, ...]  # the accepted rows, each in one cluster
    robust: bool
    abstained: tuple[int, ...] = ()  # rows with too little work to count, which are not judged
    others: frozenset[int] = frozenset()  # rows that are not established

    @property
    def member_count(self) -> int:
        """Number of contributions in the round."""
        return len(self.accepted) + len(self.refused) + len(self.abstained)

    @property
    def abort_reason(self) -> str | None:
        """The reason why there is no step, or None."""
        if any(cluster.is_established for cluster in self.clusters):
            return None
        reasons = ", ".join(sorted(set(self.refused.values()))) or "no established member has contributed"
        return f"no contribution was accepted: {reasons}"


def capped_weights(declared: Sequence[float], established: Sequence[bool]) -> tuple[float, ...]:
    """Weights of the contributions: at most twice the (lower) median of the established members that did any work.

    Work is self-declared. A value that is not finite, negative or beyond 2^53 counts as none. If no established
    member did any work, all weights are equal.
    """
    work, middle = _believed(declared, established)
    return (1.0,) * len(work) if middle == 0 else tuple(min(amount, MAX_WEIGHT_RATIO * middle) for amount in work)


def abstaining(declared: Sequence[float], established: Sequence[bool], *, are_friends: bool = False) -> tuple[int, ...]:
    """Row numbers of members with less than a quarter of the (lower) median work of the established that did any.

    Their contributions would be mostly noise. Among friends only a member without any work abstains. If no
    established member did any work, none abstains.
    """
    work, middle = _believed(declared, established)
    if middle == 0:
        return ()
    fewest = 0.0 if are_friends else MIN_WORK_RATIO * middle
    return tuple(row for row, amount in enumerate(work) if amount < fewest or amount == 0)


def _believed(declared: Sequence[float], established: Sequence[bool]) -> tuple[list[float], float]:
    """The work that counts, and the median of the established members that did any; zero if none did."""
    work = [amount if 0 < amount <= MOST_WORK else 0.0 for amount in declared]  # both comparisons are false for NaN
    done = [amount for amount, is_established in zip(work, established, strict=True) if amount > 0 and is_established]
    return work, median_low(done) if done else 0.0


def judge_statistics(
    total: SliceStatistics, members: MemberFacts | None = None, *, judges_direction: bool = True
) -> GateVerdict:
    """Verdict over n contributions from the statistics of the whole vector, by the gates in their order.

    Without `members` all are established, with equal work and different contributions. The gates: finite; not zero;
    norm within [0.1, 10] of the median norm; cosine with the center above max(0, half the median cosine), for a member
    with less than the median work times the root of its share of that work; then clipping to the median norm, and
    copies and near-copies count as one member. A median covers the counted rows
    (`MemberFacts.counted`) that passed the gates before. Only the center covers all of them, because it is computed
    before any is judged. With fewer than 3 such rows there is no majority for norm and direction: nothing is refused
    for them and nothing is clipped. Without `judges_direction` the gates before that one apply, and nothing is clipped
    either: it would refuse most gradients of single steps, which are mostly noise. Among friends there is no upper
    bound for a norm that is clipped afterwards. Raises ValueError for another number of members, and if near-copies
    must be found without a Gram matrix.
    """
    members = MemberFacts.of_equals(total.count) if members is None else members
    if len(members.work) != total.count:
        raise ValueError(f"work of {len(members.work)} members for {total.count} contributions")
    abstained = abstaining(members.work, members.established, are_friends=members.are_friends)
    counted = members.counted
    refused, norms = dict[int, RejectionReason](), dict[int, float]()  # norms of the rows that are not refused yet
    for row, square in enumerate(total.squared_norms):
        if row in abstained:
            continue
        if not total.finite[row]:
            refused[row] = RejectionReason.NOT_FINITE
        elif square == 0.0:
            refused[row] = RejectionReason.ZERO
        else:
            norms[row] = sqrt(square)
    judges = [norm for row, norm in norms.items() if counted[row]]
    is_robust, median_norm = len(judges) >= MIN_ROBUST_MEMBERS, 0.0
    if is_robust:
        median_norm = median(judges)
        has_largest = not (members.are_friends and judges_direction)
        largest = MAX_NORM_RATIO * median_norm if has_largest else float("inf")
        for row, norm in list(norms.items()):
            if not MIN_NORM_RATIO * median_norm <= norm <= largest:
                refused[row] = RejectionReason.NORM
                del norms[row]
        if judges_direction:
            _refuse_directions(total, members, norms, refused)
    accepted, is_clipped = tuple(norms), is_robust and judges_direction
    factors = tuple(_fp32(min(1.0, median_norm / norm)) if is_clipped else 1.0 for norm in norms.values())
    clusters = _clusters(total, members, accepted)
    others = frozenset(row for row, is_established in enumerate(members.established) if not is_established)
    return GateVerdict(accepted, refused, factors, clusters, is_robust, abstained, others)


def _refuse_directions(
    total: SliceStatistics, members: MemberFacts, norms: dict[int, float], refused: dict[int, RejectionReason]
) -> None:
    """Move the rows whose direction disagrees from `norms` to `refused`."""
    center_norm = sqrt(total.center_squared_norm)
    cosines = {
        row: total.center_dots[row] / (norm * center_norm) if center_norm > 0 else 0.0 for row, norm in norms.items()
    }
    counted = members.counted
    judges = [row for row in cosines if counted[row]]
    if not judges:
        return
    # the cosine between honest members is only 0.2-0.3 after the first round, so the bound follows the median
    middle = median(cosines[row] for row in judges)
    bound, bound_of_others = max(0.0, 0.5 * middle), max(0.0, 0.5 * _cosine_of_others(middle, len(judges)))
    work, typical = _believed(members.work, members.established)
    for row, cosine in cosines.items():
        # noise grows with the root of the work and the common part with the work; so does the weight that a liar gets
        share = min(1.0, work[row] / typical) if typical > 0 else 1.0
        if not cosine > sqrt(share) * (bound if members.established[row] else bound_of_others):
            refused[row] = RejectionReason.DIRECTION
            del norms[row]


def _cosine_of_others(cosine: float, count: int) -> float:
    """Cosine of an honest row with the mean of `count` rows to which it does not belong, from that of one of these.

    If the cosine of each pair is c, it is sqrt((1 + (count - 1) c) / count) for a row that is part of the mean, and
    c over this root for another one. With four rows and c = 0.2 these are 0.63 and 0.32.
    """
    return 0.0 if cosine <= 0 else (count * cosine**2 - 1.0) / ((count - 1) * cosine)


def finds_near_copies(members: MemberFacts) -> bool:
    """Whether near-copies count as one among these members. It needs their Gram matrix."""
    return not members.are_friends and sum(members.counted) >= MIN_CLUSTERED_MEMBERS


def _clusters(total: SliceStatistics, members: MemberFacts, accepted: Sequence[int]) -> tuple[Cluster, ...]:
    """Copies form a cluster, and near-copies too if they are searched.

    A cluster weighs as much as its heaviest row: a liar that copies a member cannot make its contribution count less
    than alone. Members that are not established form clusters of their own.
    """
    weights = capped_weights(members.work, members.established)
    copies, clusters = defaultdict[tuple[bool, int], list[int]](list), list[Cluster]()
    for row in accepted:
        copies[members.established[row], members.originals[row]].append(row)
    groups = list(copies.values())
    if finds_near_copies(members):
        if total.gram is None:
            raise ValueError("near-copies are found in the Gram matrix, which these statistics do not contain")
        by_first = {rows[0]: rows for rows in groups}
        firsts = [row for row in by_first if members.established[row]]
        for near in near_copies(total.gram, firsts):
            by_first[near[0]] = sorted(row for first in near for row in by_first.pop(first))
        groups = list(by_first.values())
    for rows in sorted(groups):
        weight = max(map(weights.__getitem__, rows))
        clusters.append(Cluster(tuple(rows), weight, members.established[rows[0]]))
    return tuple(clusters)


def near_copies(gram: GramMatrix, rows: Sequence[int]) -> list[tuple[int, ...]]:
    """The clusters of two and more of these rows by complete linkage: all pairs in a cluster are near-copies.

    The cosine of near-copies is above max(m + 6 d, (1 + m) / 2), where m is the median cosine of the pairs of rows
    and d the median deviation from it. Complete linkage prevents a liar between two honest rows from joining them.
    """
    cosines = {
        (left, right): gram[left][right] / sqrt(gram[left][left] * gram[right][right])
        for place, left in enumerate(rows)
        for right in rows[place + 1 :]
    }
    if not cosines:
        return []
    middle = median(cosines.values())
    deviation = median(abs(cosine - middle) for cosine in cosines.values())
    bound = max(middle + NEAR_COPY_DEVIATIONS * deviation, (1.0 + middle) / 2)

    def linkage(pair: tuple[tuple[int, ...], tuple[int, ...]]) -> float:
        return min(cosines[min(one, other), max(one, other)] for one in pair[0] for other in pair[1])

    clusters: list[tuple[int, ...]] = [(row,) for row in rows]
    while len(clusters) > 1:
        pairs = [(one, other) for place, one in enumerate(clusters) for other in clusters[place + 1 :]]
        closest = max(pairs, key=linkage)  # the first one of equals
        if not linkage(closest) > bound:
            break
        clusters = sorted([*(one for one in clusters if one not in closest), tuple(sorted(closest[0] + closest[1]))])
    return [cluster for cluster in clusters if len(cluster) > 1]


def _fp32(value: float) -> float:
    """The nearest fp32 number: contributions are multiplied in fp32."""
    return float(np.float32(value))
