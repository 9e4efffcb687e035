"""Bytes of slice statistics: one form for one value, read with every size checked before anything is allocated."""

from __future__ import annotations

import struct
from math import copysign

from neuroshard.aggregation.slice_statistics import SliceStatistics, arranged, sums_in_order
from neuroshard.errors import NeuroShardError


class MalformedStatisticsError(NeuroShardError):
    """Bytes that are no statistics of so many contributions."""


def statistics_size(count: int, *, with_gram: bool) -> int:
    """Bytes of the statistics of `count` contributions."""
    return count + 8 * _sum_count(count, with_gram)


def statistics_bytes(statistics: SliceStatistics) -> bytes:
    """A byte 0 or 1 for each contribution (finite or not), then all sums as little-endian float64."""
    sums = sums_in_order(statistics)
    return bytes(statistics.finite) + struct.pack(f"<{len(sums)}d", *sums)


def read_statistics(data: bytes | memoryview, count: int, *, with_gram: bool) -> SliceStatistics:
    """The inverse of `statistics_bytes`. Raises MalformedStatisticsError; then the sender is at fault."""
    if count < 1 or len(data) != statistics_size(count, with_gram=with_gram):
        raise MalformedStatisticsError(f"{len(data)} bytes are not the statistics of {count} contributions.")
    flags, sums = bytes(data[:count]), struct.unpack(f"<{_sum_count(count, with_gram)}d", data[count:])
    if max(flags) > 1 or any(value == 0 and copysign(1.0, value) < 0 for value in sums):
        raise MalformedStatisticsError("Statistics have one form only: flags are 0 or 1, and zero is +0.0.")
    try:
        statistics = arranged([flag == 1 for flag in flags], sums, with_gram=with_gram)
    except ValueError as error:
        raise MalformedStatisticsError(f"These statistics cannot be: {error}.") from None
    if statistics_bytes(statistics) != data:
        raise MalformedStatisticsError("These statistics cannot be: a row that is not finite has sums.")
    return statistics


def _sum_count(count: int, with_gram: bool) -> int:
    return 2 * count + 1 + (count * (count - 1) // 2 if with_gram else 0)
