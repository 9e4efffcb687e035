"""A run of many stages has several places in the directory, and all of its nodes are found there."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuroshard.membership.announcements import (
    GROUPS_OF_LOOK,
    MOST_GROUPS_OF_NODE,
    STAGES_OF_GROUP,
    Announcement,
    DirectoryGroups,
    directory_namespace,
)
from neuroshard.membership.claim_intake import ANNOUNCEMENT_RULES, REPORT_RULES, ClaimIntake
from neuroshard.membership.handshake import DIRECTORY_SECONDS, LATER_RECORDS, ClaimIntakes, Handshaker, Meeting
from neuroshard.membership.swarm_view import Membership
from neuroshard.model.architecture import StagePlan
from neuroshard.network import Directory, InMemoryNetwork, Network, PeerUnreachableError
from neuroshard.types import LayerRange, NodeId
from tests.worlds.claims import RUN, announcement_of, clock, identity_of
from tests.worlds.clock import run_virtually

STAGES = 20
PLAN = StagePlan.even(2 * STAGES, STAGES)
GROUPS = DirectoryGroups(RUN, PLAN)


def names(*groups: int) -> tuple[str, ...]:
    return tuple(directory_namespace(RUN, group) for group in groups)


@pytest.mark.parametrize("stages", [1, 2, STAGES_OF_GROUP])
@pytest.mark.parametrize("layers", [None, LayerRange(0, 1), LayerRange(3, 8)])
def test_a_run_of_few_stages_has_one_place(stages: int, layers: LayerRange | None) -> None:
    groups = DirectoryGroups(RUN, StagePlan.even(8, stages))
    assert groups.of(layers) == (f"{RUN}/0",)
    assert [groups.asked(look) for look in range(3)] == [(f"{RUN}/0",)] * 3


def test_a_node_is_found_where_its_stages_are() -> None:
    assert GROUPS.count == 3
    assert GROUPS.of(None) == names(0)  # where newcomers look too
    assert GROUPS.of(PLAN[7]) == names(0)
    assert GROUPS.of(PLAN[8]) == names(1)
    assert GROUPS.of(LayerRange(15, 17)) == names(0, 1)
    assert GROUPS.of(LayerRange(0, 40)) == names(0, 1, 2)
    assert GROUPS.of(LayerRange(38, 44)) == names(2)
    assert GROUPS.of(LayerRange(50, 60)) == names(0)  # no layers of this run
    many = DirectoryGroups(RUN, StagePlan.even(1024, 1024))
    assert len(many.of(LayerRange(0, 1024))) == MOST_GROUPS_OF_NODE < many.count


@given(stages=st.integers(1, 600), first=st.integers(0, 100))
def test_looks_are_bounded_and_soon_every_group_was_asked(stages: int, first: int) -> None:
    groups = DirectoryGroups(RUN, StagePlan.even(stages, stages))
    looks = -(-groups.count // GROUPS_OF_LOOK)
    asked = [groups.asked(first + look) for look in range(looks)]
    assert {name for look in asked for name in look} == set(names(*range(groups.count)))
    assert all(len(set(look)) == len(look) == min(GROUPS_OF_LOOK, groups.count) for look in asked)


class CountingDirectory:
    """Notes what a node does with its directory, which may have no answer at first."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self.announced: Counter[str] = Counter()
        self.found: list[tuple[str, int]] = []
        self.silent: set[str] = set()

    async def announce(self, namespace: str, record: bytes) -> None:
        if namespace in self.silent:
            raise PeerUnreachableError("Nobody keeps it.")
        self.announced[namespace] += 1
        await self._directory.announce(namespace, record)

    async def find(self, namespace: str, limit: int = 64) -> tuple[bytes, ...]:
        self.found.append((namespace, limit))
        return await self._directory.find(namespace, limit)


class Node:
    """Knows others by the directory alone: it greets nobody and hears no reports."""

    def __init__(self, number: int, net: InMemoryNetwork, layers: LayerRange | None) -> None:
        self.identity = identity_of(number)
        self.layers = layers
        self.membership = Membership(self.identity.node_id, self.identity.wallet_id)
        self._intakes = ClaimIntakes(ClaimIntake(ANNOUNCEMENT_RULES, RUN, clock), ClaimIntake(REPORT_RULES, RUN, clock))
        net.join(self.identity.node_id)
        network = net.network_of(self.identity.node_id)
        self.directory = CountingDirectory(network.directory)
        self.network: Network = replace(network, directory=self.directory)

    def _words(self) -> Announcement:
        return announcement_of(self.identity, layers=self.layers)

    async def live(self) -> None:
        chance = Random(self.identity.node_id)
        greeter = Handshaker(self.identity, self.membership, self._intakes, self._words, now=clock, random=chance)
        meeting = Meeting(greeter, self.membership, self._intakes.announcements, GROUPS, lambda _: None, random=chance)
        await meeting.announce_forever(self.network)

    def knows(self) -> set[NodeId]:
        return set(self.membership.announcements)


def test_nodes_of_different_groups_find_each_other_in_the_directory() -> None:
    async def scenario() -> None:
        with InMemoryNetwork(Random(1), now=clock) as net:
            nodes = [Node(stage, net, PLAN[stage]) for stage in range(STAGES)]
            nodes.append(Node(STAGES, net, None))  # a trainer
            async with anyio.create_task_group() as tasks:
                for node in nodes:
                    tasks.start_soon(node.live)
                await anyio.sleep(3)
                everybody = {node.identity.node_id for node in nodes}
                assert all(node.knows() == everybody - {node.identity.node_id} for node in nodes)
                newcomer = net.network_of(nodes[0].identity.node_id).directory
                assert len(await newcomer.find(directory_namespace(RUN))) == STAGES_OF_GROUP + 1
                for node in nodes:
                    node.directory.found.clear()
                await anyio.sleep(600)
                for node in nodes:
                    assert len(node.directory.found) <= GROUPS.count * (600 / DIRECTORY_SECONDS[-1] + 5)
                    assert {limit for _, limit in node.directory.found[: GROUPS.count]} == {64}
                    assert {limit for _, limit in node.directory.found[-GROUPS.count :]} == {LATER_RECORDS}
                tasks.cancel_scope.cancel()

    run_virtually(scenario)


def test_a_node_that_moves_is_announced_where_its_new_stage_is_looked_for_and_fades_where_the_old_one_was() -> None:
    async def scenario() -> None:
        with InMemoryNetwork(Random(1), now=clock) as net:
            node = Node(1, net, None)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(node.live)
                await anyio.sleep(10)
                node.layers = PLAN[19]
                await anyio.sleep(120)
                assert node.directory.announced == {f"{RUN}/0": 1, f"{RUN}/2": 1}
                await anyio.sleep(3600)
                assert await node.directory.find(directory_namespace(RUN)) == ()
                assert len(await node.directory.find(directory_namespace(RUN, 2))) == 1
                tasks.cancel_scope.cancel()

    run_virtually(scenario)


def test_a_group_that_nobody_keeps_hides_a_node_in_no_other() -> None:
    async def scenario() -> None:
        with InMemoryNetwork(Random(1), now=clock) as net:
            node = Node(1, net, LayerRange(0, 40))
            node.directory.silent.add(f"{RUN}/0")
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(node.live)
                await anyio.sleep(10)
                assert node.directory.announced == {f"{RUN}/1": 1, f"{RUN}/2": 1}
                node.directory.silent.clear()
                await anyio.sleep(60)
                assert node.directory.announced == {f"{RUN}/{group}": 1 for group in range(3)}
                tasks.cancel_scope.cancel()

    run_virtually(scenario)
