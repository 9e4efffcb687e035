"""Aggregation rules: from the accepted contributions to one vector, decided for the whole vector, computed by slices.

Pure functions: the same numbers give the same bytes on every machine, with any kernels, any number of threads and
any division into slices. The rules on Gram matrices use g_ij = <x_i, x_j>; squared distances are g_ii + g_jj - 2
g_ij.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, fsum, sqrt
from statistics import median
from typing import TypeAlias, assert_never

import numpy as np
import torch
from torch import Tensor

from neuroshard.aggregation.gates import MAX_OTHERS_SHARE, Cluster, GateVerdict, MemberFacts, finds_near_copies
from neuroshard.aggregation.slice_statistics import MIN_ROBUST_MEMBERS, GramMatrix, SliceStatistics
from neuroshard.aggregation.slices import Doubles, Floats, SliceRows, middle_mean, weighted_middle_mean
from neuroshard.config.run_parameters import OuterOptimization
from neuroshard.errors import NeuroShardError


@dataclass(frozen=True)
class TrimmedMean:
    """Coordinate-wise mean without the extremes at either end."""

    trim_fraction: float = 0.1


@dataclass(frozen=True)
class Median:
    """The true coordinate-wise median."""


@dataclass(frozen=True)
class Mean:
    """The plain mean, weighted by declared work. It is not robust."""


@dataclass(frozen=True)
class Krum:
    """The mean of the contributions closest to most others: all except the number of liars that the run tolerates."""


@dataclass(frozen=True)
class CentredClipping:
    """A mean in which a row far from the center pulls no harder than one at the median distance."""


AggregatorConfig: TypeAlias = TrimmedMean | Median | Mean | Krum | CentredClipping


def aggregator_config(parameters: OuterOptimization) -> AggregatorConfig:
    """The aggregator named in a run's parameters."""
    match parameters.aggregator:
        case "trimmed_mean":
            return TrimmedMean(parameters.trim_fraction)
        case "median":
            return Median()
        case "mean":
            return Mean()
        case "krum":
            return Krum()
        case "centred_clipping":
            return CentredClipping()
        case _:
            assert_never(parameters.aggregator)


def aggregator_name(config: AggregatorConfig) -> str:
    """Name and settings. Members with different names exchange nothing."""
    match config:
        case TrimmedMean(trim_fraction):
            return f"trimmed_mean({float(trim_fraction)!r})"
        case Median():
            return "median"
        case Mean():
            return "mean"
        case Krum():
            return "krum"
        case CentredClipping():
            return "centred_clipping"
        case _:
            assert_never(config)


def needs_gram(config: AggregatorConfig, members: MemberFacts) -> bool:
    """Whether the dot products of the contributions with each other are needed: by the aggregator or by the gates."""
    return isinstance(config, Krum | CentredClipping) or finds_near_copies(members)


def trim_count(count: int, trim_fraction: float) -> int:
    """Number of values left out at either end of `count`: at least one from 3 on, never all.

    Raises ValueError for a fraction outside [0, 0.5).
    """
    if not 0 <= trim_fraction < 0.5:
        raise ValueError(f"trim_fraction must be in [0, 0.5), got {trim_fraction}")
    # 30 * 0.1 is slightly more than 3 in floating point
    return min(max(1, ceil(count * trim_fraction - 1e-9)), (count - 1) // 2)


CLIPPING_ITERATIONS = 10  # each costs n^2 multiplications


class TooFewContributionsError(NeuroShardError):
    """There are too few contributions for the guarantee of an aggregator."""


def fewest_for_krum(tolerated: int) -> int:
    """2 f + 3: with fewer contributions, f liars can be each other's nearest neighbours."""
    return 2 * tolerated + 3


def check_krum_count(count: int, tolerated: int) -> None:
    """Raise TooFewContributionsError unless count >= 2 f + 3, or there is one contribution, which needs no choice."""
    fewest = fewest_for_krum(tolerated)
    if 1 < count < fewest:
        raise TooFewContributionsError(
            f"Krum against {tolerated} wrong members needs {fewest} contributions, and there are {count}.",
            "Wait for more members, or ask the run's owner to choose the aggregator trimmed_mean.",
        )


def krum_order(gram: Sequence[Sequence[float]], tolerated: int) -> tuple[int, ...]:
    """Rows from the most to the least trusted: by the sum of squared distances to their n - f - 2 nearest others.

    Blanchard, El Mhamdi, Guerraoui and Stainer 2017. The first n - f are chosen (multi-Krum in their paper).
    Two rows that are each other's only neighbour have equal scores; then the shorter one comes first. Raises
    TooFewContributionsError if n < 2 f + 3 and n > 1.
    """
    count = len(gram)
    check_krum_count(count, tolerated)

    def score(row: int) -> float:
        return fsum(sorted(squared_distance(gram, row, other) for other in range(count) if other != row)[:neighbours])

    neighbours = max(0, count - tolerated - 2)
    return tuple(sorted(range(count), key=lambda row: (score(row), gram[row][row], row)))


def squared_distance(gram: Sequence[Sequence[float]], left: int, right: int) -> float:
    """|x_left - x_right|^2, never below zero."""
    return max(0.0, gram[left][left] + gram[right][right] - 2.0 * gram[left][right])


def centred_clipping_weights(gram: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Weights c of the center v = sum_i c_i x_i at which centred clipping arrives from zero.

    Karimireddy, He and Jaggi 2021: v <- v + 1/n sum_i (x_i - v) min(1, r / |x_i - v|). In every iteration the radius
    r is the median of the distances |x_i - v|, so that no run needs to know a scale beforehand: half of the vectors
    count unchanged, and a vector farther away pulls no harder than from the distance r.
    """
    count = len(gram)
    weights = [0.0] * count
    for _ in range(CLIPPING_ITERATIONS):
        distances = _distances(gram, weights)
        radius = median(distances)
        shares = [1.0 if distance <= radius else radius / distance for distance in distances]
        kept = 1.0 - fsum(shares) / count
        weights = [weight * kept + share / count for weight, share in zip(weights, shares, strict=True)]
    return tuple(weights)


def _distances(gram: Sequence[Sequence[float]], weights: list[float]) -> list[float]:
    """|x_i - v| for v = sum_j c_j x_j: its square is g_ii - 2 (g c)_i + c g c."""
    dots = [fsum(weight * value for weight, value in zip(weights, row, strict=True)) for row in gram]
    center = fsum(weight * dot for weight, dot in zip(weights, dots, strict=True))
    return [sqrt(max(0.0, row[i] - 2.0 * dots[i] + center)) for i, row in enumerate(gram)]


@dataclass(frozen=True)
class MiddleMean:
    """Coordinate-wise weighted mean of clusters of rows, without the `trim` lowest and highest of them.

    A cluster is the mean of the next `sizes` rows, each times its factor in fp32. The last `others` clusters are not
    trimmed: together they have the share `others_share`, and each of their numbers is moved into the range that
    trimming leaves, unless they are fewer than 3 that are trimmed.
    """

    rows: tuple[int, ...]
    factors: tuple[float, ...]  # exact in fp32
    sizes: tuple[int, ...]
    weights: tuple[float, ...]  # of the clusters
    trim: int
    others: int = 0
    others_share: float = 0.0

    @classmethod
    def of_equals(cls, count: int, trim: int) -> MiddleMean:
        """Return the reduction in which all rows have equal weights."""
        ones = (1.0,) * count
        return cls(tuple(range(count)), ones, (1,) * count, ones, trim)


@dataclass(frozen=True)
class WeightedSum:
    """The sum of the rows, each times its weight, over the divisor; in float64."""

    rows: tuple[int, ...]
    weights: tuple[float, ...]
    divisor: float


Reduction: TypeAlias = MiddleMean | WeightedSum


def reduction_by(
    config: AggregatorConfig, total: SliceStatistics, verdict: GateVerdict, *, tolerated: int = 0
) -> Reduction:
    """The computation of an aggregator on the contributions that a verdict accepted.

    `tolerated` is the number of liars that the run tolerates; Krum needs it, and counts refused members and copies
    among them. Members that are not established have at most an eighth of the weight together. Raises
    TooFewContributionsError if Krum's guarantee does not apply, and ValueError if nothing was accepted or the
    arguments differ in the number of contributions.
    """
    if verdict.abort_reason is not None:
        raise ValueError("a round without an accepted contribution is abandoned; there is nothing to reduce")
    if total.count != verdict.member_count:
        counts = sorted({total.count, verdict.member_count})
        raise ValueError(f"statistics and verdict are of {counts} contributions")
    established = [one for one in verdict.clusters if one.is_established]
    others = [one for one in verdict.clusters if not one.is_established]
    clusters, count = [*established, *others], len(established)
    match config:
        case TrimmedMean(trim_fraction):
            return _middle_mean(verdict, clusters, trim_count(count, trim_fraction))
        case Median():
            return _middle_mean(verdict, [replace(one, weight=1.0) for one in clusters], (count - 1) // 2)
        case Mean():
            weights = [one.weight for one in clusters]
            shares = [*weights[:count], *(weight * _scale(weights, count) for weight in weights[count:])]
            return _weighted_sum(verdict, clusters, shares, fsum(shares))
        case Krum():
            return _weighted_sum(verdict, clusters, _krum_weights(total, verdict, clusters, tolerated), 1.0)
        case CentredClipping():
            gram = _cluster_gram(total, verdict, clusters)
            center = centred_clipping_weights([row[:count] for row in gram[:count]])
            return _weighted_sum(verdict, clusters, _with_others(gram, center, clusters), 1.0)
        case _:
            assert_never(config)


def _middle_mean(verdict: GateVerdict, clusters: Sequence[Cluster], trim: int) -> MiddleMean:
    factors = dict(zip(verdict.accepted, verdict.clip_factors, strict=True))
    rows, weights = [row for one in clusters for row in one.rows], [one.weight for one in clusters]
    others = sum(not one.is_established for one in clusters)
    return MiddleMean(
        tuple(rows),
        tuple(factors[row] for row in rows),
        tuple(len(one.rows) for one in clusters),
        tuple(weights),
        trim,
        others,
        _others_share(weights, len(weights) - others),
    )


def _weighted_sum(
    verdict: GateVerdict, clusters: Sequence[Cluster], weights: Sequence[float], divisor: float
) -> WeightedSum:
    """By the weights of the clusters; zero weights are left out."""
    of_rows = {row: weight / len(one.rows) for one, weight in zip(clusters, weights, strict=True) for row in one.rows}
    kept = [
        (row, of_rows[row] * factor)
        for row, factor in zip(verdict.accepted, verdict.clip_factors, strict=True)
        if of_rows[row] != 0.0
    ]
    return WeightedSum(tuple(row for row, _ in kept), tuple(weight for _, weight in kept), divisor)


def _others_share(weights: Sequence[float], established: int) -> float:
    """Share of the weight of those after the first `established` ones."""
    others = fsum(weights[established:])
    return min(MAX_OTHERS_SHARE, others / fsum(weights)) if others > 0 else 0.0


def _scale(weights: Sequence[float], established: int) -> float:
    """Factor for the weights after the first `established` ones that limits them to their share."""
    share, others = _others_share(weights, established), fsum(weights[established:])
    return 0.0 if others == 0 else share / (1.0 - share) * fsum(weights[:established]) / others


def _krum_weights(
    total: SliceStatistics, verdict: GateVerdict, clusters: Sequence[Cluster], tolerated: int
) -> list[float]:
    count = sum(one.is_established for one in clusters)
    copies = sum(len(one.rows) - 1 for one in clusters if one.is_established)
    refused = len(verdict.refused.keys() - verdict.others)  # refused others are none of the tolerated liars
    check_krum_count(count + copies + refused, tolerated)
    left = max(0, tolerated - refused - copies)
    gram = _cluster_gram(total, verdict, clusters)
    chosen = krum_order([row[:count] for row in gram[:count]], left)[: max(1, count - left)]
    center = [1.0 / len(chosen) if place in chosen else 0.0 for place in range(count)]
    return _with_others(gram, center, clusters)


def _with_others(gram: GramMatrix, center: Sequence[float], clusters: Sequence[Cluster]) -> list[float]:
    """Weights of all clusters, from those of the established ones for a center.

    The others move the center by their share of the weight, and pull no harder than from the median distance of the
    established ones.
    """
    weights, count = [one.weight for one in clusters], len(center)
    share, all_others = _others_share(weights, count), fsum(weights[count:])
    if share == 0.0:
        return list(center)
    distances = _distances(gram, [*center, *(0.0 for _ in weights[count:])])
    radius = median(distances[:count])
    pulls = [
        share * weight / all_others * (1.0 if distance <= radius else radius / distance)
        for weight, distance in zip(weights[count:], distances[count:], strict=True)
    ]
    kept = 1.0 - fsum(pulls)
    return [*(kept * weight for weight in center), *pulls]


def reduce_slice(rows: SliceRows, reduction: Reduction, out: Tensor | None = None) -> Tensor:
    """The aggregate (length,) fp32 of a slice, in `out` if given, which may be the memory of one of the rows.

    It needs temporary memory for a few chunks, whatever the length. Raises ValueError for an unsuitable `out`.
    """
    result = torch.empty(rows.length) if out is None else out
    if result.shape != (rows.length,) or result.dtype != torch.float32 or result.device.type != "cpu":
        raise ValueError(f"the aggregate of this slice is fp32 of shape ({rows.length},) on the CPU")
    for start, chunk in rows.chunks(reduction.rows):
        part = result[start : start + chunk.shape[1]].numpy()
        np.copyto(part, _reduced(chunk.numpy(), reduction)[: part.shape[0]], casting="same_kind")
    return result


def _cluster_gram(total: SliceStatistics, verdict: GateVerdict, clusters: Sequence[Cluster]) -> GramMatrix:
    """Dot products of the means of the clusters with each other, after the clipping of their rows."""
    if total.gram is None:
        raise ValueError("this aggregator needs statistics with a Gram matrix")
    gram, factors = total.gram, dict(zip(verdict.accepted, verdict.clip_factors, strict=True))

    def product(left: Cluster, right: Cluster) -> float:
        dots = (gram[i][j] * (factors[i] * factors[j]) for i in left.rows for j in right.rows)
        return fsum(dots) / (len(left.rows) * len(right.rows))

    return tuple(tuple(product(left, right) for right in clusters) for left in clusters)


def _reduced(chunk: Floats, reduction: Reduction) -> Doubles:
    match reduction:
        case MiddleMean(factors=factors):
            for row, factor in zip(chunk, factors, strict=True):
                if factor != 1.0:
                    np.multiply(row, np.float32(factor), out=row)
            return _middle_of(_merged(chunk, reduction.sizes), reduction)
        case WeightedSum(weights=weights, divisor=divisor):
            total = _weighted(chunk, weights)
            return np.divide(total, divisor, out=total)
        case _:
            assert_never(reduction)


def _merged(chunk: Floats, sizes: Sequence[int]) -> Floats:
    """The means of consecutive rows, in the first rows of the chunk."""
    first = 0
    for place, size in enumerate(sizes):
        if size > 1:
            chunk[place] = _weighted(chunk[first : first + size], (1.0,) * size) / size
        elif first != place:
            chunk[place] = chunk[first]
        first += size
    return chunk[: len(sizes)]


def _middle_of(rows: Floats, reduction: MiddleMean) -> Doubles:
    """Overwrites the rows."""
    count, weights, trim = len(rows) - reduction.others, reduction.weights, reduction.trim
    if reduction.others == 0 and len(set(weights)) == 1:
        return middle_mean(rows, trim)
    middle, low, high = weighted_middle_mean(rows[:count], weights[:count], trim)
    if reduction.others == 0:
        return middle
    others = rows[count:]
    if count >= MIN_ROBUST_MEMBERS:
        np.clip(others, low, high, out=others)
    mean = _weighted(others, weights[count:]) / fsum(weights[count:])
    return middle * (1.0 - reduction.others_share) + mean * reduction.others_share


def _weighted(rows: Floats, weights: Sequence[float]) -> Doubles:
    """The sum (d,) of the rows, each times its weight."""
    total, weighted = np.zeros(rows.shape[1]), np.empty(rows.shape[1])
    for row, weight in zip(rows, weights, strict=True):
        np.copyto(weighted, row)
        np.add(total, np.multiply(weighted, weight, out=weighted), out=total)
    return total
