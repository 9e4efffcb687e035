"""Robust aggregation: one verdict on whole contributions, then a rule, slice by slice. Pure functions."""

from neuroshard.aggregation.averages import (
    Aggregator,
    AggregatorConfig,
    Mean,
    Median,
    TrimmedMean,
    abstaining,
    aggregator_config,
    capped_weights,
    coordinate_median,
    make_aggregator,
    mean,
    trim_count,
    trimmed_mean,
)
from neuroshard.aggregation.gates import Refusal, Verdict, clipped, judge, judge_statistics, max_refused
from neuroshard.aggregation.reduction import MiddleMean, Reduction, WeightedSum, reduce_slice, reduction_by
from neuroshard.aggregation.slice_statistics import SliceStatistics, slice_statistics, sum_statistics
from neuroshard.aggregation.slices import SliceRows
from neuroshard.aggregation.statistics_form import (
    MalformedStatisticsError,
    read_statistics,
    statistics_bytes,
    statistics_size,
)

__all__ = [
    "Aggregator",
    "AggregatorConfig",
    "MalformedStatisticsError",
    "Mean",
    "Median",
    "MiddleMean",
    "Reduction",
    "Refusal",
    "SliceRows",
    "SliceStatistics",
    "TrimmedMean",
    "Verdict",
    "WeightedSum",
    "abstaining",
    "aggregator_config",
    "capped_weights",
    "clipped",
    "coordinate_median",
    "judge",
    "judge_statistics",
    "make_aggregator",
    "max_refused",
    "mean",
    "read_statistics",
    "reduce_slice",
    "reduction_by",
    "slice_statistics",
    "statistics_bytes",
    "statistics_size",
    "sum_statistics",
    "trim_count",
    "trimmed_mean",
]
