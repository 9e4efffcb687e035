"""A reader of shards at a trainer's pace, as a process: `python -m benchmarks.shard_reader URL FOLDER RATE SECONDS`.

Prints what it waited for as JSON: the seconds until the first batch, the seconds after it, and what share of these.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import anyio

from neuroshard.data.data_set import open_genesis
from neuroshard.data.feed import DataFeed
from neuroshard.data.fetcher import Fetcher
from neuroshard.data.shard_cache import ShardCache
from neuroshard.data.source import open_source
from neuroshard.types import NodeId, RunId

SEQUENCES, LENGTH = 32, 512
VOCABULARY = 32_000


async def read(url: str, folder: Path, tokens_per_second: float, seconds: float) -> dict[str, float]:
    """Take batches for so long, each followed by the time that a step on it takes."""
    source = open_source(url)
    genesis = await open_genesis(Fetcher(source), folder / "descriptions")
    cache = ShardCache(folder, limit_bytes=10**9, descriptions=folder / "descriptions")
    feed = DataFeed(
        genesis,
        cache,
        run_id=RunId("ab" * 32),
        node_id=NodeId("reader"),
        sequence_length=LENGTH,
        vocabulary_size=VOCABULARY,
    )
    waited = first = whole = 0.0
    began = anyio.current_time()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(feed.run)
        await feed.next_batch(SEQUENCES)
        first = anyio.current_time() - began
        tasks.start_soon(feed.held_out)  # the trainer asks for these soon, and trains meanwhile
        began = anyio.current_time()
        while anyio.current_time() - began < seconds:
            await anyio.sleep(SEQUENCES * LENGTH / tokens_per_second)
            asked = anyio.current_time()
            await feed.next_batch(SEQUENCES)
            waited += anyio.current_time() - asked
        whole = anyio.current_time() - began
        tasks.cancel_scope.cancel()
    await source.aclose()
    shards = feed.status().shards_seen
    return {"first_seconds": first, "seconds": whole, "waited_share": waited / whole, "shards": shards}


if __name__ == "__main__":
    place, home, rate, duration = sys.argv[1:]
    print(json.dumps(anyio.run(read, place, Path(home), float(rate), float(duration), backend="trio")))
