"""The feed: exact order, exact resume, rotation, prefetch, and patience with a source in trouble."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import anyio
import hostile_server as hostile
import numpy as np
import pytest
import torch
from genesis_samples import VOCABULARY, TestSigner, folder_files, make_fetcher, shard_tokens, write_genesis
from hostile_server import Behaviour, HostileServer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from neuroshard.data.assignment import Assignment, held_out_shards, is_held_out
from neuroshard.data.cache import ShardCache
from neuroshard.data.feed import DataFeed
from neuroshard.data.genesis.torch_file import write_shard
from neuroshard.data.opening import open_genesis
from neuroshard.data.rotation import RotationReason
from neuroshard.data.windows import Batch, window_key, window_order
from neuroshard.errors import DataError, StorageError
from neuroshard.types import DataPosition, NodeId, RunId, ShardId

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
    cache = ShardCache(folder / "cache", limit_bytes=limit, vocabulary_size=vocabulary)
    return DataFeed(
        genesis, cache, run_id=RUN, node_id=node, sequence_length=LENGTH, start=start, start_node=start_node
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("genesis")
    write_genesis(folder, tokens=TOKENS, signer=TestSigner())
    return folder


def expected_window(number: int) -> list[int]:
    """Window `number` of the node's stream, recomputed as a peer would."""
    order, window = divmod(number, 25)
    shard = ASSIGNED.shard_at(order)
    index = int(window_order(window_key(RUN, NODE, shard), 25)[window])
    return shard_tokens(shard, TOKENS)[index * 16 : index * 16 + 16].tolist()


def rows_of(batch: Batch) -> list[list[int]]:
    return torch.cat([batch.input_ids, batch.labels[:, -1:]], dim=1).tolist()


def test_batches_are_the_windows_a_peer_computes_across_shards_and_passes(folder: Path, tmp_path: Path) -> None:
    async def work() -> None:
        feed = await make_feed(folder, tmp_path)
        number = 0
        for size in [7, 25, 1, 60, 8, 200, 100]:
            batch = await feed.next_batch(size)
            assert batch.input_ids.shape == batch.labels.shape == (size, LENGTH)
            assert batch.token_count == size * LENGTH
            assert rows_of(batch) == [expected_window(number + i) for i in range(size)]
            number += size
            order, window = divmod(number, 25)
            assert batch.position == feed.position == DataPosition(order, ASSIGNED.shard_at(order), window)
        assert feed.status().passes == 1
        assert feed.status().shards_seen == 15
        assert feed.status().rotations == 16

    run(work)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(before=st.lists(st.integers(1, 40), max_size=5), after=st.lists(st.integers(1, 40), min_size=1, max_size=5))
def test_resuming_anywhere_gives_the_same_batches(
    folder: Path, tmp_path: Path, before: list[int], after: list[int]
) -> None:
    async def work() -> None:
        feed = await make_feed(folder, tmp_path)
        position = None
        for size in before:
            position = (await feed.next_batch(size)).position
        resumed = await make_feed(folder, tmp_path, start=position, start_node=NODE)
        assert resumed.restart_reason is None
        for size in after:
            wanted, got = await feed.next_batch(size), await resumed.next_batch(size)
            assert torch.equal(wanted.input_ids, got.input_ids)
            assert torch.equal(wanted.labels, got.labels)
            assert wanted.position == got.position

    run(work)


def test_under_another_node_the_assignment_starts_anew_and_says_so(folder: Path, tmp_path: Path) -> None:
    async def work() -> None:
        position = DataPosition(3, ASSIGNED.shard_at(3), 4)
        other = await make_feed(folder, tmp_path, start=position, start_node=NODE, node=NodeId("other"))
        assert other.position == DataPosition(0, Assignment(RUN, NodeId("other"), 16).shard_at(0), 0)
        assert "starts anew" in other.status().explanation
        odd = await make_feed(folder, tmp_path, start=DataPosition(3, ShardId(ASSIGNED.shard_at(3) + 1), 4))
        assert odd.restart_reason is not None
        assert odd.position.order == odd.position.window == 0

    run(work)


def test_held_out_sequences_are_pinned_and_never_trained_on(folder: Path, tmp_path: Path) -> None:
    async def work() -> None:
        a = await make_feed(folder, tmp_path / "a")
        b = await make_feed(folder, tmp_path / "b", node=NodeId("other"))
        held = await a.held_out()
        assert held.sequences.shape == (25, LENGTH + 1)  # the shard has no more
        assert torch.equal(held.sequences, await b.held_out_sequences())
        assert torch.equal(held.sequences[:10], await a.held_out_sequences(10))
        assert len({tuple(row) for row in held.sequences.tolist()}) == 25
        (shard,) = held_out_shards(RUN, 16)
        counts = np.bincount(shard_tokens(shard, TOKENS))
        share = counts[counts > 0] / TOKENS
        assert held.unigram_entropy == pytest.approx(-(share * np.log(share)).sum())
        shards = {(await a.next_batch(25)).position.shard for _ in range(15)}
        assert not any(is_held_out(RUN, shard, 16) for shard in shards)

    run(work)


def test_plateau_rotates_at_the_next_batch_only_and_is_recorded(folder: Path, tmp_path: Path) -> None:
    async def work() -> None:
        feed = await make_feed(folder, tmp_path)
        await feed.next_batch(5, step=1)
        for step in range(20):
            feed.note_evaluation(0.01, None, step)
        assert feed.position.order == 0
        batch = await feed.next_batch(2, step=21)
        assert rows_of(batch) == [expected_window(25), expected_window(26)]
        assert [(r.shard, r.first_step, r.reason) for r in feed.rotations] == [
            (ASSIGNED.shard_at(1), 21, RotationReason.MEMORISED)
        ]
        assert "memorised" in feed.status().last_rotation_reason
        for step in range(30):
            feed.note_evaluation(2.0, 3.5 if step == 25 else None, step)
        assert (await feed.next_batch(1)).position.order == 2
        assert feed.rotations[-1].reason is RotationReason.OVERFITTED
        assert (await feed.next_batch(1)).position.order == 2

    run(work)


def test_the_next_shard_is_fetched_ahead(folder: Path, tmp_path: Path) -> None:
    async def work() -> None:
        with HostileServer(folder_files(folder)) as server:
            feed = await make_feed(server.url, tmp_path)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(feed.run)
                for order in range(3):
                    while not feed.status().next_shard_ready:
                        await anyio.sleep(0.002)
                    fetched = [name for name, _ in server.requests if name.startswith("shard_")]
                    assert fetched == [f"shard_{ASSIGNED.shard_at(i)}.pt" for i in range(order + 2)]
                    await feed.next_batch(25)
                tasks.cancel_scope.cancel()

    run(work)


def test_next_batch_and_prefetch_fetch_a_shard_once(folder: Path, tmp_path: Path) -> None:
    async def work() -> None:
        with HostileServer(folder_files(folder)) as server:
            feed = await make_feed(server.url, tmp_path)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(feed.run)
                tasks.start_soon(feed.held_out)
                await feed.next_batch(60)
                tasks.cancel_scope.cancel()
            assert len(server.requests) == len(set(server.requests))

    run(work)


def shard_troubles() -> list[list[Behaviour]]:
    return [
        [hostile.answers(500)] * 3,
        [hostile.answers(404)] * 2,
        [hostile.serves(bytes(4000))] * 2,
        [hostile.drops_after(1000)] * 4,
        [hostile.claims_length(10**12)],
        [hostile.never_ends],
        [hostile.serves(b"")],
    ]


@pytest.mark.parametrize("trouble", shard_troubles())
def test_troubled_shards_come_right_in_the_end(folder: Path, tmp_path: Path, trouble: list[Behaviour]) -> None:
    async def work() -> None:
        with HostileServer(folder_files(folder)) as server:
            server.behaviours[f"shard_{ASSIGNED.shard_at(0)}.pt"] = list(trouble)
            feed = await make_feed(server.url, tmp_path)
            assert rows_of(await feed.next_batch(3)) == [expected_window(i) for i in range(3)]

    run(work)


def test_training_starts_by_itself_when_the_source_returns(folder: Path, tmp_path: Path) -> None:
    async def work() -> None:
        with HostileServer(folder_files(folder)) as server:
            feed = await make_feed(server.url, tmp_path)
            server.default = hostile.answers(503)
            batches: list[Batch] = []

            async def train() -> None:
                batches.append(await feed.next_batch(3))

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(train)
                while "HTTP 503" not in feed.status().explanation:
                    await anyio.sleep(0.002)
                waiting = [item for item in feed.status().downloads if item.retry_at is not None]
                assert waiting
                server.default = hostile.honest
            assert rows_of(batches[0]) == [expected_window(i) for i in range(3)]
            assert feed.status().downloads == ()

    run(work)


@pytest.mark.parametrize("trouble", [hostile.answers(404), hostile.serves(bytes(4000)), hostile.never_ends])
def test_one_shard_that_stays_bad_is_skipped_and_recorded(folder: Path, tmp_path: Path, trouble: Behaviour) -> None:
    async def work() -> None:
        with HostileServer(folder_files(folder)) as server:
            server.behaviours[f"shard_{ASSIGNED.shard_at(1)}.pt"] = [trouble] * 50
            feed = await make_feed(server.url, tmp_path)
            rows = rows_of(await feed.next_batch(30))
            assert rows == [expected_window(i) for i in [*range(25), *range(50, 55)]]
            assert [r.reason for r in feed.rotations] == [RotationReason.EXHAUSTED, RotationReason.UNUSABLE]
            assert feed.position.order == 2

    run(work)


def test_when_everything_is_missing_nothing_is_skipped(folder: Path, tmp_path: Path) -> None:
    async def work() -> None:
        with HostileServer(folder_files(folder)) as server:
            feed = await make_feed(server.url, tmp_path)
            server.behaviours["pages/00000.bin"] = [hostile.honest]
            server.default = hostile.answers(404)
            batches: list[Batch] = []

            async def train() -> None:
                batches.append(await feed.next_batch(3))

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(train)
                while len({name for name, _ in server.requests if name.startswith("shard_")}) < 3:
                    await anyio.sleep(0.002)
                server.default = hostile.honest
            assert batches[0].position.order <= 2
            assert [r.reason for r in feed.rotations] == [RotationReason.UNUSABLE] * batches[0].position.order

    run(work)


def test_cancelling_consumes_nothing(folder: Path, tmp_path: Path) -> None:
    async def work() -> None:
        with HostileServer(folder_files(folder)) as server:
            feed = await make_feed(server.url, tmp_path)
            await feed.next_batch(20)
            server.default = hostile.answers(500)
            with anyio.move_on_after(0.1):
                await feed.next_batch(10)
            assert feed.position.window == 20
            server.default = hostile.honest
            assert rows_of(await feed.next_batch(10)) == [expected_window(i) for i in range(20, 30)]

    run(work)


def test_cache_limit_is_never_exceeded_and_eviction_keeps_going(folder: Path, tmp_path: Path) -> None:
    one = 400 * 8 + 64 * 1024 + 928
    limit = one + 2 * 928

    async def work() -> None:
        feed = await make_feed(folder, tmp_path, limit=limit)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(feed.run)
            for number in range(20):
                assert rows_of(await feed.next_batch(25))[0] == expected_window(number * 25)
                assert sum(path.stat().st_size for path in (tmp_path / "cache").iterdir()) <= limit
                await anyio.sleep(0)
            assert feed.status().cached_bytes <= limit
            tasks.cancel_scope.cancel()

    run(work)


def test_a_cache_limit_below_one_shard_is_told(folder: Path, tmp_path: Path) -> None:
    async def work() -> None:
        feed = await make_feed(folder, tmp_path, limit=10_000)
        with pytest.raises(StorageError, match="--max-storage"):
            await feed.next_batch(1)

    run(work)


def test_a_full_disk_is_waited_out(folder: Path, tmp_path: Path) -> None:
    resource = pytest.importorskip("resource", reason="needs POSIX resource limits")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    async def work() -> None:
        feed = await make_feed(folder, tmp_path)
        batches: list[Batch] = []

        async def train() -> None:
            batches.append(await feed.next_batch(3))

        async with anyio.create_task_group() as tasks:
            resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, hard))
            try:
                tasks.start_soon(train)
                while "no space left" not in feed.status().explanation:
                    await anyio.sleep(0.002)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert rows_of(batches[0]) == [expected_window(i) for i in range(3)]

    run(work)


def test_a_bit_flip_in_the_cache_leads_to_a_new_download(folder: Path, tmp_path: Path) -> None:
    async def work() -> None:
        await (await make_feed(folder, tmp_path)).next_batch(1)
        for path in (tmp_path / "cache").iterdir():
            data = bytearray(path.read_bytes())
            data[-3] ^= 1
            path.write_bytes(data)
        feed = await make_feed(folder, tmp_path)
        assert rows_of(await feed.next_batch(3)) == [expected_window(i) for i in range(3)]

    run(work)


def test_a_second_start_needs_no_source(folder: Path, tmp_path: Path) -> None:
    async def work() -> None:
        with HostileServer(folder_files(folder)) as server:
            first = await make_feed(server.url, tmp_path)
            await first.next_batch(3)
            asked = len(server.requests)
            fetcher = make_fetcher(server.url)
            pins = (await open_genesis(fetcher, tmp_path / "store")).pins(VOCABULARY)
            server.requests.clear()
            genesis = await open_genesis(fetcher, tmp_path / "store", pins=pins)
            cache = ShardCache(tmp_path / "cache", limit_bytes=10**9, vocabulary_size=VOCABULARY)
            feed = DataFeed(genesis, cache, run_id=RUN, node_id=NODE, sequence_length=LENGTH)
            assert rows_of(await feed.next_batch(3)) == [expected_window(i) for i in range(3)]
            assert asked > 0
            assert server.requests == []

    run(work)


def test_unverified_folder_with_shards_of_other_lengths(tmp_path: Path) -> None:
    source = tmp_path / "minimal"
    source.mkdir()
    for shard in range(4):
        with (source / f"shard_{shard}.pt").open("wb") as file:
            write_shard(file, shard_tokens(shard, 8 if shard == 1 else 100 + shard * 50))
    (source / "manifest.json").write_text('{"total_shards": 4, "total_tokens": 700}')
    (source / "tokenizer.json").write_text("{}")

    async def work() -> None:
        feed = await make_feed(source, tmp_path)
        assert not feed.status().verified
        assert "Unverified" in feed.status().explanation
        batch = await feed.next_batch(40)
        assert batch.input_ids.shape == (40, LENGTH)
        assert feed.position.order >= 3  # past the short one and around

    run(work)


def test_shards_shorter_than_a_sequence_are_an_error_not_an_endless_loop(tmp_path: Path) -> None:
    write_genesis(tmp_path / "g", tokens=LENGTH, shards=4)

    async def work() -> None:
        feed = await make_feed(tmp_path / "g", tmp_path)
        with pytest.raises(DataError, match="shorter than one sequence"):
            await feed.next_batch(1)
        with pytest.raises(DataError, match="shorter than one sequence"):
            await feed.held_out_sequences()

    run(work)


def test_ids_outside_the_vocabulary_are_never_trained_on(folder: Path, tmp_path: Path) -> None:
    async def work() -> None:
        feed = await make_feed(folder, tmp_path, vocabulary=100)
        with anyio.move_on_after(0.3) as scope:
            await feed.next_batch(1)
        assert scope.cancelled_caught
        assert feed.status().cached_shards == 0

    run(work)
