from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from neuroshard.data.shard_assignment import CELLS, copies_by_cell, covered_shard_count, has_shard, ranges_of
from neuroshard.types import ShardRange

SHARDS = st.sets(st.integers(0, 300), max_size=80)


@given(SHARDS)
def test_ranges_name_exactly_the_shards(shards: set[int]) -> None:
    ranges = ranges_of(shards, most=1000)
    assert {shard for shard in range(302) if has_shard(ranges, shard)} == shards
    assert all(one.stop < other.start for one, other in pairwise(ranges))


def test_of_too_many_ranges_the_longest_are_told() -> None:
    assert ranges_of([1, 2, 3, 10, 20, 21, 30], most=2) == (ShardRange(1, 4), ShardRange(20, 22))


@given(st.lists(SHARDS, max_size=4), st.integers(1, 290))
def test_the_picture_counts_every_copy_once(nodes: list[set[int]], total: int) -> None:
    held = [ranges_of(shards, most=1000) for shards in nodes]
    cells = copies_by_cell(held, total)
    count = min(CELLS, total)
    bounds = [cell * total // count for cell in range(count + 1)]
    for cell, copies in enumerate(cells):
        inside = sum(bounds[cell] <= shard < bounds[cell + 1] for shards in nodes for shard in shards)
        assert abs(copies * (bounds[cell + 1] - bounds[cell]) - inside) < 1e-9
    assert covered_shard_count(held, total) == len({shard for shards in nodes for shard in shards if shard < total})
