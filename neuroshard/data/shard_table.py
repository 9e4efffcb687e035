"""The shards that a node has or will need, and what for: pure."""

from __future__ import annotations

from collections.abc import Iterable

from neuroshard.data.assignment import Assignment
from neuroshard.status.data import ShardUse
from neuroshard.types import ShardId

UPCOMING = 6  # shards after the one in use
MOST_ROWS = 24


def shards_by_use(
    assignment: Assignment, order: int, held_out: Iterable[ShardId], cached: Iterable[ShardId]
) -> dict[ShardId, ShardUse]:
    """What each shard is for: the one in use, those that follow, those held out, then what else is cached.

    A shard has the first use that it comes up with; at most MOST_ROWS are told.
    """
    uses: dict[ShardId, ShardUse] = {assignment.shard_at(order): ShardUse.IN_USE}
    for place in range(order + 1, order + 1 + min(UPCOMING, assignment.length - 1)):
        uses.setdefault(assignment.shard_at(place), ShardUse.NEXT if place == order + 1 else ShardUse.ASSIGNED)
    for shard in held_out:
        uses.setdefault(shard, ShardUse.HELD_OUT)
    for shard in cached:
        if len(uses) >= MOST_ROWS:
            break
        uses.setdefault(shard, ShardUse.READ)
    return uses
