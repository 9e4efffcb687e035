from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from random import Random

import anyio
from msgspec import structs

from neuroshard.identity import read_claim
from neuroshard.membership.announcements import Announcement, directory_namespace
from neuroshard.membership.claim_intake import signed_announcement
from neuroshard.membership.handshake import HANDSHAKES_AT_ONCE, WANTED_PEERS, KnownPeers
from neuroshard.membership.participant import OwnMessages, Participant
from neuroshard.membership.reports import TrainingReport
from neuroshard.membership.swarm_status import ShardCoverage
from neuroshard.model.architecture import StagePlan
from neuroshard.network import InMemoryNetwork, Link, PeerUnreachableError
from neuroshard.types import NodeId, RunId
from tests.worlds.claims import DAY, OTHER_RUN, REPORT, RUN, announcement_of, clock, identity_of
from tests.worlds.clock import run_virtually

TOTAL_SHARDS = 640


@dataclass
class Node:
    number: int
    net: InMemoryNetwork
    run: RunId = RUN
    now: Callable[[], float] = clock
    steps: int = 0
    version: str = "0.2.0"
    learned: set[str] = field(default_factory=set[str])
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)

    def __post_init__(self) -> None:
        self.identity = identity_of(self.number)
        self.node_id = self.identity.node_id
        words = OwnMessages(self._report, self._announcement)
        self.participant = Participant(
            self.identity,
            self.run,
            ShardCoverage(self.run, TOTAL_SHARDS),
            words,
            self._learn,
            plan=StagePlan.even(12, 1),
            now=self.now,
            random=Random(self.number),
        )

    def _report(self) -> TrainingReport:
        return structs.replace(REPORT, steps=self.steps, shards_seen=2)

    def _announcement(self) -> Announcement:
        return announcement_of(self.identity, run_id=self.run, version=self.version)

    def _learn(self, addresses: Iterable[str]) -> None:
        self.learned.update(addresses)

    async def live(self) -> None:
        self.net.join(self.node_id)
        with self.scope:
            await self.participant.live(self.net.network_of(self.node_id))

    def knows(self) -> set[NodeId]:
        return set(self.participant.membership.view.members) - {self.node_id}


@dataclass
class World:
    net: InMemoryNetwork
    tasks: anyio.abc.TaskGroup
    nodes: list[Node] = field(default_factory=list[Node])

    def start(self, count: int = 1, run: RunId = RUN, now: Callable[[], float] = clock) -> list[Node]:
        first = len(self.nodes)
        self.nodes += [Node(number, self.net, run, now) for number in range(first, first + count)]
        for node in self.nodes[first:]:
            self.tasks.start_soon(node.live)
        return self.nodes[first:]

    def all_know_all(self, nodes: Iterable[Node]) -> bool:
        ids = {node.node_id for node in nodes}
        return all(node.knows() == ids - {node.node_id} for node in nodes)


@asynccontextmanager
async def world() -> AsyncIterator[World]:
    with InMemoryNetwork(Random(3), default_link=Link(0.03), now=clock, record_form=Announcement) as net:
        async with anyio.create_task_group() as tasks:
            yield World(net, tasks)
            tasks.cancel_scope.cancel()


def test_a_newcomer_is_known_by_all_others_and_knows_them_within_three_seconds() -> None:
    async def scenario() -> None:
        async with world() as w:
            others = w.start(25)
            await anyio.sleep(20)
            (newcomer,) = w.start()
            newcomer.steps = 5
            await anyio.sleep(3)
            assert sum(newcomer.node_id in other.knows() for other in others) == 25
            assert len(newcomer.knows()) >= WANTED_PEERS  # by hello; the rest by their reports
            await anyio.sleep(12)
            assert w.all_know_all(w.nodes)

    run_virtually(scenario)


def test_the_status_tells_of_peers_their_versions_and_covered_shards() -> None:
    async def scenario() -> None:
        async with world() as w:
            nodes = w.start(5)
            for node in nodes:
                node.steps = 100
            await anyio.sleep(15)
            participant = nodes[0].participant
            peers, swarm = participant.status(w.net.network_of(nodes[0].node_id))
            assert {peer.node_id for peer in peers} == {node.node_id for node in nodes[1:]}
            assert {(peer.version, peer.state, peer.steps) for peer in peers} == {("0.2.0", "training", 100)}
            assert all(peer.connection is not None and peer.score > 0 for peer in peers)
            assert (swarm.nodes, swarm.training_nodes, swarm.total_steps) == (5, 5, 500)
            assert 5 < swarm.shards_covered <= 10  # two each, perhaps overlapping
            without, same = participant.status(None)
            assert same == swarm
            assert all(peer.connection is None for peer in without)
            assert participant.clock_warning is None

    run_virtually(scenario)


def test_two_runs_on_one_network_do_not_mix_and_nobody_is_banned() -> None:
    async def scenario() -> None:
        async with world() as w:
            ours, theirs = w.start(6), w.start(6, OTHER_RUN)
            await anyio.sleep(330)
            assert w.all_know_all(ours)
            assert w.all_know_all(theirs)
            for node in w.nodes:
                assert w.net.network_of(node.node_id).reputation.banned_peers() == ()

    run_virtually(scenario)


def test_everybody_is_found_in_the_directory_and_news_are_announced() -> None:
    async def scenario() -> None:
        async with world() as w:
            nodes = w.start(4)
            await anyio.sleep(0.1)
            reader = identity_of(500)
            w.net.join(reader.node_id)
            directory = w.net.network_of(reader.node_id).directory
            namespace = directory_namespace(RUN)
            assert len(await directory.find(namespace)) == 4  # at once
            nodes[0].version = "0.3.0"
            await anyio.sleep(120)
            records = [read_claim(record, Announcement) for record in await directory.find(namespace)]
            versions = {claim.delegation.node_id: claim.payload.version for claim in records}
            assert versions[nodes[0].node_id] == "0.3.0"
            await anyio.sleep(4000)
            assert len(await directory.find(namespace)) == 4  # announced again before they are too old
            assert {f"/memory/p2p/{node.node_id}" for node in nodes[1:]} <= nodes[0].learned

    run_virtually(scenario)


def test_false_records_in_the_directory_lead_nowhere() -> None:
    async def scenario() -> None:
        async with world() as w:
            liar = identity_of(500)
            w.net.join(liar.node_id)
            record = signed_announcement(liar, announcement_of(liar, run_id=OTHER_RUN), clock())
            await w.net.network_of(liar.node_id).directory.announce(directory_namespace(RUN), record)
            (node,) = w.start()
            await anyio.sleep(100)
            assert node.learned == set()
            assert dict(node.participant.membership.announcements) == {}

    run_virtually(scenario)


def test_an_owner_is_told_of_a_wrong_clock() -> None:
    async def scenario() -> None:
        async with world() as w:
            w.start(5)
            (ahead,) = w.start(now=lambda: clock() + DAY)
            (behind,) = w.start(now=lambda: clock() - 1800)
            await anyio.sleep(30)
            assert "24 hours ahead of the other nodes' clocks" in (ahead.participant.clock_warning or "")
            assert "30 minutes behind the other nodes' clocks" in (behind.participant.clock_warning or "")
            assert w.nodes[0].participant.clock_warning is None

    run_virtually(scenario)


def test_the_end_of_a_network_ends_the_part_and_the_next_network_goes_on_with_what_was_learnt() -> None:
    async def scenario() -> None:
        async with world() as w:
            nodes = w.start(3)
            await anyio.sleep(15)
            first = nodes[0]
            first.scope.cancel()
            await anyio.sleep(1)
            assert all(node.knows() == {nodes[1].node_id, nodes[2].node_id} - {node.node_id} for node in nodes[1:])
            w.net.kill(first.node_id)
            assert len(first.knows()) == 2
            first.scope = anyio.CancelScope()
            w.tasks.start_soon(first.live)
            await anyio.sleep(3)
            assert w.all_know_all(nodes)

    run_virtually(scenario)


def test_a_directory_that_cannot_be_reached_is_tried_again() -> None:
    class LateDirectory:
        """Like a directory before the first peer is there."""

        def __init__(self) -> None:
            self.asked = 0
            self.records: list[bytes] = []

        async def announce(self, _namespace: str, record: bytes) -> None:
            await anyio.lowlevel.checkpoint()
            self.asked += 1
            if self.asked < 3:
                raise PeerUnreachableError("Nobody is there yet.")
            self.records.append(record)

        async def find(self, _namespace: str, limit: int = 64) -> tuple[bytes, ...]:
            await anyio.lowlevel.checkpoint()
            return tuple(self.records[:limit])

    async def scenario() -> None:
        async with world() as w:
            node, late = Node(0, w.net), LateDirectory()
            w.net.join(node.node_id)
            w.tasks.start_soon(node.participant.live, replace(w.net.network_of(node.node_id), directory=late))
            await anyio.sleep(2.5)
            assert late.records == []
            await anyio.sleep(1)
            assert len(late.records) == 1

    run_virtually(scenario)


def test_acquaintances_are_few_chosen_by_chance_and_greeted_again_after_they_were_away() -> None:
    acquaintances = KnownPeers(Random(1))
    connected = {NodeId(f"node {number}") for number in range(100)}
    greeted: set[NodeId] = set()
    for look in range(10):
        chosen = acquaintances.next_to_greet(connected, float(look))
        assert len(chosen) <= HANDSHAKES_AT_ONCE
        assert not greeted & set(chosen)
        greeted.update(chosen)
        for peer in chosen:
            acquaintances.note_begun(peer)
            acquaintances.note_success(peer, float(look))
    assert len(greeted) == WANTED_PEERS
    gone = next(iter(greeted))
    assert acquaintances.next_to_greet(connected - {gone}, 20.0) != []  # one is missing now
    assert len(acquaintances.next_to_greet({gone}, 21.0)) == 1
    assert len(acquaintances.next_to_greet(connected, 2000.0)) > 0
    refusing = KnownPeers(Random(1))
    tries, now = [0.0], 0.0
    while now < 1000:
        if refusing.next_to_greet({gone}, now):
            refusing.note_begun(gone)
            assert refusing.next_to_greet({gone}, now) == []
            refusing.note_failure(gone, now)
            tries.append(now)
        now += 1.0
    assert tries[1:] == [0, 5, 15, 35, 75, 155, 315, 615, 915]
