"""Which shards a node reads and which shards nobody trains on: pure functions that every peer recomputes alike.

Every block of 64 consecutive shards holds out exactly one, so "is this shard held out" costs 64 hashes whatever the
size of the data set, and the number of held-out shards is exact: max(1, total // 64).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from neuroshard.errors import DataError
from neuroshard.identity.hashing import hash_parts
from neuroshard.types import NodeId, RunId, ShardId

BLOCK_SHARDS = 64  # one shard in so many is held out
_SHARD_DOMAIN = "neuroshard/shard"
_HELD_OUT_DOMAIN = "neuroshard/held-out"
_HELD_OUT_FIRST_DOMAIN = "neuroshard/held-out-first"


@dataclass(frozen=True)
class Assignment:
    """The shards of one node in one run, in the order in which it reads them.

    `total_shards` is the number pinned by the run, so that growth of the data set moves nobody.
    Raises DataError when there is no shard left to train on after one was held out.
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
        """Shards in one pass: all but the held-out ones."""
        return self.total_shards - held_out_count(self.total_shards)

    @property
    def first_rank(self) -> int:
        """Place of the node's first shard among the `length` shards that are not held out."""
        first = primary_shard(self.run_id, self.node_id, self.total_shards)
        return _trainable_before(self.run_id, first, self.total_shards) % self.length

    def shard_at(self, order: int) -> ShardId:
        """The shard read at place `order` (0, 1, ...; every `length` places the same shards come again)."""
        if order < 0:
            raise ValueError(f"order must not be negative, got {order}")
        rank = (self.first_rank + order) % self.length
        return _trainable_of_rank(self.run_id, rank, self.total_shards)


def primary_shard(run_id: RunId, node_id: NodeId, total_shards: int) -> ShardId:
    """SHA-256("neuroshard/shard", run, node) mod total; when it is held out, reading starts at the next one."""
    return ShardId(int.from_bytes(hash_parts(_SHARD_DOMAIN, run_id, node_id)) % total_shards)


def held_out_count(total_shards: int) -> int:
    """One shard in 64, at least one."""
    return max(1, total_shards // BLOCK_SHARDS)


def held_out_shard(run_id: RunId, block: int, total_shards: int) -> ShardId:
    """The held-out shard of a block: the index with the lowest SHA-256("neuroshard/held-out", run, index)."""
    start, stop = _block_bounds(block, total_shards)
    return ShardId(min(range(start, stop), key=lambda index: hash_parts(_HELD_OUT_DOMAIN, run_id, index)))


def held_out_shards(run_id: RunId, total_shards: int) -> Iterator[ShardId]:
    """All held-out shards, beginning with the block that the hash of the run names; lazily, since there may be many."""
    count = held_out_count(total_shards)
    first = int.from_bytes(hash_parts(_HELD_OUT_FIRST_DOMAIN, run_id)) % count
    return (held_out_shard(run_id, (first + i) % count, total_shards) for i in range(count))


def _block_of(shard: int, total_shards: int) -> int:
    return min(shard // BLOCK_SHARDS, held_out_count(total_shards) - 1)


def _block_bounds(block: int, total_shards: int) -> tuple[int, int]:
    """First index and end of a block; the last block takes the remainder of the division by 64."""
    is_last = block == held_out_count(total_shards) - 1
    return block * BLOCK_SHARDS, total_shards if is_last else (block + 1) * BLOCK_SHARDS


def _trainable_before(run_id: RunId, shard: int, total_shards: int) -> int:
    """How many shards with a lower index are not held out: every block before has lost one, this block perhaps."""
    block = _block_of(shard, total_shards)
    return shard - block - (1 if held_out_shard(run_id, block, total_shards) < shard else 0)


def _trainable_of_rank(run_id: RunId, rank: int, total_shards: int) -> ShardId:
    """The inverse of _trainable_before."""
    block = min(rank // (BLOCK_SHARDS - 1), held_out_count(total_shards) - 1)
    index = rank + block
    return ShardId(index + 1 if index >= held_out_shard(run_id, block, total_shards) else index)
