"""Robust aggregation: gates on whole contributions, then a coordinate-wise rule. Pure functions of tensors."""

from neuroshard.aggregation.averages import (
    Aggregator,
    AggregatorConfig,
    Mean,
    Median,
    TrimmedMean,
    aggregator_config,
    capped_weights,
    coordinate_median,
    make_aggregator,
    mean,
    trim_count,
    trimmed_mean,
)
from neuroshard.aggregation.gates import Refusal, Verdict, clipped, judge, max_refused

__all__ = [
    "Aggregator",
    "AggregatorConfig",
    "Mean",
    "Median",
    "Refusal",
    "TrimmedMean",
    "Verdict",
    "aggregator_config",
    "capped_weights",
    "clipped",
    "coordinate_median",
    "judge",
    "make_aggregator",
    "max_refused",
    "mean",
    "trim_count",
    "trimmed_mean",
]
