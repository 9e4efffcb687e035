"""Aggregators: (n, d) contributions to one (d,) aggregate, coordinate by coordinate, equal bytes on every machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil, isfinite
from statistics import median_low
from typing import TypeAlias, assert_never

import torch
from torch import Tensor

from neuroshard.aggregation.sorting import middle_mean, row_mean
from neuroshard.config.run_parameters import OuterOptimization

Aggregator: TypeAlias = Callable[[Tensor], Tensor]
"""(n, d) -> (d,). The result of a single contribution may share its memory."""

MAX_WEIGHT_RATIO = 2.0  # to the median declared weight
MIN_WORK_RATIO = 0.25  # of the median declared work
_CHUNK = 1 << 15  # columns at once; a chunk of ten rows stays in the cache


@dataclass(frozen=True)
class TrimmedMean:
    """Mean without the extremes at either end."""

    trim_fraction: float = 0.1


@dataclass(frozen=True)
class Median:
    """The true median."""


@dataclass(frozen=True)
class Mean:
    """The plain mean: no robustness at all."""


AggregatorConfig: TypeAlias = TrimmedMean | Median | Mean


def make_aggregator(config: AggregatorConfig) -> Aggregator:
    """The function a configuration stands for. Raises ValueError for a trim fraction outside [0, 0.5)."""
    match config:
        case TrimmedMean(trim_fraction):
            trim_count(1, trim_fraction)
            return partial(trimmed_mean, trim_fraction=trim_fraction)
        case Median():
            return coordinate_median
        case Mean():
            return mean
        case _:
            assert_never(config)


def aggregator_config(parameters: OuterOptimization) -> AggregatorConfig:
    """What a run's parameters name."""
    match parameters.aggregator:
        case "trimmed_mean":
            return TrimmedMean(parameters.trim_fraction)
        case "median":
            return Median()
        case "mean":
            return Mean()
        case _:
            assert_never(parameters.aggregator)


def trim_count(count: int, trim_fraction: float) -> int:
    """How many of `count` values are left out at either end: at least one from 3 on, never all.

    Raises ValueError for a fraction outside [0, 0.5).
    """
    if not 0 <= trim_fraction < 0.5:
        raise ValueError(f"trim_fraction must be in [0, 0.5), got {trim_fraction}")
    # 30 * 0.1 is a little more than 3 in floating point
    return min(max(1, ceil(count * trim_fraction - 1e-9)), (count - 1) // 2)


def trimmed_mean(contributions: Tensor, trim_fraction: float) -> Tensor:
    """Coordinate-wise mean of (n, d) without the k lowest and k highest values, k = trim_count(n, trim_fraction)."""
    rows = _checked(contributions)
    trim = trim_count(rows.shape[0], trim_fraction)
    return _mean_of_ordered(rows, trim, range(rows.shape[0]))


def coordinate_median(contributions: Tensor, among: Sequence[int] | None = None) -> Tensor:
    """Coordinate-wise median of (n, d); of an even number the mean of the two middle values (torch's is the lower).

    `among` names the rows that count, all of them by default.
    """
    rows = _checked(contributions)
    chosen = range(rows.shape[0]) if among is None else among
    return _mean_of_ordered(rows, (len(chosen) - 1) // 2, chosen)


def mean(contributions: Tensor, weights: Sequence[float] | None = None) -> Tensor:
    """Coordinate-wise mean of (n, d), weighted by `capped_weights` of the declared weights when there are any.

    Raises ValueError when the number of weights is wrong or none of them is usable.
    """
    rows = _checked(contributions)
    if weights is None:
        return rows[0] if rows.shape[0] == 1 else _in_chunks(rows, row_mean)
    if len(weights) != rows.shape[0]:
        raise ValueError(f"{len(weights)} weights for {rows.shape[0]} contributions")
    shares = capped_weights(weights)
    return _in_chunks(rows, lambda part: _weighted_row_mean(part, shares))


def capped_weights(declared: Sequence[float]) -> tuple[float, ...]:
    """Weights a contribution may have: at most twice the (lower) median of the usable ones; unusable ones are 0.

    Weights are self-declared. Not finite, zero or negative is unusable. Raises ValueError when none is usable.
    """
    usable = [weight for weight in declared if isfinite(weight) and weight > 0]
    if not usable:
        raise ValueError("no contribution declares a usable weight")
    cap = MAX_WEIGHT_RATIO * median_low(usable)
    return tuple(min(weight, cap) if isfinite(weight) and weight > 0 else 0.0 for weight in declared)


def abstaining(declared_work: Sequence[float]) -> tuple[int, ...]:
    """Members, by number, with less than a quarter of the (lower) median work of those who did any.

    Noise would be most of what they add. What is not finite or negative is no work; where nobody did any, nobody
    abstains.
    """
    work = [amount if isfinite(amount) and amount > 0 else 0.0 for amount in declared_work]
    done = [amount for amount in work if amount > 0]
    fewest = MIN_WORK_RATIO * median_low(done) if done else 0.0
    return tuple(i for i, amount in enumerate(work) if amount < fewest)


def _checked(contributions: Tensor) -> Tensor:
    if contributions.dim() != 2 or contributions.shape[0] < 1 or not contributions.is_floating_point():
        raise ValueError(f"contributions must be real numbers of shape (n, d), got {tuple(contributions.shape)}")
    if contributions.device.type != "cpu":
        raise ValueError("contributions are aggregated on the CPU, where the result is the same for everybody")
    return contributions


def _mean_of_ordered(rows: Tensor, trim: int, among: Sequence[int]) -> Tensor:
    count = len(among)
    if count == 1:
        return rows[among[0]]

    def of_part(part: Tensor) -> Tensor:
        chosen = part if count == part.shape[0] else part[list(among)]
        return middle_mean(chosen, trim)

    return _in_chunks(rows, of_part)


def _weighted_row_mean(rows: Tensor, weights: Sequence[float]) -> Tensor:
    total = torch.zeros(rows.shape[1], dtype=torch.float64)
    for row, weight in zip(rows, weights, strict=True):
        if weight > 0:  # 0 * NaN would be NaN
            total.add_(row.double().mul_(weight))
    return total.div_(sum(weights))


def _in_chunks(rows: Tensor, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    result = torch.empty(rows.shape[1], dtype=rows.dtype)
    for start in range(0, rows.shape[1], _CHUNK):
        part = slice(start, start + _CHUNK)
        result[part].copy_(reduce(rows[:, part]))
    return result
