"""Small signed Genesis folders, a feed on one of them, and what its batches must be, recomputed as a peer would."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random
from typing import TypeVar

import anyio
import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from neuroshard.data.assignment import Assignment
from neuroshard.data.data_set import open_genesis
from neuroshard.data.feed import DataFeed
from neuroshard.data.fetcher import Fetcher
from neuroshard.data.manifest import DataSetManifest
from neuroshard.data.shard_cache import ShardCache
from neuroshard.data.source import ShardSource, open_source
from neuroshard.data.transfer import RetryPolicy
from neuroshard.data.windows import Batch, window_key, window_order
from neuroshard.dataset.destination import FolderDestination
from neuroshard.dataset.folder_destination import LOCK_NAME
from neuroshard.dataset.writer import GenesisWriter
from neuroshard.types import DataPosition, NodeId, RunId

VOCABULARY = 1000
TOKENIZER = b'{"next_merge_id": 1000, "merges": []}'
FAST = RetryPolicy(first_seconds=0.005, longest_seconds=0.02, stall_seconds=0.4, progress_bytes=512)


class TestSigner:
    """An Ed25519 key that always is the same."""

    __test__ = False

    def __init__(self, seed: int = 1) -> None:
        self._key = Ed25519PrivateKey.from_private_bytes(bytes([seed]) * 32)

    @property
    def public_key(self) -> bytes:
        return self._key.public_key().public_bytes_raw()

    def sign(self, message: bytes) -> bytes:
        return self._key.sign(message)


def shard_tokens(index: int, count: int) -> np.ndarray:
    """Tokens that differ from shard to shard and within one."""
    return (np.arange(count, dtype=np.int64) * 7 + index * 131) % VOCABULARY


def write_genesis(
    folder: Path,
    *,
    shards: int = 16,
    tokens: int = 400,
    signer: TestSigner | None = None,
    tokenizer: bytes = TOKENIZER,
    next_merge_id: int = VOCABULARY,
) -> DataSetManifest:
    """Write or continue a folder so that it has `shards` shards."""
    writer = GenesisWriter(FolderDestination(folder), tokens_per_shard=tokens)
    for index in range(writer.shard_count, shards):
        writer.add_shard(shard_tokens(index, tokens))
    return writer.finish(
        signer, tokenizer=tokenizer, next_merge_id=next_merge_id, now="2026-01-01T00:00:00Z", tokenizer_version="1"
    )


def folder_files(folder: Path) -> dict[str, bytes]:
    """The files of a folder by relative name, for a server."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != LOCK_NAME]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def make_fetcher(source: ShardSource | str | Path, policy: RetryPolicy = FAST) -> Fetcher:
    """A fetcher that does not wait long."""
    opened = open_source(str(source)) if isinstance(source, (str, Path)) else source
    return Fetcher(opened, rng=Random(1), policy=policy)


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
