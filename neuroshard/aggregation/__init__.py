"""Robust aggregation: one verdict on whole contributions, then a rule, slice by slice. Pure functions."""

from neuroshard.aggregation.aggregators import (
    AggregatorConfig,
    CentredClipping,
    Krum,
    Mean,
    Median,
    MultiKrum,
    TrimmedMean,
    aggregator_config,
    aggregator_name,
    needs_gram,
    trim_count,
)
from neuroshard.aggregation.gates import Refusal, Verdict, judge_statistics, max_refused
from neuroshard.aggregation.gram_rules import TooFewContributionsError, check_krum_count
from neuroshard.aggregation.reduction import MiddleMean, Reduction, WeightedSum, reduce_slice, reduction_by
from neuroshard.aggregation.slice_statistics import SliceStatistics, slice_statistics, sum_statistics
from neuroshard.aggregation.slices import SliceRows
from neuroshard.aggregation.statistics_form import (
    MalformedStatisticsError,
    read_statistics,
    statistics_bytes,
    statistics_size,
)
from neuroshard.aggregation.work import abstaining, capped_weights

__all__ = [
    "AggregatorConfig",
    "CentredClipping",
    "Krum",
    "MalformedStatisticsError",
    "Mean",
    "Median",
    "MiddleMean",
    "MultiKrum",
    "Reduction",
    "Refusal",
    "SliceRows",
    "SliceStatistics",
    "TooFewContributionsError",
    "TrimmedMean",
    "Verdict",
    "WeightedSum",
    "abstaining",
    "aggregator_config",
    "aggregator_name",
    "capped_weights",
    "check_krum_count",
    "judge_statistics",
    "max_refused",
    "needs_gram",
    "read_statistics",
    "reduce_slice",
    "reduction_by",
    "slice_statistics",
    "statistics_bytes",
    "statistics_size",
    "sum_statistics",
    "trim_count",
]
