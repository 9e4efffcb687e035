"""Churn in virtual time: replicas die, come, sleep, are slow and have wrong clocks as one seed decides.

Real: the rules by which a node believes reports, and everything that `tests.worlds.replicas` keeps real. Simulated: the
clock, the network and the weights. The plan alone also drives real processes (`tests.worlds.processes`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from random import Random

import anyio
from anyio.abc import TaskGroup
from msgspec import structs

from neuroshard.config.run_parameters import OuterOptimization
from neuroshard.identity.claims import MAX_CLOCK_SKEW_SECONDS
from neuroshard.membership.claim_intake import REPORT_RULES, ClaimCache, ClaimIntake, Statement, signed_report
from neuroshard.membership.reports import TrainingReport
from neuroshard.network import InMemoryNetwork, Link
from neuroshard.types import NodeId
from tests.worlds.claims import REPORT
from tests.worlds.replicas import DUE_SECONDS, EVERYBODY, IDENTITIES, OUTER, RUN, SimulatedReplica

SLEEP_SECONDS = (5.0, 60.0)  # from less than a view of a round takes to several of them
WRONG_CLOCKS = 0.1  # of the rounds: somebody comes whose clock is wrong


@dataclass(frozen=True)
class Coming:
    """Somebody starts."""

    returns: bool  # one that has died, with what lay on its disk
    clock_ahead: float  # seconds, of the true time


@dataclass(frozen=True)
class Sleep:
    """Somebody stops for a while, and goes on as if nothing had been."""

    after: float  # seconds from the round's begin
    seconds: float


@dataclass(frozen=True)
class RoundPlan:
    """What happens while one outer step is made."""

    deaths: tuple[float, ...]  # seconds from its begin
    comings: tuple[Coming, ...]
    sleeps: tuple[Sleep, ...]
    slow: int  # which of those who are there has a slow line from now on


def churn_plan(seed: int, rounds: int, members: int, share: float, seconds: float) -> tuple[RoundPlan, ...]:
    """Deaths of that share of the members in every round of so many seconds, on average, and as many who come."""
    random = Random(f"churn {seed}")
    return tuple(_round(random, int(share * members + random.random()), members, seconds) for _ in range(rounds))


def right_clock(random: Random) -> float:
    """Seconds ahead of the true time, by which no two clocks are farther apart than a node puts up with."""
    return random.uniform(-0.5, 0.5) * MAX_CLOCK_SKEW_SECONDS


def wrong_clock(random: Random) -> float:
    """Seconds ahead by which a clock is too far from all that are right."""
    return random.choice((-1, 1)) * random.uniform(2.0, 3.0) * MAX_CLOCK_SKEW_SECONDS


def _round(random: Random, count: int, members: int, seconds: float) -> RoundPlan:
    comings = [Coming(random.random() < 0.5, right_clock(random)) for _ in range(count)]
    if comings and random.random() < WRONG_CLOCKS:
        comings[0] = Coming(comings[0].returns, wrong_clock(random))
    sleeps = [Sleep(random.uniform(0, seconds), random.uniform(*SLEEP_SECONDS))] if random.random() < 0.5 else []
    return RoundPlan(
        tuple(sorted(random.uniform(0, seconds) for _ in range(count))),
        tuple(comings),
        tuple(sleeps),
        random.randrange(members),
    )


KEPT_SECONDS = 60.0  # a silent node is known


class HeardReports:
    """What the nodes of one swarm have heard from each other."""

    def __init__(self) -> None:
        self._cache = ClaimCache(REPORT_RULES)
        self._intakes: dict[NodeId, ClaimIntake[TrainingReport]] = {}
        self._heard: dict[NodeId, dict[NodeId, float]] = {}  # when, by listener and speaker
        self._clocks: dict[NodeId, Callable[[], float]] = {}
        self._told = 0

    def begin(self, node: NodeId, now: Callable[[], float]) -> None:
        """A node starts; `now` is its clock, in seconds since 1970."""
        self._clocks[node] = now
        self._intakes[node] = ClaimIntake(REPORT_RULES, RUN, now, self._cache)
        self._heard[node] = {}

    def tell(self, nodes: Iterable[NodeId]) -> None:
        """All of these report, and hear each other."""
        listeners = sorted(nodes)
        for speaker in listeners:
            self._told += 1
            report = structs.replace(REPORT, run_id=RUN, sequence=self._told)
            said = signed_report(IDENTITIES[speaker], report, self._clocks[speaker]())
            for listener in listeners:
                if listener != speaker and isinstance(self._intakes[listener].take(said, speaker), Statement):
                    self._heard[listener][speaker] = anyio.current_time()

    def known(self, listener: NodeId, there: Collection[NodeId]) -> list[NodeId]:
        """Those of them whom a node has heard lately."""
        since = anyio.current_time() - KEPT_SECONDS
        return sorted(node for node, at in self._heard[listener].items() if node in there and at >= since)


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
        lines = {one.replica_status().line for one in self.live.values()}
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
            name, self.network, seed, known=self._known(name), clock_ahead=clock_ahead, scheme=self.outer
        )

    def _again(self, before: SimulatedReplica, clock_ahead: float) -> SimulatedReplica:
        """With what lay on its disk when it died."""
        replica = SimulatedReplica(
            before.name,
            self.network,
            before.seed,
            state=before.state,
            book=before.book,
            store=before.store,
            known=self._known(before.name),
            clock_ahead=clock_ahead,
            scheme=self.outer,
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
        line = self.newest().replica_status().line
        here = {name: one for name, one in self.live.items() if one.replica_status().line == line}
        chain = self.newest().group.chain.chain
        awake = here.keys() - self._asleep - {node}
        return chain is not None and chain.ledger.committee.is_quorum(
            [seat.member for seat in chain.ledger.committee.seats if seat.node_id in awake]
        )

    async def _report(self) -> None:
        while True:
            await anyio.sleep(REPORT_SECONDS)
            self._reports.tell(self.live.keys() - self._asleep)

    async def _look_on(self) -> None:
        while True:
            for replica in list(self.live.values()):
                status, newest = replica.replica_status(), self.newest()
                self.roots.setdefault(status.outer_step, set()).add(status.root)
                may_follow = replica.name not in self._asleep and newest is not replica
                if replica.group.must_follow.is_set() and may_follow:
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
