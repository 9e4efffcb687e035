"""What a node does with a data set behind a URL: opens it under the publisher's key and loads every shard."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import trio

from neuroshard.data.cache import ShardCache
from neuroshard.data.data_set import open_genesis
from neuroshard.data.manifest import DataSetManifest, ManifestTrust
from neuroshard.data.shard_loader import ShardLoader
from neuroshard.types import ShardId
from tests.data.genesis_samples import VOCABULARY, TestSigner, make_fetcher, shard_tokens


def read_everything(url: str, folder: Path) -> DataSetManifest:
    """Every shard, verified, holds what the samples of tests hold; the manifest that named them."""
    return trio.run(_read, url, folder)


async def _read(url: str, folder: Path) -> DataSetManifest:
    fetcher = make_fetcher(url)
    genesis = await open_genesis(
        fetcher, folder / "store", trust=ManifestTrust(signing_key=TestSigner().public_key.hex())
    )
    cache = ShardCache(folder / "cache", limit_bytes=10**9)
    loader = ShardLoader(genesis, cache, vocabulary_size=VOCABULARY)
    for number in range(genesis.manifest.total_shards):
        shard = await loader.load(ShardId(number), keep=())
        assert np.array_equal(shard.tokens, shard_tokens(number, genesis.manifest.tokens_per_shard or 0))
    await fetcher.source.aclose()
    return genesis.manifest
