"""A feed on a small signed folder, and what its batches must be, recomputed as a peer would."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import anyio
import torch
from genesis_samples import VOCABULARY, make_fetcher, shard_tokens

from neuroshard.data.assignment import Assignment
from neuroshard.data.cache import ShardCache
from neuroshard.data.data_set import open_genesis
from neuroshard.data.feed import DataFeed
from neuroshard.data.windows import Batch, window_key, window_order
from neuroshard.types import DataPosition, NodeId, RunId

T = TypeVar("T")
RUN, NODE = RunId("5" * 64), NodeId("12D3KooWFeed")
TOKENS, LENGTH = 400, 15  # 25 windows a shard
ASSIGNED = Assignment(RUN, NODE, 16)


def run(work: Callable[[], Awaitable[T]]) -> T:
    async def bounded() -> T:
        with anyio.fail_after(30):
            return await work()

    return anyio.run(bounded, backend="trio")


async def make_feed(
    location: str | Path,
    folder: Path,
    *,
    start: DataPosition | None = None,
    start_node: NodeId | None = None,
    node: NodeId = NODE,
    limit: int = 10**9,
    vocabulary: int = VOCABULARY,
) -> DataFeed:
    genesis = await open_genesis(make_fetcher(location), folder / "store", give_up_after=3)
    cache = ShardCache(folder / "cache", limit_bytes=limit)
    return DataFeed(
        genesis,
        cache,
        run_id=RUN,
        node_id=node,
        sequence_length=LENGTH,
        vocabulary_size=vocabulary,
        start=start,
        start_node=start_node,
    )


def expected_window(number: int) -> list[int]:
    """Window `number` of the node's stream, recomputed as a peer would."""
    order, window = divmod(number, 25)
    shard = ASSIGNED.shard_at(order)
    index = int(window_order(window_key(RUN, NODE, shard), 25)[window])
    return shard_tokens(shard, TOKENS)[index * 16 : index * 16 + 16].tolist()


def rows_of(batch: Batch) -> list[list[int]]:
    return torch.cat([batch.input_ids, batch.labels[:, -1:]], dim=1).tolist()
