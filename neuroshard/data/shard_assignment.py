"""Shard assignment: a node's shard order, held-out shards, early rotation, and ranges of held shards.

Pure functions; every peer computes the same result. Every block of 64 consecutive shards holds out exactly one, so
the check of one shard costs 64 hashes for a data set of any size, and the number of held-out shards is exact:
max(1, total // 64)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

from neuroshard.errors import DataError
from neuroshard.identity.signing import hash_parts
from neuroshard.status.data import ShardUse
from neuroshard.types import NodeId, RunId, ShardId, ShardRange

BLOCK_SHARDS = 64  # one shard of each block is held out
_SHARD_DOMAIN = "neuroshard/shard"
_HELD_OUT_DOMAIN = "neuroshard/held-out"
_HELD_OUT_FIRST_DOMAIN = "neuroshard/held-out-first"


@dataclass(frozen=True)
class Assignment:
    """The shards of one node in one run, in the order in which the node reads them.

    `total_shards` is the number that the run pins, so a data set that grows does not change the assignment. Raises
    DataError when no shard is left to train on after one was held out.
    """

    run_id: RunId
    node_id: NodeId
    total_shards: int

    def __post_init__(self) -> None:
        if self.total_shards < 2:
            raise DataError(
                f"The data set has {self.total_shards} shard(s); one is held out, so at least 2 are needed.",
                "Use a data set with more text, or smaller shards.",
            )

    @property
    def length(self) -> int:
        """Number of shards in one pass: all except the held-out ones."""
        return self.total_shards - held_out_count(self.total_shards)

    @property
    def first_rank(self) -> int:
        """Rank of the node's first shard among the `length` shards that are not held out."""
        first = primary_shard(self.run_id, self.node_id, self.total_shards)
        return _trainable_before(self.run_id, first, self.total_shards) % self.length

    def shard_at(self, order: int) -> ShardId:
        """Return the shard read at place `order` (0, 1, ...); the sequence repeats after `length` places."""
        if order < 0:
            raise ValueError(f"order must not be negative, got {order}")
        rank = (self.first_rank + order) % self.length
        return _trainable_of_rank(self.run_id, rank, self.total_shards)


def primary_shard(run_id: RunId, node_id: NodeId, total_shards: int) -> ShardId:
    """Return SHA-256("neuroshard/shard", run, node) mod total; if it is held out, reading starts at the next shard."""
    return ShardId(int.from_bytes(hash_parts(_SHARD_DOMAIN, run_id, node_id)) % total_shards)


def held_out_count(total_shards: int) -> int:
    """Return the number of held-out shards: one in 64, at least one."""
    return max(1, total_shards // BLOCK_SHARDS)


@lru_cache(1024)  # the status shows several shards, and each costs the hashes of its block
def held_out_shard(run_id: RunId, block: int, total_shards: int) -> ShardId:
    """Return a block's held-out shard: the index with the lowest SHA-256("neuroshard/held-out", run, index)."""
    start, stop = _block_bounds(block, total_shards)
    return ShardId(min(range(start, stop), key=lambda index: hash_parts(_HELD_OUT_DOMAIN, run_id, index)))


def held_out_shards(run_id: RunId, total_shards: int) -> Iterator[ShardId]:
    """Yield all held-out shards, starting with the block that the run's hash selects; lazy, as there may be many."""
    count = held_out_count(total_shards)
    first = int.from_bytes(hash_parts(_HELD_OUT_FIRST_DOMAIN, run_id)) % count
    return (held_out_shard(run_id, (first + i) % count, total_shards) for i in range(count))


def _block_of(shard: int, total_shards: int) -> int:
    return min(shard // BLOCK_SHARDS, held_out_count(total_shards) - 1)


def _block_bounds(block: int, total_shards: int) -> tuple[int, int]:
    """Return the first index and the end of a block; the last block includes the remainder of the division by 64."""
    is_last = block == held_out_count(total_shards) - 1
    return block * BLOCK_SHARDS, total_shards if is_last else (block + 1) * BLOCK_SHARDS


def _trainable_before(run_id: RunId, shard: int, total_shards: int) -> int:
    """Count the trainable shards with a lower index: each earlier block holds out one, this block possibly too."""
    block = _block_of(shard, total_shards)
    return shard - block - (1 if held_out_shard(run_id, block, total_shards) < shard else 0)


def _trainable_of_rank(run_id: RunId, rank: int, total_shards: int) -> ShardId:
    """Return the trainable shard of this rank, the inverse of _trainable_before."""
    block = min(rank // (BLOCK_SHARDS - 1), held_out_count(total_shards) - 1)
    index = rank + block
    return ShardId(index + 1 if index >= held_out_shard(run_id, block, total_shards) else index)


class RotationReason(StrEnum):
    """Why a node moved on to another shard."""

    EXHAUSTED = "exhausted"  # every window was used
    MEMORISED = "memorised"  # losses are flat and almost zero
    OVERFITTED = "overfitted"  # better on this shard than on held-out data, by more than the margin
    UNUSABLE = "unusable"  # missing or damaged after several attempts

    @property
    def explanation(self) -> str:
        """The reason in words."""
        return _EXPLANATIONS[self]


_EXPLANATIONS = {
    RotationReason.EXHAUSTED: "all windows of the shard were used",
    RotationReason.MEMORISED: "the losses became flat and almost zero: the shard is memorised",
    RotationReason.OVERFITTED: "the loss on the shard became much better than on held-out data",
    RotationReason.UNUSABLE: "the shard is missing or damaged at its source",
}


@dataclass(frozen=True)
class Rotation:
    """A node's change to another shard. Losses cannot be recomputed by others, so peers take this on its signature."""

    shard: ShardId  # read from this step on
    first_step: int  # the first step that uses it
    reason: RotationReason  # why the node left the previous shard


@dataclass(frozen=True)
class RotationRule:
    """Thresholds of an early rotation; losses in nats per token."""

    losses: int = 20  # number of recent losses to compare
    memorised_variance: float = 0.02
    memorised_mean: float = 0.05
    held_out_margin: float = 1.0


DEFAULT_ROTATION_RULE = RotationRule()


def plateau_reason(
    losses: Sequence[float], held_out_loss: float | None, rule: RotationRule = DEFAULT_ROTATION_RULE
) -> RotationReason | None:
    """Return why the training losses on the current shard require the next shard, or None.

    With fewer than `rule.losses` losses the answer is None, so one lucky step moves no node. Non-finite losses also
    give None, because comparisons with them are false.
    """
    recent = losses[-rule.losses :]
    if len(recent) < rule.losses:
        return None
    mean = sum(recent) / len(recent)
    variance = sum((loss - mean) ** 2 for loss in recent) / len(recent)
    if variance < rule.memorised_variance and mean < rule.memorised_mean:
        return RotationReason.MEMORISED
    if held_out_loss is not None and held_out_loss - mean > rule.held_out_margin:
        return RotationReason.OVERFITTED
    return None


UPCOMING = 6  # shards after the one in use
MOST_ROWS = 24


def shards_by_use(
    assignment: Assignment, order: int, held_out: Iterable[ShardId], cached: Iterable[ShardId]
) -> dict[ShardId, ShardUse]:
    """Map each shard to its use: in use, upcoming, held out, or only cached.

    A shard has the first use in this order that applies. The result has at most MOST_ROWS entries.
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


MAX_RANGES = 16  # reported at most; the longest are kept
CELLS = 128  # at most, in the picture of a data set


def ranges_of(shards: Iterable[int], most: int = MAX_RANGES) -> tuple[ShardRange, ...]:
    """Return ascending ranges of these shards; only the longest ones when there are more than `most`."""
    ranges: list[list[int]] = []
    for shard in sorted(set(shards)):
        if ranges and ranges[-1][1] == shard:
            ranges[-1][1] += 1
        else:
            ranges.append([shard, shard + 1])
    longest = sorted(ranges, key=lambda bounds: bounds[0] - bounds[1])[:most]
    return tuple(ShardRange(start, stop) for start, stop in sorted(longest))


def has_shard(ranges: Sequence[ShardRange], shard: int) -> bool:
    """Return whether one of the ranges contains the shard."""
    return any(one.start <= shard < one.stop for one in ranges)


def copies_by_cell(held: Iterable[Sequence[ShardRange]], total_shards: int) -> tuple[float, ...]:
    """Return the mean number of copies per shard in each of at most CELLS equal stretches of the data set.

    `held` has the ranges of every node. The ranges of a node are disjoint, so it counts once for each shard.
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
    """Return the cell of a shard; an index past the last cell for a shard that the data set does not have."""
    total, cells = bounds[-1], len(bounds) - 1
    if shard >= total:
        return cells
    guess = shard * cells // total
    while bounds[guess + 1] <= shard:
        guess += 1
    return guess


def covered_shard_count(held: Iterable[Sequence[ShardRange]], total_shards: int) -> int:
    """Count the shards that at least one node has."""
    every = sorted((one.start, min(one.stop, total_shards)) for ranges in held for one in ranges)
    count = reached = 0
    for start, stop in every:
        count += max(0, stop - max(start, reached))
        reached = max(reached, stop)
    return count
