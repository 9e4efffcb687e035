"""The churn machine: in every round replicas die and others come, as one seed decides, under the virtual clock."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from random import Random

import anyio
from anyio.abc import TaskGroup
from replica_world import DUE_SECONDS, EVERYBODY, OUTER, SimulatedReplica

from neuroshard.config.run_parameters import OuterOptimization
from neuroshard.network import InMemoryNetwork, Link
from neuroshard.types import NodeId

LOOK_SECONDS = 0.5
ROUND_SECONDS = DUE_SECONDS + 5.0  # of a calm one; deaths are at any time of it
LONGEST_SECONDS = 900.0  # that a round may take under churn: more than it takes to go on without a quorum
MIN_FOUNDERS = 4
SLOW = Link(delay_seconds=0.3)


@dataclass(frozen=True)
class RoundPlan:
    """What happens while one outer step is made."""

    deaths: tuple[float, ...]  # seconds from its begin
    returns: tuple[bool, ...]  # of those who come: whether it is somebody who has died, with what lay on its disk
    slow: int  # which of those who are there has a slow line from now on


def churn_plan(seed: int, rounds: int, members: int, share: float) -> tuple[RoundPlan, ...]:
    """Deaths of that share of the members in every round, and as many who come: the same for the same seed."""
    random, count = Random(f"churn {seed}"), int(share * members)
    return tuple(
        RoundPlan(
            tuple(sorted(random.uniform(0, ROUND_SECONDS) for _ in range(count))),
            tuple(random.random() < 0.5 for _ in range(count)),
            random.randrange(members),
        )
        for _ in range(rounds)
    )


@dataclass
class ChurnMachine:
    """Carries a plan out. Who dies is drawn among those whose death leaves a quorum of the voters alive."""

    network: InMemoryNetwork
    seed: int
    members: int
    outer: OuterOptimization = OUTER
    live: dict[NodeId, SimulatedReplica] = field(default_factory=dict[NodeId, SimulatedReplica])
    roots: dict[int, set[str]] = field(default_factory=dict[int, set[str]])  # that anybody had, by outer step
    given_up: Counter[int] = field(default_factory=Counter[int])  # rounds that came to nothing, by outer step
    deaths: int = 0
    joins: int = 0
    _lives: dict[NodeId, anyio.CancelScope] = field(default_factory=dict[NodeId, anyio.CancelScope])
    _at_work: int = 0  # plans of rounds
    _dead: list[SimulatedReplica] = field(default_factory=list[SimulatedReplica])

    def __post_init__(self) -> None:
        self._random = Random(f"machine {self.seed}")
        self._unused = list(EVERYBODY)

    async def run(self, plan: tuple[RoundPlan, ...]) -> None:
        """Until the last round of the plan has ended and all have had time to follow. Raises TimeoutError."""
        async with anyio.create_task_group() as tasks:
            for _ in range(self.members):
                self._begin(
                    tasks, SimulatedReplica(self._unused.pop(0), self.network, len(self.live), outer=self.outer)
                )
            tasks.start_soon(self._look_on)
            for index, events in enumerate(plan):
                with anyio.fail_after(LONGEST_SECONDS):
                    while self.newest().state.outer_step < index:
                        await anyio.sleep(LOOK_SECONDS)
                tasks.start_soon(self._carry_out, tasks, events, index > 0)
            with anyio.fail_after(LONGEST_SECONDS):
                while self.newest().state.outer_step < len(plan) or not self.is_settled:
                    await anyio.sleep(LOOK_SECONDS)
            tasks.cancel_scope.cancel()
        for replica in self.live.values():
            self._count(replica)

    @property
    def is_settled(self) -> bool:
        """Whether all events are over, and all who live are of one line."""
        lines = {one.standing().line for one in self.live.values()}
        return self._at_work == 0 and len(lines) == 1

    @property
    def completed_share(self) -> float:
        """Of the rounds that were begun."""
        completed = self.newest().state.outer_step
        return completed / (completed + sum(self.given_up.values()))

    def newest(self) -> SimulatedReplica:
        """A live replica of the highest outer step."""
        return max(self.live.values(), key=lambda one: (one.state.outer_step, one.name))

    async def _carry_out(self, tasks: TaskGroup, events: RoundPlan, others_come: bool) -> None:
        if others_come:
            for returns in events.returns:
                self._come(tasks, returns=returns)
        slow = list(self.live)[events.slow % len(self.live)]
        for other in self.live:
            if other != slow:
                self.network.set_link(slow, other, SLOW)
                self.network.set_link(other, slow, SLOW)
        began = anyio.current_time()
        self._at_work += 1
        for after in events.deaths:
            await anyio.sleep_until(began + after)
            await self._kill_one()
        self._at_work -= 1

    def _begin(self, tasks: TaskGroup, replica: SimulatedReplica) -> None:
        replica.step_seconds = self._random.uniform(0.5, 1.5)
        scope = self._lives[replica.name] = anyio.CancelScope()
        self.live[replica.name] = replica

        async def live() -> None:
            with scope:
                await replica.live()

        tasks.start_soon(live)

    async def _kill_one(self) -> None:
        while not (possible := [name for name in self.live if self._has_quorum_without(name)]):
            await anyio.sleep(LOOK_SECONDS)
        name = self._random.choice(sorted(possible))
        replica = self.live.pop(name)
        self.deaths += 1
        self._count(replica)
        self._dead.append(replica)
        self._lives.pop(name).cancel()
        self.network.kill(name)

    def _come(self, tasks: TaskGroup, *, returns: bool) -> None:
        self.joins += 1
        if returns and self._dead:
            before = self._dead.pop(self._random.randrange(len(self._dead)))
            replica = SimulatedReplica(
                before.name, self.network, before.seed, state=before.state, book=before.book, outer=self.outer
            )
            replica.wallet_rounds = before.wallet_rounds
        else:
            replica = SimulatedReplica(self._unused.pop(0), self.network, 1000 + self.joins, outer=self.outer)
            replica.follow(self.newest())
        self._begin(tasks, replica)

    def _has_quorum_without(self, node: NodeId) -> bool:
        """Whether enough of those who vote next are alive without it, and where the newest one is."""
        line = self.newest().standing().line
        here = {name: one for name, one in self.live.items() if one.standing().line == line}
        steps = [one.group.gathering.step_of(one.standing()) for one in here.values()]
        step = next((one for one in steps if one is not None), None)  # newcomers do not know the voters
        if step is None:  # nobody has ended a step yet: all have to agree
            return len(self.live) > MIN_FOUNDERS
        return len(step.roster.nodes & (here.keys() - {node})) >= step.quorum

    async def _look_on(self) -> None:
        while True:
            for replica in list(self.live.values()):
                standing, newest = replica.standing(), self.newest()
                self.roots.setdefault(standing.outer_step, set()).add(standing.root)
                if replica.group.gathering.must_follow.is_set() and newest is not replica:
                    replica.follow(newest)
            await anyio.sleep(LOOK_SECONDS)

    def _count(self, replica: SimulatedReplica) -> None:
        """Rounds in which several gave up count once: by whoever has seen the most of them."""
        self.given_up |= Counter(replica.given_up)
