"""Data sets: small signed Genesis folders, a feed on one of them, made-up sources for the populator, publishing.

What the batches of a feed must be is recomputed as a peer would. `python -m tests.worlds.data_sets LOCATION ENDPOINT
SHARDS` publishes shard after shard until it is ended or done.
"""

from __future__ import annotations

import io
import json
import random
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from hashlib import sha256
from pathlib import Path
from random import Random
from threading import Event
from time import monotonic
from typing import TypeVar

import anyio
import numpy as np
import pytest
import torch
import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from neuroshard.data.data_set import open_genesis
from neuroshard.data.feed import DataFeed
from neuroshard.data.fetcher import Fetcher
from neuroshard.data.manifest import DataSetManifest, ManifestTrust
from neuroshard.data.shard_assignment import Assignment
from neuroshard.data.shard_cache import ShardCache
from neuroshard.data.shard_loader import ShardLoader
from neuroshard.data.source import ShardSource, open_source
from neuroshard.data.transfer import RetryPolicy
from neuroshard.data.windows import Batch, window_key, window_order
from neuroshard.dataset.destination import Destination, FolderDestination, open_destination
from neuroshard.dataset.folder_destination import LOCK_NAME
from neuroshard.dataset.object_store import Condition, Version
from neuroshard.dataset.population import (
    PopulationDependencies,
    PopulationOptions,
    PopulationPlan,
    PopulationReport,
    populate,
)
from neuroshard.dataset.progress import ProgressPrinter
from neuroshard.dataset.sources import PopulationConfiguration
from neuroshard.dataset.writer import GenesisWriter
from neuroshard.errors import ConflictError, DataError
from neuroshard.types import DataPosition, NodeId, RunId, ShardId

VOCABULARY = 1000
TOKENIZER = b'{"next_merge_id": 1000, "merges": []}'
FAST = RetryPolicy(first_seconds=0.005, longest_seconds=0.02, stall_seconds=3.0, progress_bytes=512)


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


NOW = "2025-01-01T00:00:00+00:00"
SHARD_TOKENS = 4_096


def made_up_texts(count: int, seed: int = 1, lines: int = 12) -> list[str]:
    """Documents of random words, every one different."""
    chance = random.Random(seed)
    words = ["".join(chance.choices("abcdefghij", k=chance.randint(2, 7))) for _ in range(500)]
    return [
        "".join(" ".join(chance.choices(words, k=9)) + "\n" for _ in range(chance.randint(1, lines)))
        for _ in range(count)
    ]


def write_json_lines(path: Path, texts: Sequence[str], field: str = "text") -> Path:
    """A JSON Lines file with these documents."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({field: text}) + "\n" for text in texts), encoding="utf-8")
    return path


def configured(
    *sources: dict[str, object], merges: int = 60, shard_tokens: int = SHARD_TOKENS
) -> PopulationConfiguration:
    """A configuration with a small vocabulary."""
    vocabulary = {"merges": merges, "first_source_merges": min(20, merges), "sample_documents": 50}
    content = {"sources": list(sources), "vocabulary": vocabulary, "tokens_per_shard": shard_tokens}
    return PopulationConfiguration.model_validate(content)


def json_source(path: Path, name: str = "lines", target: int = 1_000, **more: object) -> dict[str, object]:
    """A source of JSON Lines."""
    return {"name": name, "kind": "jsonl", "location": str(path), "target_shards": target, **more}


def run_population(
    configuration: PopulationConfiguration,
    out: Destination | Path,
    *,
    workers: int = 1,
    stop: Event | None = None,
    date: Callable[[], str] = lambda: NOW,
    publish_seconds: float = 1000.0,
    pauses: Sequence[float] = (),
    follow_seconds: float | None = None,
) -> PopulationReport:
    """Run the populator; its logs lie beside the folder, its progress is thrown away."""
    logs = (out if isinstance(out, Path) else Path(out.description)).parent / "logs"
    destination = FolderDestination(out) if isinstance(out, Path) else out
    options = PopulationOptions(workers, logs, publish_seconds, follow_seconds, pauses)
    surroundings = PopulationDependencies(date, monotonic, stop or Event(), ProgressPrinter(io.StringIO(), monotonic))
    plan = PopulationPlan.of(configuration, follows=follow_seconds is not None)
    return populate(plan, destination, TestSigner(), options, surroundings)


def contents(folder: Path) -> dict[str, str]:
    """SHA-256 of every published file by its name."""
    files = (path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
    return {path.relative_to(folder).as_posix(): sha256(path.read_bytes()).hexdigest() for path in sorted(files)}


PUBLISHED_SHARD_TOKENS = 700_000  # two parts of a multipart upload


def refuses_a_large_object_before_it_is_read(destination: Destination) -> None:
    destination.write("manifest.json", b"x" * 101)
    with pytest.raises(DataError, match="101 bytes, at most 100"):
        destination.read("manifest.json", 100)


def writes_only_under_its_condition(destination: Destination, no_version_of_its: Version) -> None:
    first = destination.write("checkpoints.json", b"1", expected=Condition.ABSENT)
    for wrong in (Condition.ABSENT, no_version_of_its):
        with pytest.raises(ConflictError, match="Another process changed"):
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
    writer = GenesisWriter(destination, tokens_per_shard=PUBLISHED_SHARD_TOKENS)
    state = destination.read("checkpoints.json", 100)
    version = Condition.ABSENT if state is None else state.version
    for shard in range(writer.shard_count, shards):
        writer.add_shard(shard_tokens(shard, PUBLISHED_SHARD_TOKENS))
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
