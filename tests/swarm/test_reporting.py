from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random

import anyio
from msgspec.structs import replace

from neuroshard.identity import NodeIdentity
from neuroshard.membership.claim_intake import REPORT_RULES, ClaimCache, ClaimIntake, signed_report
from neuroshard.membership.reporting import Listener, Reporter
from neuroshard.membership.reports import TrainingReport
from neuroshard.membership.swarm_view import Membership
from neuroshard.network import InMemoryNetwork, Link
from neuroshard.types import NodeId
from tests.worlds.claims import DAY, EPOCH, OTHER_RUN, REPORT, RUN, TOPIC, clock, identity_of
from tests.worlds.clock import run_virtually


@dataclass
class Node:
    """One node that reports and listens."""

    identity: NodeIdentity
    membership: Membership
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    reports: list[tuple[float, TrainingReport]] = field(default_factory=list[tuple[float, TrainingReport]])
    intake: ClaimIntake[TrainingReport] | None = None
    steps: int = 0
    started_at: float = field(default_factory=clock)

    @property
    def node_id(self) -> NodeId:
        return self.identity.node_id

    def knows(self) -> set[NodeId]:
        return set(self.membership.view.members) - {self.node_id}


@dataclass
class World:
    network: InMemoryNetwork
    tasks: anyio.abc.TaskGroup
    nodes: list[Node] = field(default_factory=list[Node])
    # one for all nodes: what each would verify itself is verified once
    cache: ClaimCache[TrainingReport] = field(default_factory=lambda: ClaimCache(REPORT_RULES))

    def start(self, count: int = 1, now: Callable[[], float] = clock) -> list[Node]:
        """Further nodes, at once."""
        first = len(self.nodes)
        for number in range(first, first + count):
            identity = identity_of(number)
            self.network.join(identity.node_id)
            node = Node(identity, Membership(identity.node_id, identity.wallet_id))
            self.nodes.append(node)
            self.tasks.start_soon(self._live, node, now)
        return self.nodes[first:]

    async def _live(self, node: Node, now: Callable[[], float]) -> None:
        def make_report() -> TrainingReport:
            report = replace(REPORT, steps=node.steps, started_at=node.started_at)
            node.reports.append((anyio.current_time(), report))
            return report

        network = self.network.network_of(node.node_id)
        node.intake = ClaimIntake(REPORT_RULES, RUN, now, self.cache)
        listener = Listener(node.intake, node.membership, TOPIC, now=now)
        reporter = Reporter(node.identity, RUN, TOPIC, make_report, node.membership, now=now, random=Random(1))
        with node.scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(listener.listen_forever, network)
                await anyio.sleep(0.01)
                tasks.start_soon(reporter.report_forever, network)

    async def kill(self, node: Node) -> None:
        """End a node without a word."""
        self.network.partition([node.node_id], [other.node_id for other in self.nodes if other is not node])
        node.scope.cancel()
        await anyio.sleep(3)
        self.network.kill(node.node_id)
        self.network.partition()

    def all_know_all(self, nodes: Sequence[Node]) -> bool:
        return all(node.knows() == {other.node_id for other in nodes} - {node.node_id} for node in nodes)

    def stranger(self, number: int) -> NodeIdentity:
        """A node of this network that says what the test wants."""
        identity = identity_of(1000 + number)
        self.network.join(identity.node_id)
        return identity

    async def publish(self, identity: NodeIdentity, data: bytes) -> None:
        await self.network.network_of(identity.node_id).gossip.publish(TOPIC, data)


@asynccontextmanager
async def world(default_link: Link | None = None) -> AsyncIterator[World]:
    with InMemoryNetwork(Random(2), default_link=default_link or Link(0.02), now=clock) as network:
        async with anyio.create_task_group() as tasks:
            yield World(network, tasks)
            for_all = tasks.cancel_scope
            for_all.cancel()


def test_nodes_that_start_together_know_each_other_at_once() -> None:
    async def scenario() -> None:
        async with world() as w:
            nodes = w.start(12)
            await anyio.sleep(1)
            assert w.all_know_all(nodes)
            for number, node in enumerate(nodes):
                node.steps = number
            await anyio.sleep(12)
            assert {node.membership.view.total_steps for node in nodes} == {sum(range(12))}

    run_virtually(scenario)


def test_a_newcomer_knows_and_is_known_within_two_seconds() -> None:
    async def scenario() -> None:
        async with world() as w:
            w.start(10)
            await anyio.sleep(33)
            (newcomer,) = w.start()
            await anyio.sleep(2)
            assert len(newcomer.knows()) == 10
            assert w.all_know_all(w.nodes)

    run_virtually(scenario)


def test_reports_come_at_intervals_and_answers_to_newcomers_are_bounded() -> None:
    async def scenario() -> None:
        async with world() as w:
            (first,) = w.start()
            await anyio.sleep(100)
            assert 9 <= len(first.reports) <= 14
            alone = len(first.reports)
            for _ in range(30):
                w.start()
                await anyio.sleep(0.1)
            assert len(first.reports) - alone <= 5  # thirty newcomers in three seconds
            await anyio.sleep(100)
            gaps = [b - a for (a, _), (b, _) in zip(first.reports[-8:], first.reports[-7:], strict=False)]
            assert all(8.9 <= gap <= 11.1 for gap in gaps)

    run_virtually(scenario)


def test_a_node_that_ends_says_so_and_is_no_member_at_once() -> None:
    async def scenario() -> None:
        async with world() as w:
            nodes = w.start(8)
            nodes[3].steps = 500
            await anyio.sleep(12)
            nodes[3].scope.cancel()
            await anyio.sleep(0.5)
            others = [node for node in nodes if node is not nodes[3]]
            assert w.all_know_all(others)
            assert {node.membership.view.total_steps for node in others} == {500}

    run_virtually(scenario)


def test_a_dead_node_is_forgotten_after_a_minute_and_its_work_is_not() -> None:
    async def scenario() -> None:
        async with world() as w:
            nodes = w.start(8)
            nodes[5].steps = 77
            await anyio.sleep(30)
            await w.kill(nodes[5])
            others = [node for node in nodes if node is not nodes[5]]
            await anyio.sleep(40)
            assert all(nodes[5].node_id in node.knows() for node in others)
            await anyio.sleep(32)
            assert w.all_know_all(others)
            assert {node.membership.view.total_steps for node in others} == {77}

    run_virtually(scenario)


def test_a_node_that_restarts_is_heard_again_although_its_count_of_reports_starts_anew() -> None:
    async def scenario() -> None:
        async with world() as w:
            nodes = w.start(4)
            nodes[0].steps = 50
            await anyio.sleep(20)
            await w.kill(nodes[0])
            await anyio.sleep(1)
            w.network.join(nodes[0].node_id)
            again = Node(nodes[0].identity, Membership(nodes[0].node_id, nodes[0].identity.wallet_id), steps=60)
            w.nodes[0] = again
            w.tasks.start_soon(w._live, again, clock)
            await anyio.sleep(3)
            assert w.all_know_all(w.nodes)
            assert {node.membership.view.total_steps for node in w.nodes} == {60}

    run_virtually(scenario)


def test_a_partition_splits_the_view_and_healing_makes_it_whole() -> None:
    async def scenario() -> None:
        async with world() as w:
            nodes = w.start(20)
            for node in nodes:
                node.steps = 10
            await anyio.sleep(12)
            left, right = nodes[:7], nodes[7:]
            w.network.partition([n.node_id for n in left], [n.node_id for n in right])
            await anyio.sleep(30)
            assert w.all_know_all(nodes)  # nobody is given up before a minute
            await anyio.sleep(60)
            assert w.all_know_all(left)
            assert w.all_know_all(right)
            nodes[0].steps = nodes[19].steps = 25
            w.network.partition()
            await anyio.sleep(12)
            assert w.all_know_all(nodes)
            assert {node.membership.view.total_steps for node in nodes} == {18 * 10 + 2 * 25}

    run_virtually(scenario)


def test_a_lossy_network_loses_no_member() -> None:
    async def scenario() -> None:
        async with world(Link(delay_seconds=0.1, loss=0.3)) as w:
            nodes = w.start(20)
            await anyio.sleep(30)
            for _ in range(20):
                await anyio.sleep(10)
                assert w.all_know_all(nodes)

    run_virtually(scenario)


def test_lies_are_refused_scored_and_leave_no_trace() -> None:
    async def scenario() -> None:
        async with world() as w:
            nodes = w.start(6)
            await anyio.sleep(5)
            liar = w.stranger(1)
            honest = signed_report(nodes[0].identity, replace(REPORT, sequence=int(clock() * 1000) + 1), clock())
            forged = signed_report(liar, replace(REPORT, sequence=1), clock())
            lies = {
                "replayed_claim": signed_report(nodes[0].identity, replace(REPORT, sequence=5), clock() - 200),
                "foreign_claim": signed_report(liar, replace(REPORT, run_id=OTHER_RUN), clock()),
                "expired_claim": signed_report(liar, REPORT, clock() - DAY),
                "malformed_claim": forged[:-20],
                "oversized": bytes(5000),
            }
            for data in lies.values():
                await w.publish(liar, data)
            await anyio.sleep(1)
            met = [n for n in nodes if w.network.network_of(n.node_id).reputation.score(liar.node_id) < 0]
            assert met  # those it is connected with, and nobody else: they passed nothing on
            for node in met:
                assert node.intake is not None
                assert node.intake.refused == dict.fromkeys(lies, 1)
                refused = dict(w.network.network_of(node.node_id).reputation.refused())
                assert set(refused) == {*lies, "refused_gossip"}
            assert all(w.network.network_of(n.node_id).reputation.score(o.node_id) == 0 for n in nodes for o in nodes)
            assert w.all_know_all(nodes)
            await w.publish(liar, honest)  # whoever brings it, the truth is the truth
            await anyio.sleep(1)
            assert nodes[3].membership.view.members[nodes[0].node_id].report.steps == REPORT.steps

    run_virtually(scenario)


def test_a_nodes_own_old_reports_are_not_passed_on_by_itself() -> None:
    async def scenario() -> None:
        async with world() as w:
            nodes = w.start(6)
            await anyio.sleep(5)
            liar = w.stranger(1)
            for number in range(20):
                old = signed_report(nodes[0].identity, replace(REPORT, sequence=number), clock() - 200)
                await w.publish(liar, old)
            blamed = [w.network.network_of(n.node_id).reputation.score(nodes[0].node_id) for n in nodes]
            assert blamed == [0] * 6
            # what its author does not recognise goes nowhere, whoever else would have believed it
            assert w.network.network_of(nodes[0].node_id).reputation.score(liar.node_id) < 0

    run_virtually(scenario)


def test_a_forger_is_banned_after_a_few_forgeries_and_the_swarm_goes_on() -> None:
    async def scenario() -> None:
        async with world() as w:
            nodes = w.start(6)
            await anyio.sleep(5)
            liar = w.stranger(1)
            for number in range(60):
                data = signed_report(nodes[number % 6].identity, replace(REPORT, sequence=2**52 + number), clock())
                await w.publish(liar, data[:-3] + bytes(3 * [number]))
            feared = [n for n in nodes if w.network.network_of(n.node_id).reputation.is_banned(liar.node_id)]
            assert feared
            await anyio.sleep(30)
            assert w.all_know_all(nodes)

    run_virtually(scenario)


def test_a_flood_of_true_reports_is_stopped_at_its_source() -> None:
    async def scenario() -> None:
        async with world() as w:
            nodes = w.start(6)
            await anyio.sleep(5)
            flooder = w.stranger(1)
            for number in range(300):
                await w.publish(flooder, signed_report(flooder, replace(REPORT, sequence=number, steps=1), clock()))
            assert nodes[0].membership.view.members[flooder.node_id].report.sequence < 60
            banning = [n for n in nodes if w.network.network_of(n.node_id).reputation.is_banned(flooder.node_id)]
            assert banning
            assert all(not w.network.network_of(n.node_id).reputation.banned_peers() for n in nodes if n not in banning)
            await anyio.sleep(70)
            assert w.all_know_all(nodes)  # and with nobody to pass it on, it is forgotten

    run_virtually(scenario)


def test_a_node_whose_clock_is_a_day_off_is_alone_and_harms_nobody() -> None:
    async def scenario() -> None:
        async with world() as w:
            nodes = w.start(8)
            (strange,) = w.start(now=lambda: clock() + DAY)
            await anyio.sleep(65)
            assert w.all_know_all(nodes)
            assert strange.knows() == set()
            assert strange.intake is not None
            assert strange.intake.clock_skew.offset_seconds is not None
            assert -DAY - 1 < strange.intake.clock_skew.offset_seconds < -DAY + 1
            assert all(node.intake is not None and node.intake.clock_skew.offset_seconds is None for node in nodes)
            banned = [w.network.network_of(n.node_id).reputation.banned_peers() for n in w.nodes]
            assert banned == [()] * 9

    run_virtually(scenario)


def test_a_computer_that_slept_for_an_hour_forgets_and_finds_everybody_again() -> None:
    async def scenario() -> None:
        jump = [0.0]
        async with world() as w:
            nodes = w.start(6)
            (sleeper,) = w.start(now=lambda: clock() - jump[0])
            await anyio.sleep(20)
            assert w.all_know_all(w.nodes)
            jump[0] = 3600.0  # its clock stood still
            await anyio.sleep(70)
            assert sleeper.node_id not in nodes[0].knows()
            jump[0] = 0.0
            await anyio.sleep(21)
            assert w.all_know_all(w.nodes)

    run_virtually(scenario)


def test_the_start_of_time_is_where_the_samples_are() -> None:
    async def scenario() -> None:
        assert clock() == EPOCH
        await anyio.lowlevel.checkpoint()

    run_virtually(scenario)


def test_a_clock_that_jumps_a_day_and_back_changes_no_pace_and_all_know_each_other_again() -> None:
    async def scenario() -> None:
        async with world() as w:
            offset = [0.0]
            w.start(3)
            (jumping,) = w.start(now=lambda: clock() + offset[0])
            for jump in (0.0, DAY, -2 * DAY, DAY):
                offset[0] += jump
                await anyio.sleep(60)
            assert w.all_know_all(w.nodes)
            jumping.steps = 777_777
            await anyio.sleep(11)
            views = [node.membership.view.members[jumping.node_id] for node in w.nodes]
            assert [member.report.steps for member in views] == [777_777] * 4
            times = [moment for moment, _ in jumping.reports]
            assert max(later - earlier for earlier, later in pairwise(times)) <= 11

    run_virtually(scenario)
