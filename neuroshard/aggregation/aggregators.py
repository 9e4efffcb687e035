"""The aggregators a run may name, and what each of them needs to know."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import TypeAlias, assert_never

from neuroshard.config.run_parameters import OuterOptimization


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
    """The plain mean, weighted by work when it is declared: no robustness at all."""


@dataclass(frozen=True)
class Krum:
    """The one contribution that lies closest to most others."""


@dataclass(frozen=True)
class MultiKrum:
    """The mean of the contributions that lie closest to most others: all but as many as the run tolerates liars."""


@dataclass(frozen=True)
class CentredClipping:
    """A mean in which what lies far from the center pulls no harder than from the median distance."""


AggregatorConfig: TypeAlias = TrimmedMean | Median | Mean | Krum | MultiKrum | CentredClipping


def aggregator_config(parameters: OuterOptimization) -> AggregatorConfig:
    """What a run's parameters name. Raises ValueError for a trim fraction outside [0, 0.5)."""
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
    """Name and settings: members whose names differ do not exchange anything."""
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
    """How many of `count` values are left out at either end: at least one from 3 on, never all.

    Raises ValueError for a fraction outside [0, 0.5).
    """
    if not 0 <= trim_fraction < 0.5:
        raise ValueError(f"trim_fraction must be in [0, 0.5), got {trim_fraction}")
    # 30 * 0.1 is a little more than 3 in floating point
    return min(max(1, ceil(count * trim_fraction - 1e-9)), (count - 1) // 2)
