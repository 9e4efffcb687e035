"""The feed on bad sources, bad shards, small limits and full disks: it waits, skips or says what is wrong."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from neuroshard.data.data_set import open_genesis
from neuroshard.data.feed import DataFeed
from neuroshard.data.shard_assignment import RotationReason
from neuroshard.data.shard_cache import ShardCache
from neuroshard.data.shard_file import shard_bytes
from neuroshard.data.windows import Batch
from neuroshard.errors import DataError, StorageError
from tests.worlds import file_servers as hostile
from tests.worlds.data_sets import (
    ASSIGNED,
    LENGTH,
    NODE,
    RUN,
    VOCABULARY,
    expected_window,
    folder_files,
    make_feed,
    make_fetcher,
    rows_of,
    run,
    shard_tokens,
    write_genesis,
)
from tests.worlds.file_servers import Behaviour, HostileServer


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
            server.behaviours[f"shard_{ASSIGNED.shard_at(0)}.bin"] = list(trouble)
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
            server.behaviours[f"shard_{ASSIGNED.shard_at(1)}.bin"] = [trouble] * 50
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
    one = 800
    limit = one + 2 * 800

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


def test_a_lower_cache_limit_holds_at_the_next_start_and_at_once(folder: Path, tmp_path: Path) -> None:
    """The shard in use stays, and training goes on with it."""

    def cached() -> int:
        return sum(path.stat().st_size for path in (tmp_path / "cache").iterdir())

    async def work() -> None:
        first = await make_feed(folder, tmp_path)
        for _ in range(5):
            await first.next_batch(19)
        assert cached() == 4 * 800
        feed = await make_feed(folder, tmp_path, start=first.position, limit=3 * 800)
        assert cached() == 3 * 800
        shard = feed.position.shard
        feed.limit_storage(800)
        assert cached() == 800
        assert next((tmp_path / "cache").iterdir()).name.startswith(f"shard_{shard}-")
        again = await make_feed(folder, tmp_path, start=feed.position, limit=1)
        assert rows_of(await again.next_batch(5)) == [expected_window(i) for i in range(95, 100)]

    run(work)


def test_a_higher_cache_limit_lets_the_next_shard_be_fetched(folder: Path, tmp_path: Path) -> None:
    one = 800

    async def work() -> None:
        feed = await make_feed(folder, tmp_path, limit=one)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(feed.run)
            await feed.next_batch(1)
            assert not feed.status().next_shard_ready
            feed.limit_storage(one + 800)
            while not feed.status().next_shard_ready:
                await anyio.sleep(0.002)
            tasks.cancel_scope.cancel()

    run(work)


def test_a_cache_limit_below_one_shard_is_told(folder: Path, tmp_path: Path) -> None:
    async def work() -> None:
        feed = await make_feed(folder, tmp_path, limit=799)
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
            resource.setrlimit(resource.RLIMIT_FSIZE, (700, hard))
            try:
                tasks.start_soon(train)
                while "no space left" not in feed.status().explanation:
                    await anyio.sleep(0.002)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert rows_of(batches[0]) == [expected_window(i) for i in range(3)]

    run(work)


def test_a_cache_that_is_moved_away_is_waited_for_and_counts_as_before(folder: Path, tmp_path: Path) -> None:
    place = tmp_path / "cache"

    async def work() -> None:
        feed = await make_feed(folder, tmp_path)
        await feed.next_batch(3)
        before = feed.status().cached_shards
        place.rename(tmp_path / "elsewhere")
        batches: list[Batch] = []

        async def train() -> None:
            batches.extend([await feed.next_batch(3) for _ in range(12)])

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(train)
            while "no longer exists" not in feed.status().explanation:
                await anyio.sleep(0.002)
            assert not place.exists()
            (tmp_path / "elsewhere").rename(place)
        assert len(batches) == 12
        assert feed.status().cached_shards > before

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
            cache = ShardCache(tmp_path / "cache", limit_bytes=10**9)
            feed = DataFeed(
                genesis, cache, run_id=RUN, node_id=NODE, sequence_length=LENGTH, vocabulary_size=VOCABULARY
            )
            assert rows_of(await feed.next_batch(3)) == [expected_window(i) for i in range(3)]
            assert asked > 0
            assert server.requests == []

    run(work)


def test_unverified_folder_with_shards_of_other_lengths(tmp_path: Path) -> None:
    source = tmp_path / "minimal"
    source.mkdir()
    for shard in range(4):
        data = shard_bytes(shard_tokens(shard, 8 if shard == 1 else 100 + shard * 50), "pt")
        (source / f"shard_{shard}.pt").write_bytes(data)
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


def test_shards_larger_than_an_unverified_manifest_says_never_break_the_storage_limit(tmp_path: Path) -> None:
    source = tmp_path / "minimal"
    source.mkdir()
    for shard in range(4):
        (source / f"shard_{shard}.pt").write_bytes(shard_bytes(shard_tokens(shard, 20_000), "pt"))
    (source / "manifest.json").write_text('{"total_shards": 4, "total_tokens": 400}')
    (source / "tokenizer.json").write_text("{}")

    async def work() -> None:
        feed = await make_feed(source, tmp_path, limit=170_000)  # a file of 160 kB would fit
        with anyio.move_on_after(0.3) as scope:
            await feed.next_batch(1)
        assert scope.cancelled_caught  # such files are refused, and the search goes on
        assert feed.status().cached_shards == 0

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


def test_ids_that_a_shards_table_lacks_are_never_trained_on(tmp_path: Path) -> None:
    write_genesis(tmp_path / "g", tokens=400, next_merge_id=500)

    async def work() -> None:
        feed = await make_feed(tmp_path / "g", tmp_path, vocabulary=500)
        with anyio.move_on_after(0.3) as scope:
            await feed.next_batch(1)
        assert scope.cancelled_caught
        assert feed.status().cached_shards == 0

    run(work)


def used_by(home: Path) -> int:
    return sum(path.stat().st_size for path in home.rglob("*") if path.is_file())


def test_descriptions_count_within_the_limit(folder: Path, tmp_path: Path) -> None:
    """A page and a table that come late take the room of the shards that were used longest ago."""
    home = tmp_path / "home"
    one = 800

    async def work() -> None:
        genesis = await open_genesis(make_fetcher(folder), home / "descriptions")
        limit = one + used_by(home) + 512 + 4 * 800
        cache = ShardCache(home, limit_bytes=limit, descriptions=home / "descriptions")
        feed = DataFeed(genesis, cache, run_id=RUN, node_id=NODE, sequence_length=LENGTH, vocabulary_size=VOCABULARY)
        for _ in range(40):
            await feed.next_batch(13)
            assert used_by(home) <= limit
        assert feed.status().cached_bytes == used_by(home)
        cached = feed.status().cached_shards
        genesis.store.keep("tokenizer-late.json", bytes(limit - used_by(home) + 1))
        assert used_by(home) <= limit
        assert feed.status().cached_shards == cached - 1
        genesis.store.keep("tokenizer-huge.json", bytes(limit))
        assert not (home / "descriptions" / "tokenizer-huge.json").exists()
        assert rows_of(await feed.next_batch(1)) == [expected_window(40 * 13)]

    run(work)


def test_a_limit_that_the_descriptions_fill_is_told(folder: Path, tmp_path: Path) -> None:
    async def work() -> None:
        genesis = await open_genesis(make_fetcher(folder), tmp_path / "descriptions")
        genesis.store.keep("tokenizer-large.json", bytes(80_000))
        cache = ShardCache(tmp_path, limit_bytes=81_500, descriptions=tmp_path / "descriptions")
        feed = DataFeed(genesis, cache, run_id=RUN, node_id=NODE, sequence_length=LENGTH, vocabulary_size=VOCABULARY)
        with pytest.raises(StorageError, match=r"what is in use takes 0\.1 MB.*--max-storage"):
            await feed.next_batch(1)

    run(work)
