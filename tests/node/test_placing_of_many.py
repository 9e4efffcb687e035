"""Two hundred nodes come and go in any order; by what they hear of each other no stage stays empty.

Membership, placing and relocating are the real ones. Reports come late and in any order, and the state of a stage takes
a while to fetch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heappop, heappush
from pathlib import Path
from random import Random

import anyio
import pytest
from anyio.abc import TaskGroup
from msgspec.structs import replace

from neuroshard.config.run_parameters import GenesisPins, RunParameters
from neuroshard.identity import SignedRunParameters, TokenSecret, Wallet
from neuroshard.membership.claim_intake import Statement
from neuroshard.membership.connectivity import Networking
from neuroshard.membership.reports import TrainingReport
from neuroshard.membership.stage_coverage import StageCoverage, StageHolder, StageRange
from neuroshard.membership.swarm_view import Membership
from neuroshard.model.architecture import StagePlan
from neuroshard.node.own_stages import StageChooser
from neuroshard.node.stage_swarm import StageSwarm
from neuroshard.node.training_life import Relocating
from neuroshard.placement.stage_choice import equal_windows
from neuroshard.runs.exchange import RunVersions
from neuroshard.runs.offer import RunOffer
from neuroshard.status.snapshot import NodeState
from neuroshard.types import Architecture
from tests.worlds.claims import DAY, EPOCH, REPORT, clock, identity_of
from tests.worlds.clock import run_virtually

NODES = 200
ACQUAINTANCES = 64  # whose newest word a newcomer has at once; that of the others comes by and by
REPORT_SECONDS = 20.0
LATEST_SECONDS = 1.5  # until everybody has heard a report; one may overtake another
FETCH_SECONDS = 2.0
SETTLE_SECONDS = 60.0
CALM_SECONDS = 5.0


class Resident:
    """One node, from its coming to its going."""

    def __init__(self, town: Town, number: int, most_stages: int) -> None:
        self.town = town
        identity = identity_of(number)
        self.node_id, self.wallet_id = identity.node_id, identity.wallet_id
        self.windows = equal_windows(len(town.plan), most_stages)
        self.stages: StageRange | None = None
        self.is_ready = False
        self.moves = 0
        self.scope = anyio.CancelScope()
        self.membership = Membership(self.node_id, self.wallet_id)
        self.inbox: list[tuple[float, int, Statement[TrainingReport]]] = []
        self.said: Statement[TrainingReport] | None = None
        networking = Networking(self.node_id, _unused, peers_file=Path("unused"), loopback_only=True)
        self.swarm = StageSwarm(identity, RunVersions(town.offer), self.membership, networking)
        self.placing = StageChooser(self.swarm, networking, now=clock)

    @property
    def holder(self) -> StageHolder | None:
        """What it holds in truth."""
        return None if self.stages is None else StageHolder(self.node_id, self.wallet_id, self.stages, self.is_ready)

    async def live(self) -> None:
        """Until it goes, with a word."""
        with self.scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._keep_reporting)
                await self._hold_stages()

    async def _keep_reporting(self) -> None:
        while True:
            self.speak()
            await anyio.sleep(self.town.random.uniform(0.8, 1.0) * REPORT_SECONDS)

    async def _hold_stages(self) -> None:
        stages = await self.placing.choose(self.windows, None)
        while True:
            for is_ready in (False, True):
                self.stages, self.is_ready = stages, is_ready
                self.speak()
                await anyio.sleep(0 if is_ready else FETCH_SECONDS)
            stages = (await Relocating(self.swarm, self.windows).wanted()).stages
            self.moves += 1

    def speak(self, *, leaving: bool = False) -> None:
        """Of a run that has just begun: every stage can be begun anew."""
        layers = None if self.stages is None else self.stages.layers(self.town.plan)
        report = replace(
            REPORT,
            run_id=self.town.offer.run_id,
            sequence=self.town.next_number(),
            layers=layers,
            state=NodeState.TRAINING if self.is_ready else NodeState.STARTING,
            started_at=EPOCH,
            steps=0,
            outer_step=0,
            interval_seconds=REPORT_SECONDS,
            leaving=leaving,
        )
        self.membership.count_own_report(report, b"", clock())
        self.said = Statement(self.node_id, self.wallet_id, clock(), clock() + DAY, report)
        self.town.post(self, self.said)

    def hear(self, said: Statement[TrainingReport], at: float) -> None:
        """Learn of a report at this time."""
        heappush(self.inbox, (at, said.value.sequence, said))

    def read(self, now: float) -> None:
        """What has come by now."""
        while self.inbox and self.inbox[0][0] <= now:
            self.membership.hear_report(heappop(self.inbox)[2], clock())


@dataclass
class Town:
    """All nodes, and what is true of them."""

    random: Random
    stage_count: int
    tasks: TaskGroup
    residents: list[Resident] = field(default_factory=list[Resident])
    numbers: int = 0

    def __post_init__(self) -> None:
        shape = Architecture(64, self.stage_count, 2, 1, 128, 512, 8)
        pins = GenesisPins("ab" * 32, 16, "cd" * 32, "ef" * 32, 64)
        parameters = RunParameters("test", 1, shape, self.stage_count, 1, 4, 7, pins)
        owner = Wallet.from_secret(TokenSecret("hex", bytes(32)))
        self.offer = RunOffer.of_new_run(SignedRunParameters.sign(owner, parameters))
        self.plan = StagePlan.even(self.stage_count, self.stage_count)

    @property
    def truth(self) -> StageCoverage:
        holders = [resident.holder for resident in self.residents]
        return StageCoverage.of(self.offer.run_id, self.stage_count, [one for one in holders if one is not None])

    def join(self, most_stages: int) -> None:
        resident = Resident(self, self.next_number(), self.random.randint(1, most_stages))
        for other in self.random.sample(self.residents, min(ACQUAINTANCES, len(self.residents))):
            if other.said is not None:
                resident.hear(other.said, anyio.current_time())
        self.residents.append(resident)
        self.tasks.start_soon(resident.live)

    def leave(self, resident: Resident) -> None:
        resident.speak(leaving=True)
        self.residents.remove(resident)
        resident.scope.cancel()

    def next_number(self) -> int:
        """One that was not given before."""
        self.numbers += 1
        return self.numbers

    def post(self, sender: Resident, said: Statement[TrainingReport]) -> None:
        """Everybody hears it, each after a while of its own."""
        now = anyio.current_time()
        for resident in self.residents:
            if resident is not sender:
                resident.hear(said, now + self.random.uniform(0.02, LATEST_SECONDS))

    async def carry_mail(self) -> None:
        """Until cancelled."""
        while True:
            await anyio.sleep(0.1)
            now = anyio.current_time()
            for resident in self.residents:
                resident.read(now)

    def lose_a_stage(self) -> None:
        """All who hold it say good-bye at once."""
        stage = self.random.randrange(self.stage_count)
        for resident in [one for one in self.residents if one.stages is not None and stage in one.stages]:
            self.leave(resident)

    async def settled(self) -> None:
        """Until every stage works, and nothing about that changes any more."""
        with anyio.fail_after(SETTLE_SECONDS):
            while self.truth.missing:
                await anyio.sleep(0.5)
        for _ in range(int(CALM_SECONDS)):
            await anyio.sleep(1)
            assert self.truth.empty == ()


def _unused() -> None:
    raise AssertionError("nodes are joined by their town")


@pytest.mark.parametrize(
    ("seed", "stage_count", "most_stages"),
    [(2, 12, 1), pytest.param(4, 8, 2, marks=pytest.mark.long)],
)
def test_no_stage_of_two_hundred_nodes_stays_empty_in_whatever_order_they_come_and_go(
    seed: int, stage_count: int, most_stages: int
) -> None:
    async def scenario() -> None:
        async with anyio.create_task_group() as tasks:
            town = Town(Random(seed), stage_count, tasks)
            tasks.start_soon(town.carry_mail)
            while len(town.residents) < NODES:
                event = town.random.random()
                if event < 0.8 or len(town.residents) < stage_count:
                    town.join(most_stages)
                elif event < 0.99:
                    town.leave(town.random.choice(town.residents))
                else:
                    town.lose_a_stage()
                await anyio.sleep(town.random.choice([0, 0, 0, 0, 0.1]))
            await town.settled()
            town.lose_a_stage()
            for _ in range(NODES // 10):
                town.leave(town.random.choice(town.residents))
            await town.settled()
            moves = sum(resident.moves for resident in town.residents)
            assert moves <= len(town.residents) // 2
            tasks.cancel_scope.cancel()

    run_virtually(scenario)
