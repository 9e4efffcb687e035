"""How the accepted contributions become one: decided once for the whole vector, carried out slice by slice.

Pure functions: whoever holds the same numbers comes to the same bytes, whatever its kernels, its number of threads and
the places where the vector is cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum
from typing import TypeAlias, assert_never

import numpy as np
import torch
from torch import Tensor

from neuroshard.aggregation.aggregators import (
    AggregatorConfig,
    CentredClipping,
    Krum,
    Mean,
    Median,
    MultiKrum,
    TrimmedMean,
    trim_count,
)
from neuroshard.aggregation.gates import Verdict
from neuroshard.aggregation.gram_rules import centred_clipping_weights, check_krum_count, krum_order
from neuroshard.aggregation.slice_statistics import Matrix, SliceStatistics
from neuroshard.aggregation.slices import SliceRows
from neuroshard.aggregation.sorting import middle_mean
from neuroshard.aggregation.sums import Doubles, Floats
from neuroshard.aggregation.work import capped_weights


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
    verdict: Verdict,
    *,
    tolerated: int = 0,
    work: Sequence[float] | None = None,
) -> Reduction:
    """What an aggregator does with the contributions that a verdict on the whole vector's statistics accepted.

    `tolerated` is the number of liars that the run tolerates; Krum needs it, and counts who is refused as one of them.
    `work` is what each of the n judged members says it did (tokens); only the mean weighs by it, within
    `capped_weights`. Raises TooFewContributionsError when Krum cannot hold its promise, and ValueError when nothing was
    accepted or the arguments are not about the same number of contributions.
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
    """The aggregate (length,) fp32 of a slice, in `out` when it is given; that may be the memory of one of the rows.

    Beside the result it takes the memory of some chunks, whatever the length. Raises ValueError for an unfit `out`.
    """
    result = torch.empty(rows.length) if out is None else out
    if result.shape != (rows.length,) or result.dtype != torch.float32 or result.device.type != "cpu":
        raise ValueError(f"the aggregate of this slice is fp32 of shape ({rows.length},) on the CPU")
    for start, chunk in rows.chunks(reduction.rows):
        part = result[start : start + chunk.shape[1]].numpy()
        np.copyto(part, _reduced(chunk.numpy(), reduction)[: part.shape[0]], casting="same_kind")
    return result


def _clipped_gram(total: SliceStatistics, verdict: Verdict) -> Matrix:
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
