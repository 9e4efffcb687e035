"""A simulated data set of 600,000 shards, and how many bytes one node needs to know its part of it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from random import Random

from benchmarks.sizes import size
from neuroshard.data.data_set import open_genesis
from neuroshard.data.fetcher import Fetcher
from neuroshard.data.manifest import DataSetManifest, TokenizerEntry, serialise_manifest
from neuroshard.data.shard_assignment import Assignment, held_out_shards
from neuroshard.data.transfer import FileMissingError, OpenedFile
from neuroshard.identity import Wallet, parse_token
from neuroshard.types import NodeId, RunId

SHARDS = size(600_000, 10_000)
PAGE_BYTES = 4096 * 32
_TOKENIZER = b'{"next_merge_id": 1000, "merges": []}'
_RUN = RunId("run")


class HugeSource:
    """Only the description exists; counts what leaves it."""

    description = "a simulated data set"

    def __init__(self) -> None:
        self.bytes_sent = 0
        digests = b"".join(digest_of(shard) for shard in range(SHARDS))
        pages = [digests[start : start + PAGE_BYTES] for start in range(0, len(digests), PAGE_BYTES)]
        manifest = DataSetManifest(
            SHARDS,
            SHARDS * 2_500_000,
            tokens_per_shard=2_500_000,
            tokenizers=(TokenizerEntry(1000, sha256(_TOKENIZER).hexdigest(), 0),),
            pages=tuple(sha256(page).hexdigest() for page in pages),
        )
        signer = Wallet.from_secret(parse_token("11" * 32))
        self.files = {"manifest.json": serialise_manifest(manifest, signer), "tokenizer.json": _TOKENIZER}
        self.files |= {f"pages/{number:05d}.bin": page for number, page in enumerate(pages)}

    @asynccontextmanager
    async def open(
        self, name: str, offset: int = 0, validator: str | None = None, known: str | None = None
    ) -> AsyncGenerator[OpenedFile]:
        """One file, whole."""
        data = self.files.get(name)
        if data is None:
            raise FileMissingError(name)
        self.bytes_sent += len(data)

        async def chunks() -> AsyncIterator[bytes]:
            yield data

        yield OpenedFile(0, len(data), None, chunks())

    async def aclose(self) -> None:
        """Nothing is held."""


def digest_of(shard: int) -> bytes:
    """What the manifest's pages say about a shard."""
    return sha256(str(shard).encode()).digest()


async def know_ten_shards(source: HugeSource, folder: Path) -> bool:
    """Open the source and look up the first ten shards of a node and a held-out one; whether all digests were right."""
    genesis = await open_genesis(Fetcher(source, rng=Random(1)), folder)
    assignment = Assignment(_RUN, NodeId("node"), genesis.manifest.total_shards)
    wanted = [assignment.shard_at(order) for order in range(10)]
    wanted.append(next(held_out_shards(_RUN, genesis.manifest.total_shards)))
    return all([await genesis.shard_digest(shard) == digest_of(shard) for shard in wanted])
