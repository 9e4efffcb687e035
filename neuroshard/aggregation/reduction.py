"""Aggregation rules: from the accepted contributions to one vector, decided for the whole vector, computed by slices.

Pure functions: the same numbers give the same bytes on every machine, with any kernels, any number of threads and
any division into slices. The rules on Gram matrices use g_ij = <x_i, x_j>; squared distances are g_ii + g_jj - 2
g_ij.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, fsum, sqrt
from statistics import median
from typing import TypeAlias, assert_never

import numpy as np
import torch
from torch import Tensor

from neuroshard.aggregation.gates import GateVerdict, capped_weights
from neuroshard.aggregation.slice_statistics import GramMatrix, SliceStatistics
from neuroshard.aggregation.slices import Doubles, Floats, SliceRows, middle_mean
from neuroshard.config.run_parameters import OuterOptimization
from neuroshard.errors import NeuroShardError


@dataclass(frozen=True)
class TrimmedMean:
    """Coordinate-wise mean without the extremes at either end."""

    trim_fraction: float = 0.1

    def __post_init__(self) -> None:
        trim_count(1, self.trim_fraction)


@dataclass(frozen=True)
class Median:
    """The true coordinate-wise median."""


@dataclass(frozen=True)
class Mean:
    """The plain mean, weighted by declared work. It is not robust."""


@dataclass(frozen=True)
class Krum:
    """The one contribution that is closest to most others."""


@dataclass(frozen=True)
class MultiKrum:
    """The mean of the contributions closest to most others: all except the number of liars that the run tolerates."""


@dataclass(frozen=True)
class CentredClipping:
    """A mean in which a row far from the center pulls no harder than one at the median distance."""


AggregatorConfig: TypeAlias = TrimmedMean | Median | Mean | Krum | MultiKrum | CentredClipping


def aggregator_config(parameters: OuterOptimization) -> AggregatorConfig:
    """The aggregator named in a run's parameters. Raises ValueError for a trim fraction outside [0, 0.5)."""
    match parameters.aggregator:
        case "trimmed_mean":
            return TrimmedMean(parameters.trim_fraction)
        case "median":
            return Median()
        case "mean":
            return Mean()
        case "krum":
            return Krum()
        case "multi_krum":
            return MultiKrum()
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
        case MultiKrum():
            return "multi_krum"
        case CentredClipping():
            return "centred_clipping"
        case _:
            assert_never(config)


def needs_gram(config: AggregatorConfig) -> bool:
    """Whether it needs the dot products of the contributions with each other."""
    return isinstance(config, Krum | MultiKrum | CentredClipping)


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


def krum_order(gram: GramMatrix, tolerated: int) -> tuple[int, ...]:
    """Rows from the most to the least trusted: by the sum of squared distances to their n - f - 2 nearest others.

    Blanchard, El Mhamdi, Guerraoui and Stainer 2017. The first is Krum's choice, the first n - f are multi-Krum's.
    Two rows that are each other's only neighbour have equal scores; then the shorter one comes first. Raises
    TooFewContributionsError if n < 2 f + 3 and n > 1.
    """
    count = len(gram)
    check_krum_count(count, tolerated)

    def score(row: int) -> float:
        return fsum(sorted(squared_distance(gram, row, other) for other in range(count) if other != row)[:neighbours])

    neighbours = max(0, count - tolerated - 2)
    return tuple(sorted(range(count), key=lambda row: (score(row), gram[row][row], row)))


def squared_distance(gram: GramMatrix, left: int, right: int) -> float:
    """|x_left - x_right|^2, never below zero."""
    return max(0.0, gram[left][left] + gram[right][right] - 2.0 * gram[left][right])


def centred_clipping_weights(gram: GramMatrix) -> tuple[float, ...]:
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


def _distances(gram: GramMatrix, weights: list[float]) -> list[float]:
    """|x_i - v| for v = sum_j c_j x_j: its square is g_ii - 2 (g c)_i + c g c."""
    dots = [fsum(weight * value for weight, value in zip(weights, row, strict=True)) for row in gram]
    center = fsum(weight * dot for weight, dot in zip(weights, dots, strict=True))
    return [sqrt(max(0.0, row[i] - 2.0 * dots[i] + center)) for i, row in enumerate(gram)]


@dataclass(frozen=True)
class MiddleMean:
    """Coordinate-wise mean of the rows, each times its factor in fp32, without the `trim` lowest and highest."""

    rows: tuple[int, ...]
    factors: tuple[float, ...]  # exact in fp32
    trim: int


@dataclass(frozen=True)
class WeightedSum:
    """The sum of the rows, each times its weight, over the divisor; in float64."""

    rows: tuple[int, ...]
    weights: tuple[float, ...]
    divisor: float


Reduction: TypeAlias = MiddleMean | WeightedSum


def reduction_by(
    config: AggregatorConfig,
    total: SliceStatistics,
    verdict: GateVerdict,
    *,
    tolerated: int = 0,
    work: Sequence[float] | None = None,
) -> Reduction:
    """The computation of an aggregator on the contributions that a verdict accepted.

    `tolerated` is the number of liars that the run tolerates; Krum needs it, and counts refused members among them.
    `work` is the declared work (tokens) of each of the n judged members; only the mean weights by it, within
    `capped_weights`. Raises TooFewContributionsError if Krum's guarantee does not hold, and ValueError if nothing
    was accepted or the arguments differ in the number of contributions.
    """
    if not verdict.accepted:
        raise ValueError("a round without an accepted contribution is abandoned; there is nothing to reduce")
    counts = {total.count, verdict.member_count, total.count if work is None else len(work)}
    if len(counts) != 1:
        raise ValueError(f"statistics, verdict and declared work are of {sorted(counts)} contributions")
    rows, factors = verdict.accepted, verdict.clip_factors
    match config:
        case TrimmedMean(trim_fraction):
            return MiddleMean(rows, factors, trim_count(len(rows), trim_fraction))
        case Median():
            return MiddleMean(rows, factors, (len(rows) - 1) // 2)
        case Mean():
            if work is None:
                return WeightedSum(rows, factors, float(len(rows)))
            shares = capped_weights([work[row] for row in rows])
            return WeightedSum(rows, _products(shares, factors), fsum(shares))
        case Krum() | MultiKrum():
            check_krum_count(verdict.judged_count, tolerated)
            left = max(0, tolerated - len(verdict.refused))
            order = krum_order(_clipped_gram(total, verdict), left)
            chosen = sorted(order[: 1 if isinstance(config, Krum) else max(1, len(rows) - left)])
            return WeightedSum(tuple(rows[i] for i in chosen), tuple(factors[i] for i in chosen), float(len(chosen)))
        case CentredClipping():
            weights = centred_clipping_weights(_clipped_gram(total, verdict))
            return WeightedSum(rows, _products(weights, factors), 1.0)
        case _:
            assert_never(config)


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


def _clipped_gram(total: SliceStatistics, verdict: GateVerdict) -> GramMatrix:
    """Dot products of the accepted contributions after their clipping."""
    if total.gram is None:
        raise ValueError("this aggregator needs statistics with a Gram matrix")
    gram, kept = total.gram, tuple(zip(verdict.accepted, verdict.clip_factors, strict=True))
    return tuple(tuple(gram[i][j] * (factor * other) for j, other in kept) for i, factor in kept)


def _products(left: Sequence[float], right: Sequence[float]) -> tuple[float, ...]:
    return tuple(a * b for a, b in zip(left, right, strict=True))


def _reduced(chunk: Floats, reduction: Reduction) -> Doubles:
    match reduction:
        case MiddleMean(factors=factors, trim=trim):
            for row, factor in zip(chunk, factors, strict=True):
                if factor != 1.0:
                    np.multiply(row, np.float32(factor), out=row)
            return middle_mean(chunk, trim)
        case WeightedSum(weights=weights, divisor=divisor):
            total, weighted = np.zeros(chunk.shape[1]), np.empty(chunk.shape[1])
            for row, weight in zip(chunk, weights, strict=True):
                np.copyto(weighted, row)
                np.add(total, np.multiply(weighted, weight, out=weighted), out=total)
            return np.divide(total, divisor, out=total)
        case _:
            assert_never(reduction)
