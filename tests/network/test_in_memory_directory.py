from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from random import Random
from typing import Literal

import pytest
import trio
from trio.testing import MockClock

from neuroshard.identity import (
    NodeIdentity,
    read_claim,
    sign_claim,
)
from neuroshard.network import InMemoryNetwork, MessageTooLargeError, TransportClosedError
from neuroshard.network.in_memory import RecordTable
from neuroshard.network.transport import MAX_RECORD_BYTES, RECORD_SECONDS, DirectoryRecord
from neuroshard.types import NodeId
from tests.worlds.claims import identity_of

START = 1_700_000_000.0
DAY = 86_400.0
SPACE = "run/0"


class Words(DirectoryRecord, frozen=True):
    words: Literal["well"]


@dataclass
class World:
    network: InMemoryNetwork

    def now(self) -> float:
        return START + trio.current_time()

    def join(self, number: int, delegated_for: float = DAY) -> NodeIdentity:
        identity = identity_of(number, START + delegated_for)
        self.network.join(identity.node_id)
        return identity

    def record(self, identity: NodeIdentity, words: str = "here I am", kind: str = "announcement") -> bytes:
        return sign_claim(identity, kind, {"words": words}, self.now()).encode()

    async def announce(self, identity: NodeIdentity, words: str = "here I am") -> None:
        await self.network.network_of(identity.node_id).directory.announce(SPACE, self.record(identity, words))

    async def find(self, identity: NodeIdentity, limit: int = 64) -> dict[NodeId, str]:
        found = await self.network.network_of(identity.node_id).directory.find(SPACE, limit)
        claims = [read_claim(record, object) for record in found]
        return {claim.delegation.node_id: str(claim.payload) for claim in claims}


def run(scenario: Callable[[World], Awaitable[None]]) -> None:
    with InMemoryNetwork(now=lambda: START + trio.current_time()) as network:
        trio.run(scenario, World(network), clock=MockClock(autojump_threshold=0))


def test_records_are_found_by_namespace_the_newest_of_each_node() -> None:
    async def scenario(world: World) -> None:
        a, b, c = (world.join(number) for number in (1, 2, 3))
        await world.announce(a, "old")
        await trio.sleep(1)
        await world.announce(a, "new")
        await world.announce(b)
        assert await world.find(c) == {a.node_id: "{'words': 'new'}", b.node_id: "{'words': 'here I am'}"}
        assert len(await world.find(c, limit=1)) == 1
        assert await world.network.network_of(c.node_id).directory.find("run/1") == ()

    run(scenario)


def test_an_older_record_replaces_no_newer_one() -> None:
    async def scenario(world: World) -> None:
        a = world.join(1)
        old = world.record(a, "old")
        await trio.sleep(1)
        await world.announce(a, "new")
        assert not world.network.records.store(SPACE, a.node_id, old, a.node_id)
        assert list((await world.find(a)).values()) == ["{'words': 'new'}"]

    run(scenario)


def test_records_expire_and_so_do_those_of_the_dead() -> None:
    async def scenario(world: World) -> None:
        a, b, short = world.join(1), world.join(2), world.join(3, delegated_for=60)
        for node in (a, b, short):
            await world.announce(node)
        world.network.kill(a.node_id)
        assert set(await world.find(b)) == {a.node_id, b.node_id, short.node_id}
        await trio.sleep(61)
        assert set(await world.find(b)) == {a.node_id, b.node_id}
        await trio.sleep(RECORD_SECONDS)
        assert await world.find(b) == {}

    run(scenario)


def test_lies_never_get_in_and_are_counted() -> None:
    async def scenario(world: World) -> None:
        liar, victim, reader = (world.join(number) for number in (1, 2, 3))
        table = world.network.records
        forged = world.record(victim).replace(b"here I am", b"elsewhere")
        for owner, record in (
            (victim, world.record(liar)),  # signed, but under another's name
            (victim, forged),
            (victim, b"\x00garbage"),
            (victim, bytes(MAX_RECORD_BYTES + 1)),
            (liar, world.record(liar, kind="report")),
            (liar, sign_claim(liar, "announcement", {}, world.now() + DAY).encode()),
            (liar, sign_claim(liar, "announcement", {}, world.now() - DAY).encode()),
        ):
            assert not table.store(SPACE, owner.node_id, record, liar.node_id)
        assert table.refused == 7
        assert await world.find(reader) == {}
        with pytest.raises(MessageTooLargeError):
            await world.network.network_of(liar.node_id).directory.announce(SPACE, bytes(MAX_RECORD_BYTES + 1))

    run(scenario)


def test_what_says_no_such_thing_as_a_record_is_refused_and_counted() -> None:
    async def scenario(world: World) -> None:
        a, b = (world.join(number) for number in (1, 2))
        table = RecordTable(world.network.links, Random(0), world.now, form=Words)
        for node, words in ((a, "well"), (b, "ill")):
            record = sign_claim(node, "announcement", {"words": words}, world.now()).encode()
            assert table.store(SPACE, node.node_id, record, node.node_id) == (node is a)
        assert table.refused == 1
        assert len(table.find(SPACE, 64, b.node_id)) == 1

    run(scenario)


def test_a_partition_hides_what_the_other_side_stored() -> None:
    async def scenario(world: World) -> None:
        a, b, neutral = (world.join(number) for number in (1, 2, 3))
        world.network.partition([a.node_id], [b.node_id])
        await world.announce(a)
        await world.announce(b)
        assert set(await world.find(a)) == {a.node_id}
        assert set(await world.find(b)) == {b.node_id}
        assert set(await world.find(neutral)) == {a.node_id, b.node_id}
        world.network.partition()
        assert set(await world.find(a)) == {a.node_id, b.node_id}

    run(scenario)


def test_a_namespace_is_bounded_and_keeps_the_newest() -> None:
    async def scenario(world: World) -> None:
        table = RecordTable(world.network.links, Random(0), world.now, max_records=4)
        nodes = [world.join(number) for number in range(1, 10)]
        for node in nodes:
            assert table.store(SPACE, node.node_id, world.record(node), node.node_id)
            await trio.sleep(1)
        found = table.find(SPACE, 64, nodes[0].node_id)
        assert {read_claim(record, object).delegation.node_id for record in found} == {n.node_id for n in nodes[-4:]}

    run(scenario)


def test_a_node_that_left_finds_and_stores_nothing() -> None:
    async def scenario(world: World) -> None:
        a = world.join(1)
        directory = world.network.network_of(a.node_id).directory
        world.network.kill(a.node_id)
        with pytest.raises(TransportClosedError):
            await directory.announce(SPACE, world.record(a))
        with pytest.raises(TransportClosedError):
            await directory.find(SPACE)

    run(scenario)
