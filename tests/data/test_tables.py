"""A data set whose tokenizer table grew, read with the vocabulary of a run: always below it, always the same text."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import anyio
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuroshard.data.data_set import open_genesis
from neuroshard.data.feed import DataFeed
from neuroshard.data.shard_assignment import Assignment
from neuroshard.data.shard_cache import ShardCache
from neuroshard.data.shard_loader import TokenExpansion
from neuroshard.data.tokenizer import FIRST_MERGE_ID, Tokenizer, TokenizerTable, learn_merges
from neuroshard.data.windows import window_count, window_key, window_order
from neuroshard.dataset.destination import FolderDestination
from neuroshard.dataset.writer import GenesisWriter
from neuroshard.errors import DataError
from neuroshard.types import NodeId
from tests.worlds import file_servers as hostile
from tests.worlds.data_sets import LENGTH, NODE, RUN, TestSigner, folder_files, make_fetcher, rows_of, run
from tests.worlds.file_servers import HostileServer

TOKENS, SHARDS, GROWN_AT = 400, 12, 6
TEXTS = [
    f"The {thing} of the {place} told the other {thing} another theory. " * 9
    for thing, place in zip(
        ["weather", "mother", "feather", "leather"] * 40, ["north", "south", "northern south"] * 60, strict=False
    )
]
SMALL = learn_merges(TEXTS[:20], 30)
GROWN = learn_merges(TEXTS, 60, SMALL, "more")
VOCABULARY = SMALL.next_merge_id - 8


def parts_of(table: TokenizerTable, identifier: int, vocabulary: int) -> list[int]:
    """The plain rule: a merge that the vocabulary lacks is its two halves."""
    if identifier < vocabulary:
        return [identifier]
    first, second = table.merges[identifier - FIRST_MERGE_ID]
    return parts_of(table, first, vocabulary) + parts_of(table, second, vocabulary)


def shard_of(shard: int) -> np.ndarray:
    """Tokens of one shard, from the table that was there when it was made."""
    tokenizer = Tokenizer(SMALL if shard < GROWN_AT else GROWN)
    ids = np.concatenate([tokenizer.encode(text, bos=True, eos=True) for text in TEXTS[shard:] + TEXTS])
    return ids[shard : shard + TOKENS].astype(np.int64)


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("grown")
    for table, stop in ((SMALL, GROWN_AT), (GROWN, SHARDS)):
        writer = GenesisWriter(FolderDestination(folder), tokens_per_shard=TOKENS)
        for shard in range(writer.shard_count, stop):
            writer.add_shard(shard_of(shard))
        writer.finish(TestSigner(), tokenizer=table.to_json(), next_merge_id=table.next_merge_id, now="2026-01-01")
    return folder


async def make_feed(location: str | Path, home: Path, vocabulary: int, node: NodeId = NODE) -> DataFeed:
    genesis = await open_genesis(make_fetcher(location), home / "store", give_up_after=3)
    cache = ShardCache(home / "cache", limit_bytes=10**9)
    return DataFeed(genesis, cache, run_id=RUN, node_id=node, sequence_length=LENGTH, vocabulary_size=vocabulary)


def stream_of(node: NodeId, vocabulary: int, windows: int) -> list[list[int]]:
    """The node's windows, recomputed as a peer would that knows the tables."""
    rows: list[list[int]] = []
    assigned = Assignment(RUN, node, SHARDS)
    for order in range(assigned.length):
        shard = assigned.shard_at(order)
        table = SMALL if shard < GROWN_AT else GROWN
        tokens = list(chain.from_iterable(parts_of(table, int(one), vocabulary) for one in shard_of(shard)))
        count = window_count(len(tokens), LENGTH)
        places = window_order(window_key(RUN, node, shard), count)
        rows += [tokens[index * (LENGTH + 1) : (index + 1) * (LENGTH + 1)] for index in places]
    return rows[:windows]


@pytest.mark.parametrize("vocabulary", [VOCABULARY, SMALL.next_merge_id, FIRST_MERGE_ID, GROWN.next_merge_id])
def test_every_peer_gets_the_same_windows_in_the_runs_vocabulary(grown: Path, tmp_path: Path, vocabulary: int) -> None:
    async def work() -> None:
        for node in (NODE, NodeId("12D3KooWOther")):
            feed = await make_feed(grown, tmp_path / node, vocabulary, node)
            rows = rows_of(await feed.next_batch(250))
            assert rows == stream_of(node, vocabulary, 250)
            assert max(max(row) for row in rows) < vocabulary
            again = await make_feed(grown, tmp_path / node, vocabulary, node)  # now from its cache
            assert rows_of(await again.next_batch(250)) == rows

    run(work)


def test_a_run_pinned_before_the_table_grew_reads_on_and_one_made_later_reads_all(grown: Path, tmp_path: Path) -> None:
    """The held-out shards are in the run's vocabulary too."""

    async def work() -> None:
        feed = await make_feed(grown, tmp_path, VOCABULARY)
        held_out = await feed.held_out_sequences(8)
        assert int(held_out.max()) < VOCABULARY
        text = Tokenizer(GROWN.restricted_to(VOCABULARY)).decode_bytes(held_out[0].tolist())
        assert text.decode() in "".join(TEXTS) + "".join(TEXTS)

    run(work)


def test_only_a_shard_that_needs_a_table_fetches_it_and_a_404_heals(grown: Path, tmp_path: Path) -> None:
    """The run pins the first table; the second is in the archive, which answers 404 at first."""
    files = folder_files(grown)
    assigned = Assignment(RUN, NODE, SHARDS)
    late = next(shard for shard in map(assigned.shard_at, range(assigned.length)) if shard >= GROWN_AT)
    name = f"tokenizers/{GROWN.sha256}.json"

    async def work() -> None:
        with HostileServer(files) as server:
            feed = await make_feed(server.url, tmp_path, SMALL.next_merge_id)
            (tmp_path / "store" / f"tokenizer-{GROWN.sha256}.json").unlink()
            server.files = {**files, "tokenizer.json": SMALL.to_json()}
            server.requests.clear()
            server.behaviours[name] = [hostile.answers(404)]
            rows = rows_of(await feed.next_batch(len(stream_of(NODE, SMALL.next_merge_id, 10_000))))
            assert rows == stream_of(NODE, SMALL.next_merge_id, 10_000)
            assert len(server.asked_for(name)) == 2
            assert late not in [rotation.shard for rotation in feed.rotations if rotation.reason.value == "unusable"]
            whole = await make_feed(server.url, tmp_path / "whole", GROWN.next_merge_id)
            (tmp_path / "whole" / "store" / f"tokenizer-{GROWN.sha256}.json").unlink()
            server.requests.clear()
            await whole.next_batch(250)
            assert not [asked for asked, _ in server.requests if "tokenizer" in asked]

    run(work)


def test_a_table_that_does_not_continue_the_runs_is_refused(tmp_path: Path) -> None:
    other = learn_merges([text[::-1] for text in TEXTS], len(SMALL.merges))
    for table, stop in ((GROWN, 14), (other, 16)):
        writer = GenesisWriter(FolderDestination(tmp_path / "g"), tokens_per_shard=TOKENS)
        for _ in range(writer.shard_count, stop):
            writer.add_shard(np.full(TOKENS, table.next_merge_id - 1))
        writer.finish(TestSigner(), tokenizer=table.to_json(), next_merge_id=table.next_merge_id, now="")

    async def work() -> None:
        feed = await make_feed(tmp_path / "g", tmp_path, VOCABULARY)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(feed.next_batch, 1)
            while "does not continue the one of this run" not in feed.status().explanation:
                await anyio.sleep(0.002)
            tasks.cancel_scope.cancel()

    run(work)


@given(st.lists(st.integers(10, GROWN.next_merge_id - 1), max_size=300), st.integers(FIRST_MERGE_ID, 400))
def test_expanded_ids_are_lower_and_mean_the_same_bytes(ids: list[int], vocabulary: int) -> None:
    vocabulary = min(vocabulary, GROWN.next_merge_id)
    tokens = np.array(ids, dtype=np.uint16)
    expanded = TokenExpansion(GROWN, vocabulary).expand(tokens, 100_000)
    assert all(one < vocabulary for one in expanded)
    assert expanded.tolist() == list(chain.from_iterable(parts_of(GROWN, one, vocabulary) for one in ids))
    assert Tokenizer(GROWN).decode_bytes(expanded.tolist()) == Tokenizer(GROWN).decode_bytes(ids)


def test_a_shard_that_would_become_too_large_is_refused_before_it_is_made() -> None:
    tokens = np.full(300_000, GROWN.next_merge_id - 1, dtype=np.uint16)
    with pytest.raises(DataError, match="at most 300,001 fit"):
        TokenExpansion(GROWN, FIRST_MERGE_ID).expand(tokens, 300_001)


def test_merges_with_too_many_parts_are_refused_before_they_are_made() -> None:
    """Doublings to 256 bytes, and very many of them."""
    doubled = [(10, 10), *((FIRST_MERGE_ID + i, FIRST_MERGE_ID + i) for i in range(7))]
    long = FIRST_MERGE_ID + 7
    table = TokenizerTable((*doubled, *[(long, 10)] * 70_000), 10**6)
    with pytest.raises(DataError, match="larger vocabulary"):
        TokenExpansion(table, FIRST_MERGE_ID)


def test_ids_of_both_tables_are_kept_in_the_cache_as_they_came(grown: Path, tmp_path: Path) -> None:
    """What is given to other nodes is the file itself, not this run's reading of it."""

    async def work() -> None:
        feed = await make_feed(grown, tmp_path, FIRST_MERGE_ID)
        await feed.next_batch(250)
        genesis = await open_genesis(make_fetcher(grown), tmp_path / "store")
        cache = ShardCache(tmp_path / "cache", limit_bytes=10**9)
        for shard in cache.shards():
            cached = cache.get(shard, await genesis.shard_digest(shard) or b"", genesis.manifest.shard_form(shard))
            assert cached is not None
            assert cached.tokens.tolist() == shard_of(shard).tolist()

    run(work)
