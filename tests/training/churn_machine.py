"""The churn machine: replicas die, come, sleep, are slow and have wrong clocks as one seed decides, in virtual time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

import anyio
from anyio.abc import TaskGroup
from churn_plan import Coming, RoundPlan, Sleep, right_clock
from heard_reports import HeardReports
from replica_world import DUE_SECONDS, EVERYBODY, OUTER, SimulatedReplica

from neuroshard.config.run_parameters import OuterOptimization
from neuroshard.identity.claims import MAX_CLOCK_SKEW_SECONDS
from neuroshard.network import InMemoryNetwork, Link
from neuroshard.types import NodeId

LOOK_SECONDS = 0.5
ROUND_SECONDS = DUE_SECONDS + 5.0  # of a calm one; deaths are at any time of it
LONGEST_SECONDS = 900.0  # that a round may take under churn: more than it takes to go on without a quorum
REPORT_SECONDS = 10.0
CLOCK_SECONDS = 120.0  # until a wrong clock is set right
MIN_FOUNDERS = 4
SLOW = Link(delay_seconds=0.3)


@dataclass
class ChurnMachine:
    """Carries a plan out.

    Who dies or sleeps is drawn among those without whom a quorum of the voters is alive and awake.
    """

    network: InMemoryNetwork
    seed: int
    members: int
    outer: OuterOptimization = OUTER
    live: dict[NodeId, SimulatedReplica] = field(default_factory=dict[NodeId, SimulatedReplica])
    roots: dict[int, set[str]] = field(default_factory=dict[int, set[str]])  # that anybody had, by outer step
    begun: Counter[int] = field(default_factory=Counter[int])  # rounds, by outer step
    given_up: Counter[int] = field(default_factory=Counter[int])  # of which somebody did not wait for the end
    events: list[str] = field(default_factory=list[str])
    deaths: int = 0
    joins: int = 0
    sleeps: int = 0
    wrong_clocks: int = 0
    _lives: dict[NodeId, anyio.CancelScope] = field(default_factory=dict[NodeId, anyio.CancelScope])
    _asleep: set[NodeId] = field(default_factory=set[NodeId])
    _at_work: int = 0  # plans of rounds
    _dead: list[SimulatedReplica] = field(default_factory=list[SimulatedReplica])
    _reports: HeardReports = field(default_factory=HeardReports)

    def __post_init__(self) -> None:
        self._random = Random(f"machine {self.seed}")
        self._unused = list(EVERYBODY)

    async def run(self, plan: tuple[RoundPlan, ...]) -> None:
        """Until the last round of the plan has ended and all have had time to follow. Raises TimeoutError."""
        async with anyio.create_task_group() as tasks:
            for _ in range(self.members):
                self._begin(tasks, self._new(self._unused.pop(0), len(self.live), right_clock(self._random)))
            tasks.start_soon(self._look_on)
            tasks.start_soon(self._report)
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
        """Of the rounds that were begun; those that end late are completed."""
        completed = self.newest().state.outer_step
        return completed / sum(max(1, self.begun[step]) for step in range(completed))

    @property
    def in_time_share(self) -> float:
        """Of the outer steps: those that ended while all who live waited for the end."""
        completed = self.newest().state.outer_step
        return sum(not self.given_up[step] for step in range(completed)) / completed

    def newest(self) -> SimulatedReplica:
        """A live replica of the highest outer step."""
        return max(self.live.values(), key=lambda one: (one.state.outer_step, one.name))

    async def _carry_out(self, tasks: TaskGroup, events: RoundPlan, others_come: bool) -> None:
        if others_come:
            for coming in events.comings:
                self._come(tasks, coming)
        slow = list(self.live)[events.slow % len(self.live)]
        for other in self.live:
            if other != slow:
                self.network.set_link(slow, other, SLOW)
                self.network.set_link(other, slow, SLOW)
        began = anyio.current_time()
        self._at_work += 1
        async with anyio.create_task_group() as sleepers:
            for sleep in events.sleeps:
                sleepers.start_soon(self._sleep, sleep)
            for after in events.deaths:
                await anyio.sleep_until(began + after)
                self._kill(await self._drawn())
        self._at_work -= 1

    def _begin(self, tasks: TaskGroup, replica: SimulatedReplica) -> None:
        replica.step_seconds = self._random.uniform(0.5, 1.5)
        scope = self._lives[replica.name] = anyio.CancelScope()
        self.live[replica.name] = replica
        self._reports.begin(replica.name, replica.now)
        self._reports.tell(self.live.keys() - self._asleep)
        self._note(f"{_short(replica)} begins, {replica.clock_ahead:+.0f} s")

        async def live() -> None:
            with scope:
                await replica.live()

        tasks.start_soon(live)

    def _kill(self, name: NodeId) -> None:
        replica = self.live.pop(name)
        self.deaths += 1
        self._count(replica)
        self._dead.append(replica)
        self._lives.pop(name).cancel()
        self.network.kill(name)
        self._note(f"{_short(replica)} dies")

    async def _sleep(self, sleep: Sleep) -> None:
        await anyio.sleep(sleep.after)
        name = await self._drawn()
        replica = self.live[name]
        self.sleeps += 1
        self._asleep.add(name)
        replica.is_idle = True
        self.network.suspend(name)
        self._note(f"{_short(replica)} sleeps")
        await anyio.sleep(sleep.seconds)
        replica.is_idle = False
        self._asleep.discard(name)
        self.network.wake(name)
        self._note(f"{_short(replica)} wakes")

    def _come(self, tasks: TaskGroup, coming: Coming) -> None:
        self.joins += 1
        if coming.returns and self._dead:
            before = self._dead.pop(self._random.randrange(len(self._dead)))
            replica = self._again(before, coming.clock_ahead)
        else:
            replica = self._new(self._unused.pop(0), 1000 + self.joins, coming.clock_ahead)
            replica.follow(self.newest())
        self._begin(tasks, replica)
        if abs(coming.clock_ahead) > MAX_CLOCK_SKEW_SECONDS:
            self.wrong_clocks += 1
            tasks.start_soon(self._set_clock, replica)

    async def _set_clock(self, replica: SimulatedReplica) -> None:
        await anyio.sleep(CLOCK_SECONDS)
        replica.clock_ahead = 0.0
        self._note(f"the clock of {_short(replica)} is right")

    def _new(self, name: NodeId, seed: int, clock_ahead: float) -> SimulatedReplica:
        return SimulatedReplica(
            name, self.network, seed, known=self._known(name), clock_ahead=clock_ahead, outer=self.outer
        )

    def _again(self, before: SimulatedReplica, clock_ahead: float) -> SimulatedReplica:
        """With what lay on its disk when it died."""
        replica = SimulatedReplica(
            before.name,
            self.network,
            before.seed,
            state=before.state,
            book=before.book,
            known=self._known(before.name),
            clock_ahead=clock_ahead,
            outer=self.outer,
        )
        replica.wallet_rounds = before.wallet_rounds
        return replica

    def _known(self, name: NodeId) -> Callable[[], Sequence[NodeId]]:
        return lambda: self._reports.known(name, self.network.nodes())

    async def _drawn(self) -> NodeId:
        """Somebody without whom enough of those who vote next are alive and awake, and where the newest one is."""
        while not (possible := [name for name in self.live if name not in self._asleep and self._is_dispensable(name)]):
            await anyio.sleep(LOOK_SECONDS)
        return self._random.choice(sorted(possible))

    def _is_dispensable(self, node: NodeId) -> bool:
        line = self.newest().standing().line
        here = {name: one for name, one in self.live.items() if one.standing().line == line}
        steps = [one.group.gathering.step_of(one.standing()) for one in here.values()]
        step = next((one for one in steps if one is not None), None)  # newcomers do not know the voters
        if step is None:  # nobody has ended a step yet: all have to agree
            return len(self.live) > MIN_FOUNDERS
        return len(step.roster.nodes & (here.keys() - self._asleep - {node})) >= step.quorum

    async def _report(self) -> None:
        while True:
            await anyio.sleep(REPORT_SECONDS)
            self._reports.tell(self.live.keys() - self._asleep)

    async def _look_on(self) -> None:
        while True:
            for replica in list(self.live.values()):
                standing, newest = replica.standing(), self.newest()
                self.roots.setdefault(standing.outer_step, set()).add(standing.root)
                may_follow = replica.name not in self._asleep and newest is not replica
                if replica.group.gathering.must_follow.is_set() and may_follow:
                    self._note(f"{_short(replica)} follows {_short(newest)}")
                    replica.follow(newest)
            await anyio.sleep(LOOK_SECONDS)

    def _note(self, event: str) -> None:
        self.events.append(f"{anyio.current_time():.3f} s, step {self.newest().state.outer_step}: {event}")

    def _count(self, replica: SimulatedReplica) -> None:
        """A round of several counts once: by whoever has seen the most of an outer step."""
        self.begun |= Counter(replica.entered)
        self.given_up |= Counter(replica.given_up)


def _short(replica: SimulatedReplica) -> str:
    return f"node {EVERYBODY.index(replica.name)}"
