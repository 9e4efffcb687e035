"""What it costs in loss that in every round three of ten replicas die and as many come, at equal tokens."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from math import ceil
from random import Random
from statistics import fmean

import anyio
import torch
import trio
from torch import Tensor

from benchmarks.laboratory import (
    BATCH,
    HELD_OUT,
    SHAPE,
    Meeting,
    Scheme,
    Start,
    Texts,
    decaying,
    held_out_loss,
    inner_step,
    new_executor,
    parameter_count,
    replica_data,
    run_of,
)
from benchmarks.record import Report, Row, mean_with_interval
from benchmarks.seeds import of_each
from benchmarks.sizes import size
from neuroshard.config.run_parameters import OuterOptimization
from neuroshard.consensus.sync_strategies import Abandoned, RunRound, steps_between_rounds
from neuroshard.model.weights import load_vector
from neuroshard.optim.outer import OuterState, fresh_outer_state
from neuroshard.pipeline.executor import ComputeThread, StageExecutor
from neuroshard.training.outer_sync import OuterSync

SEEDS = size((1, 2, 3, 4, 5), (1, 2))
MEMBERS, STEPS = size((7, 600), (4, 8))  # inner steps of each in the mean, from nothing
ABANDONED = 0.05  # of the rounds: as many as were called again in the worst run of `tests/training/test_churn.py`
TOLERANCE = 0.005  # of the loss
OUTER, INNER_DECAYS = OuterOptimization(), decaying(STEPS)  # the default of a run


@dataclass(frozen=True)
class Churn:
    """What happens to the members of a run."""

    share: float = 0.0  # of the members, who die in every round
    abandoned: float = 0.0  # of the rounds: training goes on, and the next one has the work of both
    has_fresh_moments: bool = False  # who comes, instead of those of somebody who is there
    counts_lost: bool = True  # among the tokens: those that died with their replicas


WAYS: Mapping[str, Churn] = {
    "calm": Churn(),
    "under churn": Churn(0.3, ABANDONED),
    "under churn, newcomers with fresh moments": Churn(0.3, ABANDONED, has_fresh_moments=True),
    "under churn, without the tokens that were lost": Churn(0.3, ABANDONED, counts_lost=False),
}


@dataclass(frozen=True)
class Outcome:
    """How one run ended."""

    loss: float  # held out, nats a byte, of the last anchor
    rounds: int
    abandoned: int  # of them
    deaths: int
    lost: float  # share of the inner steps that died with their replicas
    refused: int  # contributions, by the gates


@dataclass
class _Member:
    """One replica and its data."""

    executor: StageExecutor
    outer: OuterSync
    data: torch.Generator
    warm: int  # inner steps of its moments, as far as the warm-up counts them
    in_no_round: int = 0  # its inner steps that die with it


@dataclass
class _Run:
    """One run from its first to its last round."""

    texts: Texts
    start: Start
    churn: Churn
    compute: ComputeThread
    members: list[_Member] = field(default_factory=list[_Member])
    rounds: int = 0
    abandoned: int = 0
    deaths: int = 0
    made: int = 0  # inner steps
    lost: int = 0  # of them
    refused: int = 0

    def __post_init__(self) -> None:
        self._random = Random(f"churn {self.start.seed}")
        self._numbers = iter(range(MEMBERS + 1, 1_000_000))  # that of MEMBERS is the start's
        state = fresh_outer_state(self.start.weights)
        for number in range(MEMBERS):
            self.members.append(self._member(self.start.executor(), state, number, INNER_DECAYS.warmup_steps))

    @property
    def _counted(self) -> int:
        """The inner steps so far, as the length of the run and the learning rate count them."""
        return self.made - (0 if self.churn.counts_lost else self.lost)

    async def train(self, steps: int) -> Outcome:
        """So many inner steps of all together. Nobody dies before the last round, which has about as many as others."""
        is_last = False
        while not is_last:
            count, left = len(self.members), steps - self._counted
            interval = steps_between_rounds(OUTER, self.members[0].outer.state.line, BATCH, count)
            is_last = left < 1.5 * interval * count
            each = ceil(left / count) if is_last else interval
            dying = {} if is_last else self._dying(interval)
            scheduled = self._counted // MEMBERS
            for place, member in enumerate(self.members):
                await self.compute.run(partial(self._work, member, dying.get(place, each), scheduled))
            self._bury(dying)
            await self._meet(is_last=is_last)
            for _ in dying:
                self._come()
        (anchor,) = {bytes(one.outer.state.anchor.numpy()) for one in self.members}
        load_vector(self.members[0].executor.model, torch.frombuffer(bytearray(anchor), dtype=torch.float32))
        loss = held_out_loss(self.members[0].executor.model, self.texts)
        return Outcome(loss, self.rounds, self.abandoned, self.deaths, self.lost / self.made, self.refused)

    def _dying(self, interval: int) -> dict[int, int]:
        """Who dies before the next round, by place, and after how many inner steps."""
        count = int(self.churn.share * len(self.members) + self._random.random())
        return {
            place: self._random.randrange(interval) for place in self._random.sample(range(len(self.members)), count)
        }

    def _work(self, member: _Member, steps: int, scheduled: int) -> None:
        """Inner steps at the learning rates from this step of the run on, below the warm-up of fresh moments."""
        for step in range(steps):
            warm = min(1.0, (member.warm + 1) / INNER_DECAYS.warmup_steps)
            inner = replace(INNER_DECAYS, learning_rate=INNER_DECAYS.learning_rate * warm)
            inner_step(member.executor, self.texts.batch(BATCH, member.data), scheduled + step, inner)
            member.outer.after_step(BATCH)
            member.warm += 1
        member.in_no_round += steps
        self.made += steps

    def _bury(self, dying: Mapping[int, int]) -> None:
        self.deaths += len(dying)
        self.lost += sum(self.members[place].in_no_round for place in dying)
        self.members = [member for place, member in enumerate(self.members) if place not in dying]

    async def _meet(self, *, is_last: bool) -> None:
        """A round of all; one that is abandoned is not made up for before the next one, but for the last."""
        self.rounds += 1
        meeting = Meeting(Scheme(OUTER, 1, len(self.members)), work=[one.in_no_round for one in self.members])
        is_abandoned = self._random.random() < self.churn.abandoned and not is_last
        async with anyio.create_task_group() as tasks:
            for place, member in enumerate(self.members):
                exchange: RunRound = _nobody if is_abandoned else partial(meeting.exchange, place)
                tasks.start_soon(member.outer.run_round, exchange, 0.0)
        self.refused += meeting.refused
        if is_abandoned or meeting.abandoned:
            self.abandoned += 1
        else:
            for member in self.members:
                member.in_no_round = 0

    def _come(self) -> None:
        """Somebody with the agreed state, and the moments of a member or fresh ones."""
        donor, number = self._random.choice(self.members), next(self._numbers)
        executor = new_executor(self.start.seed)
        load_vector(executor.model, donor.outer.state.anchor)
        if not self.churn.has_fresh_moments:
            executor.optimizer.load_state_dict(copy.deepcopy(donor.executor.optimizer.state_dict()))
        warm = 0 if self.churn.has_fresh_moments else donor.warm  # fresh moments have a warm-up of their own
        self.members.append(self._member(executor, donor.outer.state, number, warm))

    def _member(self, executor: StageExecutor, state: OuterState, number: int, warm: int) -> _Member:
        versions = run_of(OUTER)
        outer = OuterSync(compute=self.compute, executor=executor, versions=versions, state=state)
        return _Member(executor, outer, replica_data(self.start.seed, number), warm)


async def _nobody(_contribution: Tensor, _outer_step: int) -> Abandoned:
    """See RunRound."""
    await anyio.lowlevel.checkpoint()
    return Abandoned("too few members answered in time", is_soon_again=True)


def measure() -> Report:
    """One model for each seed and way."""
    by_job = of_each(_played, [(name, seed) for name in WAYS for seed in SEEDS])
    found = {name: [by_job[name, seed] for seed in SEEDS] for name in WAYS}
    calm = found["calm"]
    rows = [
        Row("calm", _spread(calm), "report", None),
        *(_beside(name, ways, calm) for name, ways in found.items() if name != "calm"),
    ]
    return Report("churn", "Three of ten replicas die in every round", tuple(rows), (_conditions(found),))


def _played(job: tuple[str, int]) -> Outcome:
    """One way with one seed."""
    (name, seed), texts = job, Texts()
    start = Start.of(texts, seed, 0, MEMBERS)
    with closing(ComputeThread(cpu_threads=1)) as compute:
        return trio.run(_Run(texts, start, WAYS[name], compute).train, MEMBERS * STEPS)


def _beside(name: str, ways: Sequence[Outcome], calm: Sequence[Outcome]) -> Row:
    share, half = mean_with_interval([one.loss / other.loss - 1 for one, other in zip(ways, calm, strict=True)])
    return Row(name, f"{_spread(ways)}; {share:+.2%} ± {half:.2%}", f"<= {TOLERANCE:.1%}", share <= TOLERANCE)


def _spread(ways: Sequence[Outcome]) -> str:
    mean, half = mean_with_interval([way.loss for way in ways])
    return f"{mean:.4f} ± {half:.4f} nats, {sum(way.refused for way in ways)} contributions refused"


def _conditions(found: Mapping[str, Sequence[Outcome]]) -> str:
    churned = found["under churn"]
    return (
        f"{MEMBERS} replicas of {parameter_count():,} parameters from nothing with the default of a run: intervals "
        f"that grow, {OUTER.codec}, momentum by its law; {STEPS:,} inner steps of {BATCH} x {SHAPE.sequence_length} "
        f"bytes of books each in the mean, {MEMBERS * STEPS:,} in all, {found['calm'][0].rounds} rounds when calm. The "
        "learning rate falls from 0.003 to a tenth along a cosine. Under churn "
        f"{fmean(way.deaths for way in churned):.0f} replicas die, each after some of the inner steps before a round, "
        f"{fmean(way.lost for way in churned):.0%} of all inner steps are lost with them and count as tokens all the "
        f"same but in the last row, as many come with the next round from the agreed anchor, and "
        f"{fmean(way.abandoned for way in churned):.1f} of {fmean(way.rounds for way in churned):.0f} rounds come to "
        "nothing, as in `tests/training/test_churn.py` at worst. Held-out loss of the last anchor, nats a byte, on "
        f"{HELD_OUT} windows; seeds {', '.join(map(str, SEEDS))}, means with their 95 % interval (Student's t), "
        "differences paired by seed."
    )
