from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import anyio
from msgspec.structs import replace

from neuroshard.identity import NodeIdentity
from neuroshard.membership.claim_intake import REPORT_RULES, ClaimCache, ClaimIntake
from neuroshard.membership.reporting import Listener, Reporter
from neuroshard.membership.reports import TrainingReport
from neuroshard.membership.stage_coverage import StageCoverage, StageHolder, StageRange, stages_of
from neuroshard.membership.swarm_view import Membership
from neuroshard.model.architecture import StagePlan
from neuroshard.network import InMemoryNetwork, Link, TransportClosedError
from neuroshard.placement.relocation import PendingRelocation, should_move
from neuroshard.placement.stage_choice import choose_stages, equal_windows
from neuroshard.status.snapshot import NodeState
from neuroshard.types import NodeId
from tests.worlds.claims import EPOCH, REPORT, RUN, TOPIC, clock, identity_of
from tests.worlds.clock import run_virtually

PLAN = StagePlan.even(12, 4)
LISTEN_SECONDS = 3.0  # before a newcomer chooses
FETCH_SECONDS = 2.0
NODES = 72


@dataclass
class Resident:
    """One node: its stages, and how it hears of the others'."""

    identity: NodeIdentity
    membership: Membership
    stages: StageRange | None = None
    is_ready: bool = False
    moves: int = 0
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)

    def report(self) -> TrainingReport:
        layers = None if self.stages is None else self.stages.layers(PLAN)
        state = NodeState.TRAINING if self.is_ready else NodeState.STARTING
        return replace(REPORT, layers=layers, state=state, started_at=EPOCH)

    def holder(self) -> StageHolder | None:
        if self.stages is None:
            return None
        return StageHolder(self.identity.node_id, self.identity.wallet_id, self.stages, self.is_ready)

    def coverage(self) -> StageCoverage:
        holders: list[StageHolder] = []
        for member in self.membership.view.members.values():
            stages = None if member.report.layers is None else stages_of(member.report.layers, PLAN)
            if stages is not None and member.node_id != self.identity.node_id:
                is_ready = member.report.state is NodeState.TRAINING
                holders.append(StageHolder(member.node_id, member.wallet_id, stages, is_ready))
        own = self.holder()
        return StageCoverage.of(RUN, len(PLAN), holders if own is None else [*holders, own])


class Town:
    """Nodes with real reports over the in-memory network, which place themselves by what they hear."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.network = InMemoryNetwork(self.random, default_link=Link(0.05), now=clock)
        self.cache = ClaimCache(REPORT_RULES)
        self.residents: dict[NodeId, Resident] = {}

    def truth(self) -> StageCoverage:
        holders = [resident.holder() for resident in self.residents.values()]
        return StageCoverage.of(RUN, len(PLAN), [holder for holder in holders if holder is not None])

    async def live(self, number: int) -> None:
        identity = identity_of(number)
        self.network.join(identity.node_id)
        resident = Resident(identity, Membership(identity.node_id, identity.wallet_id))
        self.residents[identity.node_id] = resident
        network = self.network.network_of(identity.node_id)
        intake = ClaimIntake(REPORT_RULES, RUN, clock, self.cache)
        listener = Listener(intake, resident.membership, TOPIC, now=clock)
        reporter = Reporter(identity, RUN, TOPIC, resident.report, resident.membership, now=clock, random=self.random)
        try:
            with resident.scope:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(listener.listen_forever, network)
                    tasks.start_soon(reporter.report_forever, network)
                    tasks.start_soon(self.settle, resident, reporter)
        except* TransportClosedError:
            pass

    async def settle(self, resident: Resident, reporter: Reporter) -> None:
        await anyio.sleep(LISTEN_SECONDS)
        windows = equal_windows(len(PLAN), 1)
        chosen = choose_stages(resident.identity.node_id, resident.identity.wallet_id, windows, resident.coverage())
        assert chosen is not None
        await self.fetch(resident, reporter, chosen)
        unrest = PendingRelocation()
        while True:
            await anyio.sleep(1)
            unrest = unrest.seen(resident.coverage(), clock())
            move = should_move(resident.identity.node_id, unrest, clock())
            if move is not None:
                resident.moves += 1
                await self.fetch(resident, reporter, move.stages)

    async def fetch(self, resident: Resident, reporter: Reporter, stages: StageRange) -> None:
        for is_ready in (False, True):
            resident.stages, resident.is_ready = stages, is_ready
            resident.membership.own_news.notify()
            await anyio.sleep(0 if is_ready else FETCH_SECONDS)

    async def until_every_stage_works(self, most_seconds: float) -> None:
        began = anyio.current_time()
        while self.truth().missing:
            await anyio.sleep(0.5)
            assert anyio.current_time() - began < most_seconds, self.truth().replicas

    def empty(self, stage: int) -> None:
        """Everybody who holds it says good-bye."""
        for resident in list(self.residents.values()):
            if resident.stages is not None and stage in resident.stages:
                resident.scope.cancel()
                del self.residents[resident.identity.node_id]


def test_nodes_that_hear_each_other_place_themselves_and_fill_what_others_leave() -> None:
    async def scenario() -> None:
        town = Town(7)
        async with anyio.create_task_group() as tasks:
            for number in range(NODES):
                tasks.start_soon(town.live, number)
                await anyio.sleep(town.random.choice([0, 0, 0.1, 0.5]))
            await anyio.sleep(LISTEN_SECONDS + FETCH_SECONDS + 1)
            assert town.truth().missing == ()
            assert min(town.truth().replicas) >= NODES // 10
            town.empty(2)
            assert town.truth().missing == (2,)
            await town.until_every_stage_works(30)
            assert sum(resident.moves for resident in town.residents.values()) == 1
            town.network.close()

    run_virtually(scenario)
