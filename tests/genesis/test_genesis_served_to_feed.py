from __future__ import annotations

import random
from pathlib import Path

import trio

from neuroshard.data.data_set import open_genesis
from neuroshard.data.feed import DataFeed
from neuroshard.data.fetcher import Fetcher
from neuroshard.data.shard_cache import ShardCache
from neuroshard.data.source import open_source
from neuroshard.data.tokenizer import Tokenizer, TokenizerTable
from neuroshard.dataset import FolderText, GenesisServer, build_genesis
from neuroshard.identity import Wallet, parse_token
from neuroshard.types import NodeId, RunId


def test_text_reaches_the_trainer_through_the_served_folder(tmp_path: Path) -> None:
    chance = random.Random(5)
    words = ["".join(chance.choices("abcdefgh", k=4)) for _ in range(40_000)]
    (tmp_path / "text").mkdir()
    for i in range(20):
        lines = [" ".join(words[j : j + 8]) for j in range(i * 2000, (i + 1) * 2000, 8)]
        (tmp_path / "text" / f"{i}.txt").write_text("\n".join(lines))
    wallet = Wallet.from_secret(parse_token("11" * 32))
    built = build_genesis(FolderText(tmp_path / "text"), tmp_path / "genesis", wallet, now="2025-01-01T00:00:00Z")

    async def first_batch(url: str) -> tuple[str, bool, str | None, int]:
        source = open_source(url)
        genesis = await open_genesis(Fetcher(source), tmp_path / "store")
        table = TokenizerTable.load(genesis.tokenizer)
        cache = ShardCache(tmp_path / "cache", limit_bytes=10**8)
        feed = DataFeed(
            genesis,
            cache,
            run_id=RunId("ab" * 32),
            node_id=NodeId("node"),
            sequence_length=64,
            vocabulary_size=table.next_merge_id,
        )
        batch = await feed.next_batch(4)
        held_out = await feed.held_out_sequences(8)
        await source.aclose()
        text = Tokenizer(table).decode(batch.input_ids.flatten().tolist())
        return text, genesis.verified, genesis.manifest.signing_key, len(held_out)

    with GenesisServer(built.folder) as server:
        text, is_verified, key, held_out = trio.run(first_batch, server.url)
    assert is_verified
    assert key == wallet.public_key.hex()
    assert held_out == 8
    inner_words = text.split()[1:-1]
    known = set(words)
    assert sum(word in known for word in inner_words) > 0.8 * len(inner_words)
