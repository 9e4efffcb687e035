"""Replicas that train real texts in one process and meet in rounds: what every benchmark of learning is made of.

Inner step, codec, gates, aggregator and outer step are the node's own, and so is all that a round computes. Its
messages are not there: what a member sends is at once with everybody.
"""

from __future__ import annotations

import copy
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from math import ceil, inf
from statistics import fmean, median_low
from typing import Any

import anyio
import torch
import trio
from torch import Tensor

from benchmarks.sizes import size
from benchmarks.texts import real_texts
from neuroshard.aggregation import MemberFacts
from neuroshard.compression import make_codec
from neuroshard.config.run_parameters import GenesisPins, InnerOptimization, OuterOptimization, RunParameters
from neuroshard.consensus.effects import Judge, MakeStatistics, Reduce
from neuroshard.consensus.round_work import RoundWork
from neuroshard.consensus.sync_strategies import Abandoned, Agreed, RunRound, UnderWay, steps_between_rounds
from neuroshard.consensus.sync_strategies import Outcome as RoundOutcome
from neuroshard.data.feed import HeldOut
from neuroshard.data.held_out_losses import PINNED_SEQUENCES
from neuroshard.model.transformer import StageModel
from neuroshard.model.weights import flatten, initialise, load_vector
from neuroshard.optim.inner_optimizer import make_inner_optimizer
from neuroshard.optim.outer import CertifiedWork, LineProgress, fresh_outer_state
from neuroshard.optim.schedule import learning_rate_at
from neuroshard.pipeline.executor import ComputeThread, StageExecutor
from neuroshard.training.held_out_vote import HeldOutVote, VoteRule
from neuroshard.training.outer_sync import OuterSync
from neuroshard.types import Architecture, LayerRange

SHAPE = Architecture(64, 2, 4, 2, 168, 256, 64)
LARGER_SHAPE = replace(SHAPE, hidden_size=256, layer_count=3, feed_forward_size=720)  # of 2.4 M parameters
BATCH, HELD_OUT = 2, size(512, 64)  # sequences of a replica's inner step; windows
INNER = InnerOptimization(learning_rate=2e-3, warmup_steps=20, schedule="constant")


def decaying(steps: int, rate: float = 3e-3) -> InnerOptimization:
    """A cosine down to a tenth of the rate after so many steps.

    A constant rate makes averages look better than they are: they reduce its noise.
    """
    return replace(INNER, learning_rate=rate, schedule="cosine", decay_steps=max(1, steps - INNER.warmup_steps))


def run_of(outer: OuterOptimization, shape: Architecture = SHAPE) -> Callable[[int], RunParameters]:
    """Parameters of a run of one stage with this outer optimisation, for every outer step. They pin no data."""
    pins = GenesisPins("00", 16, None, "00", shape.vocabulary_size)
    run = RunParameters("laboratory", 1, shape, 1, BATCH, BATCH, 1, pins, INNER, outer)
    return lambda _: run


Objects = Callable[[Tensor, int], Awaitable[bool]]
"""Whether the members object to an aggregate (k,) of an outer step."""
Attack = Callable[[Mapping[int, Tensor], int, int], Tensor]
"""What a hostile member sends: from the honest contributions of all by member, its own number and the outer step."""
Rule = Callable[[Mapping[int, Tensor]], Tensor | None]
"""The aggregate (k,) of contributions by member, or None if there is no step."""


class Texts:
    """Windows of all texts at random places, a byte a token; the last tenth of each is held out."""

    def __init__(self) -> None:
        """Raises NotHereError."""
        texts = [torch.frombuffer(bytearray(text), dtype=torch.uint8) for text in real_texts()]
        self._trained = torch.cat([text[: len(text) * 9 // 10] for text in texts])
        held_out = torch.cat([text[len(text) * 9 // 10 :] for text in texts])
        stride = (len(held_out) - SHAPE.sequence_length - 1) // HELD_OUT
        self.held_out = _windows(held_out, range(0, stride * HELD_OUT, stride))
        pinned = range(stride // 2, stride * HELD_OUT, stride * HELD_OUT // PINNED_SEQUENCES)
        self.pinned = _windows(held_out, pinned)  # what members vote by

    def batch(self, sequences: int, generator: torch.Generator) -> Tensor:
        """Inputs and labels in one, (sequences, length + 1)."""
        last = len(self._trained) - SHAPE.sequence_length - 1
        return _windows(self._trained, torch.randint(0, last, (sequences,), generator=generator).tolist())


@dataclass(frozen=True)
class Start:
    """Where all ways of one seed begin: what one replica has learnt in its first steps."""

    seed: int
    steps: int
    weights: Tensor
    moments: dict[str, Any]
    shape: Architecture = SHAPE

    @staticmethod
    def of(texts: Texts, seed: int, steps: int, replicas: int, shape: Architecture = SHAPE) -> Start:
        """Train one model for so many steps, on data that none of the replicas has."""
        executor, generator = new_executor(seed, shape=shape), replica_data(seed, replicas)
        for step in range(steps):
            inner_step(executor, texts.batch(BATCH, generator), step)
        return Start(seed, steps, flatten(executor.model), executor.optimizer.state_dict(), shape)

    def executor(self) -> StageExecutor:
        """A replica that goes on from here."""
        executor = new_executor(self.seed, shape=self.shape)
        load_vector(executor.model, self.weights)
        executor.optimizer.load_state_dict(copy.deepcopy(self.moments))
        return executor


@dataclass(frozen=True)
class Scheme:
    """How replicas train together."""

    outer: OuterOptimization
    rounds: int
    replicas: int = 4
    keeps_residuals: bool = True
    attacks: Mapping[int, Attack] = field(default_factory=dict[int, Attack])  # by member
    late_share: float = 0.0  # of the inner steps between two rounds: so long the one before takes beside them
    paces: tuple[int, ...] = ()  # inner steps of each replica between two rounds, where they differ
    votes: bool = False  # on every aggregate of whole models, by its held-out loss
    are_friends: bool = True  # False: the gates of runs that are open to strangers

    @property
    def steps(self) -> int:
        """Inner steps of a replica."""
        return self.rounds * self.outer.inner_steps


@dataclass(frozen=True)
class Outcome:
    """How one way of training ended."""

    loss: float  # held out, nats a byte, of what was agreed on
    refused: int = 0  # honest contributions
    caught: int = 0  # hostile contributions that were refused or could not be read
    abandoned: int = 0  # rounds
    voted_down: int = 0  # of these
    bits: float = 0.0  # that a member sent, of a parameter and inner step
    own_loss: float | None = None  # of the replicas' own weights, their mean; other where rounds concern parts


@dataclass
class Meeting:
    """The rounds of the replicas: what a group's members do with what they sent each other."""

    scheme: Scheme
    refused: int = 0
    caught: int = 0
    abandoned: int = 0
    voted_down: int = 0
    sent_bytes: float = 0.0
    history: list[Mapping[int, Tensor]] | None = None  # honest contributions of each round, where somebody wants them
    objects: Objects | None = None  # the honest members' vote: of the same weights and sequences, so one for all
    work: Sequence[int] = ()  # inner steps since the last round, by member; () where all have made as many
    _contributions: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    _done: anyio.Event = field(default_factory=anyio.Event)
    _aggregate: Tensor | None = None

    async def exchange(self, replica: int, contribution: Tensor, outer_step: int) -> Agreed | Abandoned:
        """See Exchange; the last one to come computes for all."""
        contributions, done, count = self._contributions, self._done, self.scheme.replicas
        contributions[replica] = contribution
        if len(contributions) == count:
            self._aggregate = await self.agreed(contributions, outer_step)
            if self.history is not None:
                self.history.append({member: vector.clone() for member, vector in contributions.items()})
            self._contributions, self._done = {}, anyio.Event()
            done.set()
        await done.wait()
        if self._aggregate is None:
            return Abandoned("too many were refused, or the members voted no")
        codec = make_codec(self.scheme.outer.codec)
        sent = codec.round_trip(contribution) if self.scheme.keeps_residuals else None
        work = CertifiedWork(BATCH * median_low(self.work)) if self.work else None
        return Agreed(self._aggregate, count, sent, work=work)

    async def agreed(self, contributions: Mapping[int, Tensor], outer_step: int) -> Tensor | None:
        """What a round makes of the honest contributions, each (k,), by member; None where it is abandoned."""
        scheme = self.scheme
        sent = dict[int, Tensor]()
        for member, vector in sorted(contributions.items()):
            attack = scheme.attacks.get(member)
            sent[member] = vector if attack is None else attack(contributions, member, outer_step)
        reduced = ReducedRound.of(scheme, sent, self.work)
        self.caught += len(reduced.refused & scheme.attacks.keys())
        self.refused += len(reduced.refused - scheme.attacks.keys())
        if reduced.aggregate is None:
            self.abandoned += 1
            return None
        # every slice to two reducers, and a share of the results to everybody
        others = (scheme.replicas - 1) / scheme.replicas
        self.sent_bytes += others * (2 * reduced.part_bytes + reduced.result_bytes)
        if self.objects is None or not await self.objects(reduced.aggregate, outer_step):
            return reduced.aggregate
        self.voted_down += 1
        self.abandoned += 1
        return None


@dataclass(frozen=True)
class ReducedRound:
    """What a round's computations make of contributions, without its messages and its vote."""

    aggregate: Tensor | None  # (k,); None if none was accepted
    refused: frozenset[int]  # members
    part_bytes: int = 0  # of one encoded contribution
    result_bytes: int = 0

    @classmethod
    def of(cls, scheme: Scheme, contributions: Mapping[int, Tensor], work: Sequence[int] = ()) -> ReducedRound:
        """Of contributions, each (k,), by member. The strategy chooses the length for each round.

        They weigh as the `work` of their members, or all the same.
        """
        length = len(next(iter(contributions.values())))
        computed = RoundWork.of(scheme.outer, length)
        # no codec that loses something can say NaN: what comes is malformed, and its sender absent
        says_all = scheme.outer.codec == "fp32"
        sent = {
            member: tuple(map(bytes, computed.encoded(vector.contiguous())))
            for member, vector in contributions.items()
            if says_all or bool(vector.isfinite().all())
        }
        absent = contributions.keys() - sent.keys()
        if not sent:
            return cls(None, frozenset(absent))
        members = sorted(sent)
        rows = {index: [sent[member][index] for member in members] for index in range(computed.plan.count)}
        first = {sent[member]: row for row, member in reversed(list(enumerate(members)))}
        facts = replace(
            MemberFacts.of_equals(len(members), are_friends=scheme.are_friends),
            work=tuple(float(work[member]) if work else 1.0 for member in members),
            originals=tuple(first[sent[member]] for member in members),
        )
        statistics = list(computed.statistics(MakeStatistics("", rows, facts)).values())
        judged = computed.judged(Judge("", statistics, facts))
        refused = frozenset(absent | {members[row] for row in judged.verdict.refused})
        if judged.reduction is None:
            return cls(None, refused)
        results = computed.reduced(Reduce("", rows, judged.reduction))
        aggregate = computed.decoded([results[index] for index in range(computed.plan.count)])
        return cls(aggregate, refused, sum(map(len, sent[members[0]])), sum(map(len, results.values())))


class Late:
    """The rounds of one replica that go on beside its inner steps: it asks for the end of each a second time."""

    def __init__(self, meeting: Meeting, replica: int) -> None:
        self._meeting = meeting
        self._replica = replica
        self._begun: Tensor | None = None  # (d,)

    async def exchange(self, contribution: Tensor, outer_step: int) -> RoundOutcome:
        """See Exchange."""
        begun, self._begun = self._begun, contribution
        if begun is None:
            return UnderWay()
        self._begun = None
        outcome = await self._meeting.exchange(self._replica, begun, outer_step)
        return outcome if isinstance(outcome, Abandoned) else replace(outcome, late_for=begun)


def apart(texts: Texts, start: Start, steps: int, batch: int) -> Outcome:
    """One model without rounds."""
    executor, generator = start.executor(), replica_data(start.seed, 0)
    for step in range(start.steps, start.steps + steps):
        inner_step(executor, texts.batch(batch, generator), step)
    return Outcome(held_out_loss(executor.model, texts))


def together(texts: Texts, start: Start, scheme: Scheme, meeting: Meeting | None = None) -> Outcome:
    """Replicas that train on data of their own and meet after every `inner_steps`. The interval must be fixed."""
    if scheme.outer.interval != "fixed":
        raise ValueError("the rounds of a scheme have one interval")
    executors = [start.executor() for _ in range(scheme.replicas)]
    meeting = meeting or Meeting(scheme)
    with closing(ComputeThread(cpu_threads=1)) as compute:
        outer = [
            OuterSync(
                compute=compute,
                executor=executor,
                versions=run_of(scheme.outer, start.shape),
                state=replace(fresh_outer_state(flatten(executor.model)), line=LineProgress(start.steps * BATCH)),
            )
            for executor in executors
        ]

        if scheme.votes:
            meeting.objects = vote(texts, compute, executors[0], outer[0])

        async def train() -> None:
            async with anyio.create_task_group() as tasks:
                for replica, executor in enumerate(executors):
                    make_step = partial(_replica_step, executor, texts, replica_data(start.seed, replica))
                    pace = _Pace.of(scheme, replica, start.steps)
                    exchange = partial(meeting.exchange, replica)
                    if scheme.late_share:
                        exchange = Late(meeting, replica).exchange
                    tasks.start_soon(_train, outer[replica], exchange, make_step, pace, compute)

        trio.run(train)
    if len({one.state.anchor.numpy().tobytes() for one in outer}) != 1:
        raise AssertionError("the replicas did not agree")
    bits = 8 * meeting.sent_bytes / (parameter_count(start.shape) * scheme.steps)
    own_loss = fmean(held_out_loss(executor.model, texts) for executor in executors)
    load_vector(executors[0].model, outer[0].state.anchor)
    loss = held_out_loss(executors[0].model, texts)
    return Outcome(loss, meeting.refused, meeting.caught, meeting.abandoned, meeting.voted_down, bits, own_loss)


def vote(texts: Texts, compute: ComputeThread, executor: StageExecutor, outer: OuterSync) -> Objects:
    """What members say of an aggregate that holds this state, on sequences that no result is measured on."""
    asked = HeldOutVote(compute, executor, outer, batch_size=PINNED_SEQUENCES, rule=VoteRule(seconds=inf))
    asked.pin(HeldOut(texts.pinned, unigram_entropy=inf))

    async def objects(aggregate: Tensor, outer_step: int) -> bool:
        return bool(await asked.objection(aggregate, await outer.root_after(aggregate, outer_step, CertifiedWork(0))))

    return objects


def parameter_count(shape: Architecture = SHAPE) -> int:
    """Of the model that all train."""
    return sum(parameter.numel() for parameter in StageModel(shape).parameters())


@dataclass(frozen=True)
class _Pace:
    """The life of one replica in inner steps."""

    first_step: int
    total: int
    between: int  # the beginnings of two rounds
    late: int  # of these until a round's end is taken over; 0: it ends at once

    @staticmethod
    def of(scheme: Scheme, replica: int, first_step: int) -> _Pace:
        between = (
            scheme.paces[replica]
            if scheme.paces
            else steps_between_rounds(scheme.outer, LineProgress(), BATCH, scheme.replicas)
        )
        total = scheme.rounds * between if scheme.paces else scheme.steps
        return _Pace(first_step, total, between, ceil(scheme.late_share * between))


async def _train(
    outer: OuterSync, exchange: RunRound, make_step: Callable[[int], None], pace: _Pace, compute: ComputeThread
) -> None:
    for done in range(1, pace.total + 1):
        await compute.run(partial(make_step, pace.first_step + done - 1))
        outer.after_step(BATCH)
        since = done % pace.between
        if done > pace.between and (since or pace.between) == pace.late:
            await outer.run_round(exchange, 0.0)
        if since == 0:
            await outer.run_round(exchange, 0.0)
    if pace.total % pace.between < pace.late:
        await outer.run_round(exchange, 0.0)


def _replica_step(executor: StageExecutor, texts: Texts, generator: torch.Generator, step: int) -> None:
    inner_step(executor, texts.batch(BATCH, generator), step)


def new_executor(seed: int, inner: InnerOptimization = INNER, shape: Architecture = SHAPE) -> StageExecutor:
    """The first weights of a seed, and fresh moments."""
    model = StageModel(shape, LayerRange(0, shape.layer_count))
    initialise(model, seed)
    return StageExecutor(model, make_inner_optimizer(model, inner), torch.device("cpu"))


def inner_step(executor: StageExecutor, rows: Tensor, step: int, inner: InnerOptimization = INNER) -> None:
    """One step on inputs and labels in one, (sequences, length + 1), with the learning rate of this step."""
    labels = rows[:, 1:]
    executor.loss(rows[:, :-1], labels)
    result = executor.step(learning_rate_at(step, inner), inner.max_grad_norm, labels.numel())
    if not result.finite:
        raise AssertionError(f"step {step} was not finite")


def held_out_loss(model: StageModel, texts: Texts) -> float:
    """Nats a byte."""
    rows = texts.held_out
    with torch.no_grad():
        return (model.loss_sum(model(rows[:, :-1]), rows[:, 1:]) / rows[:, 1:].numel()).item()


def _windows(ids: Tensor, starts: Sequence[int]) -> Tensor:
    return torch.stack([ids[start : start + SHAPE.sequence_length + 1] for start in starts]).to(torch.int64)


def replica_data(seed: int, replica: int) -> torch.Generator:
    """What decides on the batches of a replica."""
    return torch.Generator().manual_seed(1000 * seed + replica)
