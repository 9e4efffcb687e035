"""Looking again at the source of a run's data: what is new is told, what is wrong is refused, training goes on."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import anyio
import pytest
from trio.testing import MockClock

from neuroshard.config.run_parameters import GenesisPins
from neuroshard.data.data_set import Genesis, open_genesis
from neuroshard.data.feed import DataFeed
from neuroshard.data.manifest import parse_manifest
from neuroshard.data.shard_cache import ShardCache
from neuroshard.data.source import ShardSource, open_source
from neuroshard.data.source_monitor import RefreshTimes, SourceMonitor
from neuroshard.data.tokenizer import learn_merges
from neuroshard.data.transfer import FileUnchangedError
from neuroshard.dataset import GenesisServer
from neuroshard.dataset.destination import FolderDestination
from neuroshard.dataset.writer import GenesisWriter
from neuroshard.status.data import RefreshState
from tests.worlds import file_servers as hostile
from tests.worlds.data_sets import (
    LENGTH,
    NODE,
    RUN,
    TOKENS,
    TestSigner,
    expected_window,
    folder_files,
    make_fetcher,
    rows_of,
    run,
    shard_tokens,
    write_genesis,
)
from tests.worlds.file_servers import HostileServer, Request

TABLE = learn_merges(["the theory of the other mother, the the weather"] * 3, 10)
GROWN = learn_merges(["whether the feather or the leather"] * 3, 10, TABLE)
IDS = 1000  # of the samples' shards; what the tables say is not looked at where they are not read


def publish(folder: Path, shards: int, signer: TestSigner | None = None, table: bytes = TABLE.to_json()) -> None:
    ids = GROWN.next_merge_id if table == GROWN.to_json() else TABLE.next_merge_id
    writer = GenesisWriter(FolderDestination(folder), tokens_per_shard=TOKENS)
    for shard in range(writer.shard_count, shards):
        writer.add_shard(shard_tokens(shard, TOKENS) % 266)
    writer.finish(signer or TestSigner(), tokenizer=table, next_merge_id=ids, now="2026-01-01T00:00:00Z")


def files_of(
    folder: Path, shards: int, signer: TestSigner | None = None, table: bytes = TABLE.to_json()
) -> dict[str, bytes]:
    publish(folder, shards, signer, table)
    return folder_files(folder)


@dataclass
class Node:
    """A node of a run that was made when the data set had 16 shards."""

    server: HostileServer
    genesis: Genesis
    feed: DataFeed
    watch: SourceMonitor
    before: dict[str, bytes]

    async def state(self) -> RefreshState:
        await self.watch.look()
        return self.watch.status.state

    async def trains_on(self, windows: int) -> bool:
        """The feed gives exactly what it would have given had nothing changed."""
        first = self.feed.position.order * 25 + self.feed.position.window
        rows = rows_of(await self.feed.next_batch(windows))
        expected = [[token % 266 for token in expected_window(first + i)] for i in range(windows)]
        return rows == expected


async def node_on(server: HostileServer, home: Path, clock: Callable[[], float] = lambda: 1000.0) -> Node:
    genesis = await open_genesis(make_fetcher(server.url), home / "store")
    pins = genesis.pins(TABLE.next_merge_id)
    feed = DataFeed(
        genesis,
        ShardCache(home / "cache", limit_bytes=10**9),
        run_id=RUN,
        node_id=NODE,
        sequence_length=LENGTH,
        vocabulary_size=pins.next_merge_id,
    )
    times = RefreshTimes(attempt_seconds=1.0)
    watch = SourceMonitor(genesis, pins, rng=Random(1), times=times, wall_clock=clock)
    await feed.next_batch(1)
    return Node(server, genesis, feed, watch, dict(server.files))


def test_a_look_at_unchanged_data_costs_no_body(tmp_path: Path) -> None:
    asked: list[str | None] = []

    def conditional(request: Request, body: bytes | None) -> None:
        assert body is not None
        asked.append(request.headers.get("If-None-Match"))
        if asked[-1] == hostile.etag_of(body):
            request.head(304, ETag=hostile.etag_of(body))
        else:
            hostile.honest(request, body)

    async def work() -> None:
        with HostileServer(files_of(tmp_path / "g", 16)) as server:
            node = await node_on(server, tmp_path)
            server.behaviours["manifest.json"] = [conditional] * 4
            assert [await node.state() for _ in range(3)] == [RefreshState.CURRENT] * 3
            assert asked == [None, hostile.etag_of(server.files["manifest.json"])] * 1 + asked[1:2]
            server.files |= files_of(tmp_path / "g", 17)
            assert await node.state() is RefreshState.GROWN

    run(work)


def test_our_own_server_and_folders_tell_what_did_not_change(tmp_path: Path) -> None:
    publish(tmp_path / "g", 16)

    async def shards_unless(source: ShardSource, known: str | None) -> tuple[int, str | None]:
        async with source.open("manifest.json", known=known) as opened:
            data = b"".join([chunk async for chunk in opened.chunks])
            return parse_manifest(data).total_shards, opened.validator

    async def work() -> None:
        with GenesisServer(tmp_path / "g") as server:
            for shards, location in ((17, server.url), (18, str(tmp_path / "g"))):
                source = open_source(location)
                _, validator = await shards_unless(source, None)
                assert validator
                with pytest.raises(FileUnchangedError):
                    await shards_unless(source, validator)
                publish(tmp_path / "g", shards)
                assert (await shards_unless(source, validator))[0] == shards
                await source.aclose()

    run(work)


def test_growth_is_told_and_moves_nobody(tmp_path: Path) -> None:
    async def work() -> None:
        with HostileServer(files_of(tmp_path / "g", 16)) as server:
            node = await node_on(server, tmp_path)
            kept = sorted((tmp_path / "store").iterdir())
            server.files = files_of(tmp_path / "g", 40, table=GROWN.to_json())
            assert await node.state() is RefreshState.GROWN
            status = node.watch.status
            assert (status.newest_shards, status.newest_tokens) == (40, 40 * TOKENS)
            assert status.newest_ids == GROWN.next_merge_id
            assert "24 shards more than the 16 of this run" in status.explanation
            assert await node.trains_on(120)
            assert node.feed.status().total_shards == 16
            assert sorted((tmp_path / "store").iterdir()) == kept  # whatever grows elsewhere takes no room here

    run(work)


def wrong_key(node: Node, folder: Path) -> dict[str, bytes]:
    shutil.rmtree(folder)
    return files_of(folder, 20, signer=TestSigner(2))


def unsigned(node: Node, folder: Path) -> dict[str, bytes]:
    shutil.rmtree(folder)
    write_genesis(folder, shards=20, tokens=TOKENS)
    return folder_files(folder)


def malformed(node: Node, folder: Path) -> dict[str, bytes]:
    return {**node.before, "manifest.json": b"{]"}


def other_data(node: Node, folder: Path) -> dict[str, bytes]:
    shutil.rmtree(folder)
    write_genesis(folder, shards=20, tokens=TOKENS + 1, signer=TestSigner())
    return folder_files(folder)


def older(node: Node, folder: Path) -> dict[str, bytes]:
    shutil.rmtree(folder)
    return files_of(folder, 12)


def truncated_page(node: Node, folder: Path) -> dict[str, bytes]:
    files = files_of(folder, 40)
    return {**files, "pages/00000.bin": files["pages/00000.bin"][:-7]}


def manifest_before_its_page(node: Node, folder: Path) -> dict[str, bytes]:
    return {**files_of(folder, 40), "pages/00000.bin": node.before["pages/00000.bin"]}


def manifest_before_its_table(node: Node, folder: Path) -> dict[str, bytes]:
    files = files_of(folder, 40, table=GROWN.to_json())
    return {name: data for name, data in files.items() if name != f"tokenizers/{GROWN.sha256}.json"} | {
        "tokenizer.json": TABLE.to_json()
    }


def no_manifest(node: Node, folder: Path) -> dict[str, bytes]:
    return {name: data for name, data in node.before.items() if name != "manifest.json"}


@pytest.mark.parametrize(
    ("trouble", "state", "words"),
    [
        (wrong_key, RefreshState.REFUSED, "is signed by"),
        (unsigned, RefreshState.REFUSED, "not signed, although this source was signed before"),
        (malformed, RefreshState.REFUSED, "malformed"),
        (other_data, RefreshState.REFUSED, "created with another data set"),
        (older, RefreshState.OLDER, "12 shards, but there were 16"),
        (truncated_page, RefreshState.INCOMPLETE, "pages/00000.bin would have 1273 bytes"),
        (manifest_before_its_page, RefreshState.INCOMPLETE, "pages/00000.bin"),
        (manifest_before_its_table, RefreshState.INCOMPLETE, "tokenizer"),
        (no_manifest, RefreshState.UNREACHABLE, "has no manifest.json"),
    ],
)
def test_trouble_is_told_training_goes_on_and_what_heals_is_seen(
    tmp_path: Path, trouble: Callable[[Node, Path], dict[str, bytes]], state: RefreshState, words: str
) -> None:
    async def work() -> None:
        with HostileServer(files_of(tmp_path / "g", 16)) as server:
            node = await node_on(server, tmp_path)
            assert await node.state() is RefreshState.CURRENT
            await node.feed.next_batch(24)
            server.files = trouble(node, tmp_path / "g")
            assert await node.state() is state
            assert words in node.watch.status.explanation
            assert node.watch.status.newest_shards == 16  # what was known before stays
            server.files = {**node.before, **{n: d for n, d in server.files.items() if n == "manifest.json"}}
            assert await node.trains_on(60)
            shutil.rmtree(tmp_path / "g")
            server.files = files_of(tmp_path / "g", 18)
            assert await node.state() is RefreshState.GROWN

    run(work)


def test_an_old_manifest_after_a_newer_one_is_told(tmp_path: Path) -> None:
    """As from a cache of a CDN that is behind: the shards are all there."""

    async def work() -> None:
        with HostileServer(files_of(tmp_path / "g", 16)) as server:
            node = await node_on(server, tmp_path)
            old = server.files["manifest.json"]
            server.files = files_of(tmp_path / "g", 20)
            assert await node.state() is RefreshState.GROWN
            server.files["manifest.json"] = old
            assert await node.state() is RefreshState.OLDER
            assert node.watch.status.newest_shards == 20
            assert await node.trains_on(60)

    run(work)


def test_a_swapped_shard_is_refused_and_fetched_again(tmp_path: Path) -> None:
    """A new manifest with the shards of another publication."""

    async def work() -> None:
        with HostileServer(files_of(tmp_path / "g", 16)) as server:
            node = await node_on(server, tmp_path)
            following = node.feed.status().shard
            assert following is not None
            name, other = f"shard_{following + 1}.bin", server.files["shard_0.bin"]
            server.behaviours[name] = [hostile.serves(other)] * 2
            assert await node.trains_on(60)
            assert node.genesis.fetcher.refused_files == 2

    run(work)


def test_the_network_away_is_told_and_its_return_is_seen(tmp_path: Path) -> None:
    async def work() -> None:
        with HostileServer(files_of(tmp_path / "g", 16)) as server:
            node = await node_on(server, tmp_path)
            server.default = hostile.answers(503)
            assert await node.state() is RefreshState.UNREACHABLE
            server.default = server.stalls_after(10)
            assert await node.state() is RefreshState.UNREACHABLE
            assert "within 1 s" in node.watch.status.explanation
            assert await node.trains_on(20)  # from the cache
            server.default = hostile.honest
            assert await node.state() is RefreshState.CURRENT

    run(work)


@pytest.mark.parametrize("clock", [0.0, -1e9, 4e9])
def test_a_wrong_clock_changes_nothing(tmp_path: Path, clock: float) -> None:
    async def work() -> None:
        with HostileServer(files_of(tmp_path / "g", 16)) as server:
            node = await node_on(server, tmp_path, lambda: clock)
            assert await node.state() is RefreshState.CURRENT
            server.files = files_of(tmp_path / "g", 20)
            assert await node.state() is RefreshState.GROWN
            assert node.watch.status.checked_at == clock
            assert await node.trains_on(60)

    run(work)


def test_an_unsigned_source_that_was_signed_once_must_stay_signed(tmp_path: Path) -> None:
    async def work() -> None:
        write_genesis(tmp_path / "g", shards=16, tokens=TOKENS)
        genesis = await open_genesis(make_fetcher(tmp_path / "g"), tmp_path / "store")
        watch = SourceMonitor(genesis, genesis.pins(IDS))

        async def look_at(shards: int, signer: TestSigner | None) -> RefreshState:
            shutil.rmtree(tmp_path / "g")
            write_genesis(tmp_path / "g", shards=shards, tokens=TOKENS, signer=signer)
            await watch.look()
            return watch.status.state

        assert [await look_at(16, signer) for signer in (None, TestSigner())] == [RefreshState.CURRENT] * 2
        assert [await look_at(17, signer) for signer in (None, TestSigner(2))] == [RefreshState.REFUSED] * 2

    run(work)


class NotedWatch(SourceMonitor):
    """Notes when it looks."""

    looks: list[float]

    async def run(self) -> None:
        self.looks = []
        await super().run()

    async def look(self) -> None:
        self.looks.append(anyio.current_time())
        await super().look()


@pytest.mark.usefixtures("inline_threads")
def test_looks_are_apart_and_spread(tmp_path: Path) -> None:
    """Two nodes that start together do not look together."""
    publish(tmp_path / "g", 16)

    async def times_of(seed: int) -> list[float]:
        genesis = await open_genesis(make_fetcher(tmp_path / "g"), tmp_path / "store")
        watch = NotedWatch(genesis, genesis.pins(TABLE.next_merge_id), rng=Random(seed))
        began = anyio.current_time()
        with anyio.move_on_after(3600):
            await watch.run()
        return [then - began for then in watch.looks]

    one, other = (
        anyio.run(times_of, seed, backend="trio", backend_options={"clock": MockClock(autojump_threshold=0)})
        for seed in (1, 2)
    )
    for times in (one, other):
        waits = [b - a for a, b in zip([0.0, *times], times, strict=False)]
        assert len(times) >= 9
        assert all(225 <= wait <= 376 for wait in waits)
    assert not {round(time) for time in one} & {round(time) for time in other}


def test_pins_of_a_run_with_fewer_ids_are_watched_too(tmp_path: Path) -> None:
    async def work() -> None:
        publish(tmp_path / "g", 16)
        genesis = await open_genesis(make_fetcher(tmp_path / "g"), tmp_path / "store")
        pins: GenesisPins = replace(genesis.pins(TABLE.next_merge_id), next_merge_id=268)
        watch = SourceMonitor(genesis, pins)
        publish(tmp_path / "g", 17, table=GROWN.to_json())
        await watch.look()
        assert watch.status.state is RefreshState.GROWN

    run(work)
