"""Reader of the statistics that reducers of a round send."""

from __future__ import annotations

import torch

from neuroshard.aggregation import (
    MalformedStatisticsError,
    SliceRows,
    judge_statistics,
    read_statistics,
    slice_statistics,
    statistics_bytes,
    sum_statistics,
)
from tests.fuzz.target import Target


def check_statistics(data: bytes) -> None:
    """Statistics that are read say the same again, add up, and can be judged. The first byte: members, Gram matrix."""
    count, with_gram = divmod(data[0] if data else 0, 2)
    try:
        statistics = read_statistics(data[1:], count, with_gram=with_gram == 1)
    except MalformedStatisticsError:
        return
    assert statistics_bytes(statistics) == data[1:]
    judge_statistics(sum_statistics([statistics, statistics]))


def statistics_seeds() -> tuple[bytes, ...]:
    """Statistics of one, three and seven members."""
    seeds: list[bytes] = []
    for count in (1, 3, 7):
        rows = torch.arange(count * 40, dtype=torch.float32).view(count, 40).sin()
        rows[count // 2, 3] = float("nan")
        for with_gram in (False, True):
            statistics = slice_statistics(SliceRows.of(rows), with_gram=with_gram)
            seeds.append(bytes([2 * count + with_gram]) + statistics_bytes(statistics))
    return (*seeds, b"", b"\x02")


TARGETS = (Target("slice statistics", check_statistics, statistics_seeds),)
