"""How the accepted contributions become one: decided once for the whole vector, carried out slice by slice.

Pure functions: whoever holds the same numbers comes to the same bytes, whatever its kernels, its number of threads and
the places where the vector is cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias, assert_never

import torch
from torch import Tensor

from neuroshard.aggregation.averages import AggregatorConfig, Mean, Median, TrimmedMean, capped_weights, trim_count
from neuroshard.aggregation.gates import Verdict
from neuroshard.aggregation.slice_statistics import SliceStatistics
from neuroshard.aggregation.slices import SliceRows
from neuroshard.aggregation.sorting import middle_mean


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
    config: AggregatorConfig, total: SliceStatistics, verdict: Verdict, *, work: Sequence[float] | None = None
) -> Reduction:
    """What an aggregator does with the contributions that a verdict on the whole vector's statistics accepted.

    `work` is what each of the n judged members says it did (tokens); only the mean weighs by it, within
    `capped_weights`. Raises ValueError when nothing was accepted, or when the
    arguments are not about the same number of contributions.
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
            weights = tuple(share * factor for share, factor in zip(shares, factors, strict=True))
            return WeightedSum(rows, weights, sum(shares))
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
        part = result[start : start + chunk.shape[1]]
        part.copy_(_reduced(chunk, reduction)[: part.shape[0]])
    return result


def _reduced(chunk: Tensor, reduction: Reduction) -> Tensor:
    match reduction:
        case MiddleMean(factors=factors, trim=trim):
            for row, factor in zip(chunk, factors, strict=True):
                if factor != 1.0:
                    row.mul_(torch.tensor(factor, dtype=torch.float32))
            return middle_mean(chunk, trim)
        case WeightedSum(weights=weights, divisor=divisor):
            total = torch.zeros(chunk.shape[1], dtype=torch.float64)
            for row, weight in zip(chunk, weights, strict=True):
                total.add_(row.double().mul_(weight))
            return total.div_(divisor)
        case _:
            assert_never(reduction)
