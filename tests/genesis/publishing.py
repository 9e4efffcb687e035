"""A published data set: what every destination does, a process that publishes, and a node that reads all of it.

`python -m tests.genesis.publishing LOCATION ENDPOINT SHARDS` publishes shard after shard until it is ended or done."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import trio

from neuroshard.data.data_set import open_genesis
from neuroshard.data.manifest import DataSetManifest, ManifestTrust
from neuroshard.data.shard_cache import ShardCache
from neuroshard.data.shard_loader import ShardLoader
from neuroshard.dataset.destination import Destination, open_destination
from neuroshard.dataset.object_store import Condition, Version
from neuroshard.dataset.writer import GenesisWriter
from neuroshard.errors import ConflictError, DataError
from neuroshard.types import ShardId
from tests.data.genesis_samples import TOKENIZER, VOCABULARY, TestSigner, make_fetcher, shard_tokens

SHARD_TOKENS = 700_000  # two parts of a multipart upload


def refuses_a_large_object_before_it_is_read(destination: Destination) -> None:
    destination.write("manifest.json", b"x" * 101)
    with pytest.raises(DataError, match="101 bytes, at most 100"):
        destination.read("manifest.json", 100)


def writes_only_under_its_condition(destination: Destination, no_version_of_its: Version) -> None:
    first = destination.write("checkpoints.json", b"1", expected=Condition.ABSENT)
    for wrong in (Condition.ABSENT, no_version_of_its):
        with pytest.raises(ConflictError, match="changed by somebody else"):
            destination.write("checkpoints.json", b"2", expected=wrong)
    second = destination.write("checkpoints.json", b"2", expected=first)
    assert second != first
    with pytest.raises(ConflictError):
        destination.write("checkpoints.json", b"3", expected=first)
    there = destination.read("checkpoints.json", 10)
    assert there is not None
    assert there.content == b"2"
    with pytest.raises(ConflictError):
        destination.write("nothing.json", b"", expected=first)


def read_everything(url: str, folder: Path) -> DataSetManifest:
    """Open it under the publisher's key and check every shard against the samples; returns its manifest."""
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


def publish(destination: Destination, shards: int) -> None:
    """Write shards and their state one by one, each published before the next begins."""
    writer = GenesisWriter(destination, tokens_per_shard=SHARD_TOKENS)
    state = destination.read("checkpoints.json", 100)
    version = Condition.ABSENT if state is None else state.version
    for shard in range(writer.shard_count, shards):
        writer.add_shard(shard_tokens(shard, SHARD_TOKENS))
        writer.finish(TestSigner(), tokenizer=TOKENIZER, next_merge_id=1000, now="2026-01-01T00:00:00Z")
        version = destination.write("checkpoints.json", b"%d" % shard, expected=version)
        sys.stdout.write(f"{shard}\n")
        sys.stdout.flush()


def main(location: str, endpoint: str, shards: int) -> None:
    """One populator with its claim."""
    destination = open_destination(location, s3_endpoint=endpoint or None)
    with destination.claim("test populator"):
        publish(destination, shards)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin with it ignored
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
