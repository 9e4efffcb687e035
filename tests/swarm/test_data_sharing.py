"""Nodes in memory that give each other a data set's files, by a virtual clock; one may lie, stop or be busy."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import TypeVar

import anyio
import anyio.lowlevel
import pytest
import trio
from trio.testing import MockClock

from neuroshard.config.run_parameters import GenesisPins
from neuroshard.data.data_set import Genesis, open_genesis
from neuroshard.data.fetcher import Fetcher
from neuroshard.data.shard_cache import ShardCache
from neuroshard.data.shard_loader import ShardLoader
from neuroshard.data.source import FolderSource
from neuroshard.data.transfer import OpenedFile
from neuroshard.errors import DataUnavailableError, StorageError
from neuroshard.exchange.data_files import (
    DATA,
    REQUEST_LIMITS,
    DataClient,
    DataPart,
    DataPartAnswer,
    DataPartRequest,
    DataServer,
    DataServerLimits,
    DataStore,
    file_answer_frame,
    read_file_answer,
)
from neuroshard.messages import Frame
from neuroshard.network import InMemoryNetwork, ScoreReason, Transport
from neuroshard.network.in_memory_links import Link
from neuroshard.status.data import ShardOrigin, ShardUse
from neuroshard.types import NodeId, RunId, ShardId
from tests.worlds.data_sets import VOCABULARY, TestSigner, shard_tokens, write_genesis

Value = TypeVar("Value")
RUN = RunId("7" * 64)
TOKENS = 300_000  # more than one part
HERE = NodeId("here")


async def at_once(function: Callable[[], Value], /) -> Value:
    await anyio.lowlevel.checkpoint()
    return function()


async def known_digest(genesis: Genesis, shard: int) -> bytes:
    """Of a shard, from now on in memory."""
    digest = await genesis.shard_digest(ShardId(shard))
    assert digest is not None
    return digest


class Cdn:
    """A folder that can be cut off."""

    description = "a CDN"

    def __init__(self, folder: Path) -> None:
        self._folder = FolderSource(folder)
        self.is_up = True
        self.asked: list[str] = []

    @asynccontextmanager
    async def open(
        self, name: str, offset: int = 0, validator: str | None = None, known: str | None = None
    ) -> AsyncGenerator[OpenedFile]:
        self.asked.append(name)
        if not self.is_up:
            raise DataUnavailableError("The CDN cannot be reached.")
        async with self._folder.open(name, offset, validator) as opened:
            yield opened

    async def aclose(self) -> None:
        """Nothing is held."""


@dataclass
class GivingNode:
    """A node with the data set's files."""

    name: NodeId
    giver: DataServer
    transport: Transport
    asked: list[DataPartRequest] = field(default_factory=list[DataPartRequest])
    change: Callable[[DataPartRequest, Frame], Frame] = lambda _wanted, frame: frame

    async def give(self, sender: NodeId, frame: Frame) -> Frame:
        wanted = frame.read(DataPartRequest)
        self.asked.append(wanted)
        return self.change(wanted, await self.giver.give(sender, frame))


@dataclass
class World:
    """One node that needs data, and others that may have them."""

    network: InMemoryNetwork
    cdn: Cdn
    shelf: DataStore
    asker: DataClient
    fetcher: Fetcher
    folder: Path
    pins: GenesisPins
    givers: dict[NodeId, GivingNode] = field(default_factory=dict[NodeId, GivingNode])
    accused: list[tuple[NodeId, ScoreReason]] = field(default_factory=list[tuple[NodeId, ScoreReason]])

    def add(self, name: str, limits: DataServerLimits | None = None) -> GivingNode:
        transport = self.network.join(NodeId(name))
        giver = DataServer(RUN, self.shelf.find, lambda node: node != "stranger", limits or DataServerLimits(), at_once)
        node = GivingNode(NodeId(name), giver, transport)
        transport.serve(DATA, node.give, REQUEST_LIMITS)
        self.givers[node.name] = node
        return node

    async def genesis(self) -> Genesis:
        return await open_genesis(self.fetcher, self.folder / "store", pins=self.pins)

    async def load(self, genesis: Genesis, shard: int) -> list[int]:
        cache = ShardCache(self.folder / "cache", limit_bytes=10**9)
        cached = await ShardLoader(genesis, cache, vocabulary_size=VOCABULARY).load(ShardId(shard), keep=())
        return cached.tokens[:5].tolist()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shared") / "genesis"
    write_genesis(folder, shards=4, tokens=TOKENS, signer=TestSigner())
    return folder


@pytest.fixture(scope="module")
def shelf(source: Path, tmp_path_factory: pytest.TempPathFactory) -> DataStore:
    """What a node has that opened the data set and cached shards 0 and 1."""
    here = tmp_path_factory.mktemp("giver")
    cache = ShardCache(here / "cache", limit_bytes=10**9)

    async def fill() -> None:
        genesis = await open_genesis(Fetcher(FolderSource(source)), here / "store")
        for number in (0, 1):
            shard = ShardId(number)
            digest = await known_digest(genesis, number)
            with cache.writer(shard, digest) as writer:
                writer.write((source / f"shard_{number}.bin").read_bytes())
                cache.take(shard, digest, genesis.manifest.shard_form(shard), writer)

    anyio.run(fill)
    return DataStore(here / "store", cache)


@pytest.fixture(scope="module")
def pins(source: Path, tmp_path_factory: pytest.TempPathFactory) -> GenesisPins:
    async def opened() -> GenesisPins:
        genesis = await open_genesis(Fetcher(FolderSource(source)), tmp_path_factory.mktemp("pins"))
        return genesis.pins(VOCABULARY)

    return anyio.run(opened)


@pytest.fixture
def play(
    source: Path, shelf: DataStore, pins: GenesisPins, tmp_path: Path, inline_threads: None
) -> Callable[[Callable[[World], Awaitable[Value]]], Value]:
    def played(scenario: Callable[[World], Awaitable[Value]]) -> Value:
        async def main() -> Value:
            with InMemoryNetwork() as network:
                accused = list[tuple[NodeId, ScoreReason]]()
                cdn = Cdn(source)
                asker = DataClient(
                    RUN,
                    network.join(HERE),
                    lambda _name: list(world.givers),
                    Random(1),
                    lambda node, reason: accused.append((node, reason)),
                )
                fetcher = Fetcher(cdn, others=asker, rng=Random(1))
                world = World(network, cdn, shelf, asker, fetcher, tmp_path, pins, accused=accused)
                with anyio.fail_after(10_000):
                    return await scenario(world)

        return trio.run(main, clock=MockClock(autojump_threshold=0))

    return played


def first_of(shard: int) -> list[int]:
    return shard_tokens(shard, 5).tolist()


def test_without_its_source_a_node_opens_the_data_and_gets_shards_from_another(
    play: Callable[[Callable[[World], Awaitable[None]]], None],
) -> None:
    async def scenario(world: World) -> None:
        world.cdn.is_up = False
        giver = world.add("giver")
        genesis = await world.genesis()
        assert genesis.verified
        assert await world.load(genesis, 0) == first_of(0)
        table = f"tokenizers/{world.pins.tokenizer_sha256}.json"
        assert [one.name for one in giver.asked[:3]] == ["manifest.json", table, "pages/00000.bin"]
        assert giver.giver.bytes_given < 2 * TOKENS + 20_000  # a quarter of the file
        assert world.fetcher.files_from_others == 4
        assert world.fetcher.refused_files == 0

    play(scenario)


def test_while_the_source_works_nobody_else_is_asked_and_it_is_again_when_it_is_back(
    play: Callable[[Callable[[World], Awaitable[None]]], None],
) -> None:
    async def scenario(world: World) -> None:
        giver = world.add("giver")
        genesis = await world.genesis()
        assert await world.load(genesis, 3) == first_of(3)
        assert giver.asked == []
        world.cdn.is_up = False
        assert await world.load(genesis, 0) == first_of(0)
        asked = len(world.cdn.asked)
        assert await world.load(genesis, 1) == first_of(1)
        assert len(world.cdn.asked) == asked  # it has just failed
        world.cdn.is_up = True
        assert await world.load(genesis, 2) == first_of(2)  # nobody has this one
        given = len(giver.asked)
        await anyio.sleep(60)
        (world.folder / "cache" / next(iter(path.name for path in (world.folder / "cache").iterdir()))).unlink()
        assert await world.load(genesis, 0) == first_of(0)
        assert len(giver.asked) == given

    play(scenario)


def flipped(frame: Frame) -> Frame:
    data = bytearray(frame.tensors[0].data)
    data[len(data) // 2] ^= 1
    return file_answer_frame(DataPart(read_file_answer(frame, 0).file_bytes, bytes(data)))


def test_a_node_that_gives_other_contents_is_refused_accused_and_left_alone(
    play: Callable[[Callable[[World], Awaitable[None]]], None],
) -> None:
    async def scenario(world: World) -> None:
        genesis = await world.genesis()
        await known_digest(genesis, 0)
        world.cdn.is_up = False
        liar = world.add("liar")
        liar.change = lambda wanted, frame: flipped(frame) if wanted.start == 0 else frame
        with anyio.move_on_after(20):
            await world.load(genesis, 0)
        assert world.accused == [(NodeId("liar"), ScoreReason.DIGEST_MISMATCH)]
        assert not world.asker.may_have("shard_0.bin", "00" * 32)
        world.add("giver")
        assert await world.load(genesis, 0) == first_of(0)
        assert world.fetcher.refused_files == 1

    play(scenario)


@pytest.mark.parametrize("size", [10**11, 0, 2 * TOKENS + 2, 2 * TOKENS - 1, -1, 2**40 + 1])
def test_impossible_sizes_are_refused_before_anything_is_kept(
    play: Callable[[Callable[[World], Awaitable[None]]], None], size: int
) -> None:
    def lying(_wanted: DataPartRequest, frame: Frame) -> Frame:
        return Frame(DATA, DataPartAnswer(size), frame.tensors)

    async def scenario(world: World) -> None:
        genesis = await world.genesis()
        await known_digest(genesis, 0)
        world.cdn.is_up = False
        world.add("liar").change = lying
        with anyio.move_on_after(20):
            await world.load(genesis, 0)
        assert world.fetcher.files_from_others == 0
        assert not any((world.folder / "cache").iterdir())

    play(scenario)


def test_a_giver_that_dies_half_way_is_replaced(play: Callable[[Callable[[World], Awaitable[None]]], None]) -> None:
    async def scenario(world: World) -> None:
        genesis = await world.genesis()
        await known_digest(genesis, 0)
        world.cdn.is_up = False

        def dying(wanted: DataPartRequest, frame: Frame) -> Frame:
            if wanted.start:
                world.network.kill(NodeId("first"))
                del world.givers[NodeId("first")]
                world.add("second")
            return frame

        world.add("first").change = dying
        assert await world.load(genesis, 0) == first_of(0)
        assert world.accused == []

    play(scenario)


def test_what_is_not_of_the_run_gets_nothing(play: Callable[[Callable[[World], Awaitable[None]]], None]) -> None:
    async def scenario(world: World) -> None:
        giver = world.add("giver").giver
        genesis = await world.genesis()
        digest = await known_digest(genesis, 0)
        for sender, wanted, words in (
            ("stranger", DataPartRequest(RUN, "shard_0.bin", digest.hex()), "members"),
            ("here", DataPartRequest(RunId("8" * 64), "shard_0.bin", digest.hex()), "not of that run"),
            ("here", DataPartRequest(RUN, "shard_0.bin", "00" * 32), "is not here"),
            ("here", DataPartRequest(RUN, "shard_2.bin", digest.hex()), "is not here"),
            ("here", DataPartRequest(RUN, "../../etc/passwd", digest.hex()), "is not here"),
            ("here", DataPartRequest(RUN, "shard_0.bin", digest.hex(), 10**9), "no such part"),
        ):
            with pytest.raises(Exception, match=words):
                await giver.give(NodeId(sender), Frame(DATA, wanted))
        assert giver.bytes_given == 0

    play(scenario)


def test_upload_stays_within_its_share_and_whoever_would_wait_long_is_sent_away(
    play: Callable[[Callable[[World], Awaitable[None]]], None],
) -> None:
    async def scenario(world: World) -> None:
        genesis = await world.genesis()
        digest = await known_digest(genesis, 0)
        giver = world.add("giver", DataServerLimits(receivers=2)).giver
        giver.limit_upload(200_000)  # bytes a second for everything
        frame = Frame(DATA, DataPartRequest(RUN, "shard_0.bin", digest.hex()))
        began, refusals = anyio.current_time(), list[str]()

        async def take(node: str) -> None:
            for _ in range(3):
                try:
                    await giver.give(NodeId(node), frame)
                except Exception as error:  # noqa: BLE001 - the kind is what is tested below
                    refusals.append(str(error))

        async with anyio.create_task_group() as tasks:
            for node in ("a", "b", "c"):
                tasks.start_soon(take, node)
        seconds = anyio.current_time() - began
        assert giver.bytes_given <= 100_000 * (seconds + 0.25) + 256 * 1024
        assert any("Others fetch" in reason for reason in refusals)

    play(scenario)


def test_a_slow_and_lossy_line_still_brings_the_shard(
    play: Callable[[Callable[[World], Awaitable[None]]], None],
) -> None:
    async def scenario(world: World) -> None:
        genesis = await world.genesis()
        await known_digest(genesis, 0)
        world.cdn.is_up = False
        world.add("giver")
        world.network.set_link(NodeId("giver"), HERE, Link(delay_seconds=0.5, loss=0.1))
        assert await world.load(genesis, 0) == first_of(0)

    play(scenario)


def test_shards_from_others_obey_the_storage_limit(play: Callable[[Callable[[World], Awaitable[None]]], None]) -> None:
    async def scenario(world: World) -> None:
        world.cdn.is_up = False
        world.add("giver")
        genesis = await world.genesis()
        folder, one = world.folder / "cache", 2 * TOKENS
        cache = ShardCache(folder, limit_bytes=one)
        loader = ShardLoader(genesis, cache, vocabulary_size=VOCABULARY)
        for shard in (0, 1, 0):
            await loader.load(ShardId(shard), keep=())
            assert sum(path.stat().st_size for path in folder.iterdir()) <= one
            assert loader.status_of(ShardId(shard), ShardUse.IN_USE).origin is ShardOrigin.NODE
        assert cache.shards() == (0,)
        cache.change_limit(one - 1, keep=())
        with pytest.raises(StorageError, match="--max-storage"):
            await loader.load(ShardId(1), keep={ShardId(0)})

    play(scenario)
