"""Shards that nodes say they have, as ranges, and how well a run's data are held by all of them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from neuroshard.types import ShardRange

MAX_RANGES = 16  # that are told; of more the longest
CELLS = 128  # of the picture of a data set, at most


def ranges_of(shards: Iterable[int], most: int = MAX_RANGES) -> tuple[ShardRange, ...]:
    """Ascending ranges of these shards; the longest ones when there are more than `most`."""
    ranges: list[list[int]] = []
    for shard in sorted(set(shards)):
        if ranges and ranges[-1][1] == shard:
            ranges[-1][1] += 1
        else:
            ranges.append([shard, shard + 1])
    longest = sorted(ranges, key=lambda bounds: bounds[0] - bounds[1])[:most]
    return tuple(ShardRange(start, stop) for start, stop in sorted(longest))


def has_shard(ranges: Sequence[ShardRange], shard: int) -> bool:
    """Whether the shard is in one of them."""
    return any(one.start <= shard < one.stop for one in ranges)


def copies_by_cell(held: Iterable[Sequence[ShardRange]], total_shards: int) -> tuple[float, ...]:
    """How many nodes have a shard, as a mean over each of at most CELLS equal stretches of the data set.

    `held` has the ranges of every node. Each node counts in each shard once, its ranges being disjoint.
    """
    cells = min(CELLS, total_shards)
    bounds = [cell * total_shards // cells for cell in range(cells + 1)]
    sums = [0] * cells
    for ranges in held:
        for one in ranges:
            for cell in range(_cell_of(one.start, bounds), cells):
                if bounds[cell] >= one.stop:
                    break
                sums[cell] += min(one.stop, bounds[cell + 1]) - max(one.start, bounds[cell])
    return tuple(count / (bounds[cell + 1] - bounds[cell]) for cell, count in enumerate(sums))


def _cell_of(shard: int, bounds: Sequence[int]) -> int:
    """The cell that a shard lies in; past the last one for a shard that the data set does not have."""
    total, cells = bounds[-1], len(bounds) - 1
    if shard >= total:
        return cells
    guess = shard * cells // total
    while bounds[guess + 1] <= shard:
        guess += 1
    return guess


def held_somewhere(held: Iterable[Sequence[ShardRange]], total_shards: int) -> int:
    """How many shards at least one node has."""
    every = sorted((one.start, min(one.stop, total_shards)) for ranges in held for one in ranges)
    count = reached = 0
    for start, stop in every:
        count += max(0, stop - max(start, reached))
        reached = max(reached, stop)
    return count
