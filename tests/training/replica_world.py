"""Replicas of one stage in memory that work by the clock and agree in rounds: numbers stand for weights."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

import anyio
import torch
import trio
from donors import at_once
from torch import Tensor
from trio.testing import MockClock

from neuroshard.config.run_parameters import OuterOptimization
from neuroshard.network import InMemoryNetwork
from neuroshard.optim.outer import OuterState
from neuroshard.training.control import first_of
from neuroshard.training.exchange import StageRounds
from neuroshard.training.outer_sync import Abandoned, Agreed, next_outer_state, state_root
from neuroshard.training.rounds.calls import RoundTimes
from neuroshard.training.rounds.door import RoundDoor
from neuroshard.training.rounds.gathering import Replica
from neuroshard.training.rounds.group_rounds import GroupRounds
from neuroshard.training.transfer.donor import Donor
from neuroshard.training.transfer.download import Asking
from neuroshard.training.transfer.fields import StageName
from neuroshard.training.transfer.standing import MAX_MEMBERS, Standing
from neuroshard.types import LayerRange, NodeId, RunId

RUN = RunId("1" * 64)
STAGE = StageName(RUN, LayerRange(0, 2))
LENGTH = 50
OUTER = OuterOptimization(inner_steps=10, learning_rate=0.7, momentum=0.9)
SEQUENCES_PER_STEP = 2


@dataclass
class SimulatedReplica:
    """Makes an inner step every `step_seconds` and enters rounds between two of them."""

    name: NodeId
    network: InMemoryNetwork
    seed: int
    step_seconds: float = 1.0
    steps: int = 0
    sequences: int = 0
    is_idle: bool = False
    state: OuterState = field(default_factory=lambda: OuterState(torch.zeros(LENGTH), torch.zeros(LENGTH), 0))
    outcomes: list[Agreed | Abandoned] = field(default_factory=list[Agreed | Abandoned])
    known: Callable[[], Sequence[NodeId]] | None = None
    may_be_alone: bool = False  # it makes rounds of its own when it is alone
    is_reluctant: bool = False  # it agrees to rounds and then does not come
    absent: set[NodeId] = field(default_factory=set[NodeId])  # it has no connection with
    dies_at_message: int | None = None  # of its rounds
    most_members: int = MAX_MEMBERS  # of a round

    def __post_init__(self) -> None:
        self.weights = self.state.anchor.clone()
        self._generator = torch.Generator().manual_seed(self.seed)
        transport = self.network.join(self.name)
        replica = Replica(
            self.name,
            STAGE,
            StageRounds(RUN, 0, "schema", OUTER),
            SEQUENCES_PER_STEP,
            lambda: Standing(True, self.steps, self.state.outer_step, state_root(self.state), sequences=self.sequences),
            self._peers,
            lambda node: node in self.network.nodes() and node not in self.absent,
            self.most_members,
        )
        self.group = GroupRounds(
            replica, Asking(transport, offload=at_once), self._alone, vector_length=LENGTH, offload=at_once
        )
        donor, door = Donor(lambda node: node in self.network.nodes(), offload=at_once), RoundDoor()
        donor.offer(STAGE, self)  # type: ignore[arg-type]
        self._send = self.group.line.send
        self.group.line.send = self._send_or_die  # type: ignore[method-assign]
        donor.serve(transport)
        door.add(self.group)
        door.serve(transport)

    def standing(self) -> Standing:
        return self.group.gathering.standing()

    async def live(self) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.group.gathering.run)
            while True:
                await first_of(lambda: anyio.sleep(self.step_seconds), self.group.gathering.called)
                if self.group.gathering.is_called and self.is_reluctant:
                    self.group.withdraw()
                elif self.group.gathering.is_called:
                    await self.take_part()
                elif not self.is_idle:
                    await self._step()

    def follow(self, other: SimulatedReplica) -> None:
        """Take another one's state over, as a download does."""
        self.state, self.weights = other.state, other.weights.clone()
        self.steps, self.sequences = other.steps, other.sequences
        self.group.gathering.must_follow = anyio.Event()

    async def _step(self) -> None:
        self.weights = self.weights - 0.01 * torch.rand(LENGTH, generator=self._generator)
        self.steps, self.sequences = self.steps + 1, self.sequences + SEQUENCES_PER_STEP
        is_due = self.sequences >= OUTER.inner_steps * SEQUENCES_PER_STEP
        if self.may_be_alone and is_due and self.group.gathering.is_alone:
            await self.take_part()

    async def take_part(self) -> None:
        before = self.state
        outcome = await self.group.exchange(before.anchor - self.weights, before.outer_step)
        self.outcomes.append(outcome)
        if isinstance(outcome, Agreed):
            self.state = next_outer_state(before, self.weights, outcome, OUTER)
            self.weights, self.sequences = self.state.anchor.clone(), 0

    async def _send_or_die(self, peer: NodeId, kind: str, payload: bytes) -> None:
        if self.dies_at_message == 0:
            self.network.kill(self.name)
        if self.dies_at_message is not None:
            self.dies_at_message -= 1
        await self._send(peer, kind, payload)

    def _peers(self) -> Sequence[NodeId]:
        if self.known is not None:
            return self.known()
        return sorted(node for node in self.network.nodes() if node != self.name)

    async def _alone(self, contribution: Tensor, outer_step: int) -> Agreed:
        await anyio.lowlevel.checkpoint()
        return Agreed(contribution, 1)


def play(scenario: Callable[[InMemoryNetwork], Awaitable[None]]) -> None:
    """Run a scenario under a virtual clock that never waits."""

    async def main() -> None:
        with InMemoryNetwork() as network, anyio.fail_after(100_000):
            await scenario(network)

    trio.run(main, clock=MockClock(autojump_threshold=0))


QUICK = replace(RoundTimes(), look_seconds=0.05, near_seconds=0.02, turn_seconds=5.0)
