"""Do several computers learn more than one? Rounds against one replica alone and one large synchronous machine."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import TypeAlias

import msgspec
import torch
import trio
from torch import Tensor

from benchmarks.laboratory import BATCH, INNER, SHAPE, Meeting, Scheme, parameter_count, replica_data
from benchmarks.record import NotHereError, Report, Row, mean_with_interval
from benchmarks.seeds import of_each
from benchmarks.sizes import size
from benchmarks.stacked import StackedReplicas, new_models
from benchmarks.texts import TEXTS, real_texts
from neuroshard.compression import make_codec
from neuroshard.config.run_parameters import InnerOptimizerName, OuterOptimization
from neuroshard.consensus.sync_strategies import FragmentStep, steps_between_rounds, strategy_at
from neuroshard.data.held_out_losses import PINNED_SEQUENCES, chosen_candidate
from neuroshard.model.transformer import StageModel
from neuroshard.model.weights import TensorSchema, initialise, load_vector
from neuroshard.optim.outer import CertifiedWork, Fragment, Nesterov, OuterState, fresh_outer_state
from neuroshard.optim.schedule import learning_rate_at
from neuroshard.types import Architecture

SEEDS = size((1, 2, 3), (1, 2))
TUNING_SEED = 99  # of no other figure
REPLICAS = size(4, 2)
STEPS = size((1_200, 4_000), (4,))
WINDOWS = size(512, 8)
# `python -m benchmarks.together [TABLE]` prints the loss of every arm at each of these rates and after each number of
# steps, with the tuning seed and on windows that no figure is taken from. TUNED and the tables have the rates in use.
RATES = (1e-3, 2e-3, 4e-3, 6e-3, 8e-3, 12e-3)
ALONE, TOGETHER, INT8, CHOSEN, OLD, SYNCHRONOUS = (
    "one replica alone",
    "together",
    "together, int8",
    "together, the outer step by measurement",
    "together, the earlier default",
    "synchronous",
)
TUNED = {ALONE: 4e-3, TOGETHER: 3e-3, INT8: 3e-3, CHOSEN: 3e-3, OLD: 2e-3, SYNCHRONOUS: 6e-3}
GOAL_TO_SYNCHRONOUS, GOAL_TO_ALONE = 0.01, -0.11


class Corpus:
    """Windows of texts, a byte per token. The last tenth of each text is held out, and one text is never trained on."""

    def __init__(self, texts: Sequence[bytes]) -> None:
        """The last text is the unseen one; one text alone has its last fifth as unseen and held-out half each."""
        *known, last = (torch.frombuffer(bytearray(text), dtype=torch.uint8) for text in texts)
        if not known:
            known, last = [last[: len(last) * 9 // 10]], last[len(last) * 9 // 10 :]
        self._trained = torch.cat([text[: len(text) * 9 // 10] for text in known])
        held_out = torch.cat([text[len(text) * 9 // 10 :] for text in known])
        if min(map(len, (self._trained, held_out, last))) < 2 * SHAPE.sequence_length:
            raise NotHereError("the texts are too short: give at least 10,000 bytes of text")
        self.held_out, self.tuning = _even(held_out, WINDOWS, 0), _even(held_out, WINDOWS, SHAPE.sequence_length)
        self.unseen = _even(last, WINDOWS, 0)
        self.choice = _even(held_out, PINNED_SEQUENCES, 16 * SHAPE.sequence_length)  # measured for the outer step only

    @classmethod
    def read(cls, folder: Path | None) -> Corpus:
        """The texts of a folder, or the shared ones. Raises NotHereError."""
        if folder is None:
            return cls(real_texts())
        paths = sorted(folder.rglob("*.txt"))
        if not paths:
            raise NotHereError(f"there are no .txt files in {folder}")
        return cls([path.read_bytes() for path in paths])

    def batch(self, generator: torch.Generator) -> Tensor:
        """Inputs and labels in one, (BATCH, length + 1), at random places."""
        last = len(self._trained) - SHAPE.sequence_length - 1
        starts = torch.randint(0, last, (BATCH,), generator=generator)
        return self._trained[starts[:, None] + torch.arange(SHAPE.sequence_length + 1)].to(torch.int64)


def _even(text: Tensor, count: int, offset: int) -> Tensor:
    """Windows at equal distances, (count, length + 1)."""
    starts = torch.linspace(offset, len(text) - SHAPE.sequence_length - 1, count).to(torch.int64)
    return text[starts[:, None] + torch.arange(SHAPE.sequence_length + 1)].to(torch.int64)


@dataclass(frozen=True)
class Arm:
    """One way of training."""

    name: str
    replicas: int = 1
    data_of: int = 1  # replicas whose data each one trains on; more than 1 is a synchronous machine
    outer: OuterOptimization | None = None  # of the rounds
    is_earlier: bool = False  # the outer step of earlier versions, whose momentum rose over five rounds
    optimizer: InnerOptimizerName = "adamw"

    def strategy(self, schema: TensorSchema, state: OuterState) -> FragmentStep:
        """The outer step from this state."""
        outer = self.outer or OuterOptimization()
        if self.is_earlier:
            momentum = 0.5 + (outer.momentum - 0.5) * min(1.0, state.outer_step / 5)
            whole, codec = Fragment.whole(schema.total_size), make_codec(outer.codec)
            return FragmentStep(whole, (Nesterov(outer.learning_rate, momentum),), codec.residual_decay)
        step = strategy_at(outer, schema, state.outer_step, state.line.sequences // BATCH)
        assert isinstance(step, FragmentStep)
        return step


DEFAULT = OuterOptimization()
EARLIER = OuterOptimization(
    inner_steps=size(500, 2), interval="fixed", learning_rate=0.7, momentum=0.9, aggregator="trimmed_mean"
)
ARMS = (
    Arm(ALONE),
    Arm(TOGETHER, REPLICAS, outer=DEFAULT),
    Arm(INT8, REPLICAS, outer=replace(DEFAULT, codec="int8")),
    Arm(CHOSEN, REPLICAS, outer=replace(DEFAULT, choice="measured")),
    Arm(OLD, REPLICAS, outer=EARLIER, is_earlier=True),
    Arm(SYNCHRONOUS, data_of=REPLICAS),
)


@dataclass(frozen=True)
class Table:
    """One comparison: its size, the tuned rate of each of its arms, and its goals."""

    title: str
    rates: Mapping[str, float]  # at the first number of steps, and at others unless `later_rates` has one
    steps: tuple[int, ...] = STEPS
    seeds: tuple[int, ...] = SEEDS
    arms: tuple[Arm, ...] = ARMS
    shape: Architecture = SHAPE
    goal: float = GOAL_TO_SYNCHRONOUS  # above the synchronous machine, as a share of its loss
    goal_to_alone: float | None = None
    bits: float | None = None  # the goal, per parameter and inner step
    rates_are: str = "was tuned for each arm at 1,200 steps, with another seed"
    later_rates: Mapping[int, Mapping[str, float]] = field(default_factory=dict[int, Mapping[str, float]])

    @property
    def replicas(self) -> int:
        """Replicas of an arm with rounds, and those whose data the synchronous machine has."""
        return max(arm.data_of for arm in self.arms)

    def rate(self, name: str, steps: int) -> float:
        """Learning rate of an arm in a training of so many steps."""
        return self.later_rates.get(steps, self.rates).get(name, self.rates[name])


def _main_arms(replicas: int) -> tuple[Arm, ...]:
    return Arm(ALONE), Arm(TOGETHER, replicas, outer=DEFAULT), Arm(SYNCHRONOUS, data_of=replicas)


MAIN, SIXTEEN, LONG, LARGER, LARGEST = "", "16", "20000", "1.3M", "5M"  # tables
TABLES: Mapping[str, Table] = {
    MAIN: Table(
        "Several computers against one",
        TUNED,
        rates_are="was tuned for each arm and number of steps, with another seed",
        later_rates={4_000: {SYNCHRONOUS: 4e-3}},
        goal_to_alone=GOAL_TO_ALONE,
    ),
    SIXTEEN: Table(
        "Sixteen computers against one",
        {ALONE: 4e-3, TOGETHER: 8e-3, SYNCHRONOUS: 12e-3},
        steps=size((4_000,), (4,)),
        arms=_main_arms(size(16, 3)),
        goal=0.03,
    ),
    LONG: Table(
        "Several computers against one, 20,000 steps",
        {ALONE: 4e-3, TOGETHER: 3e-3, SYNCHRONOUS: 6e-3},
        steps=size((20_000,), (6,)),
        seeds=(1,),
        arms=_main_arms(REPLICAS),
        goal=0.015,
        bits=size(0.13, 100.0),
    ),
    LARGER: Table(
        "Several computers against one, 1.3 M parameters",
        dict.fromkeys((ALONE, TOGETHER, SYNCHRONOUS), 1e-3),
        steps=size((4_000,), (4,)),
        arms=_main_arms(REPLICAS),
        shape=replace(SHAPE, hidden_size=192, layer_count=3, feed_forward_size=512),
        goal=0.015,
    ),
    LARGEST: Table(
        "Several computers against one, 4.9 M parameters",
        {ALONE: 1e-3, TOGETHER: 1e-3, SYNCHRONOUS: 2e-3},
        steps=size((1_200,), (4,)),
        seeds=(1,),
        arms=_main_arms(REPLICAS),
        shape=replace(SHAPE, hidden_size=320, layer_count=4, feed_forward_size=920),
        rates_are="is a guess from those of smaller models, not tuned",
        goal=0.015,
    ),
}


@dataclass(frozen=True)
class Learnt:
    """Losses of one arm with one seed, in nats per byte."""

    held_out: float
    unseen: float
    tuning: float
    bits: float = 0.0  # that a replica uploads, per parameter and inner step
    rounds: int = 0


@dataclass(frozen=True)
class Attempt:
    """One training of an arm."""

    arm: Arm
    seed: int
    rate: float


class Group:
    """The rounds of one attempt, on its rows of the stack."""

    def __init__(self, arm: Arm, weights: Tensor, model: StageModel, pinned: Tensor) -> None:
        """`weights` (replicas, d) of such models are read and replaced in place.

        Choices are measured on `pinned` (n, t + 1), with the weights of `model` replaced.
        """
        assert arm.outer is not None
        self._arm, self._outer, self._weights = arm, arm.outer, weights
        self._model, self._schema = model, TensorSchema.of(model)
        self.state = fresh_outer_state(weights[0].clone())
        self._residuals: list[Tensor | None] = [None] * arm.replicas
        self.meeting = Meeting(Scheme(replace(arm.outer, interval="fixed"), 0, arm.replicas))
        self._since = 0
        self._pinned = pinned

    def after_step(self, *, is_last: bool) -> None:
        """Count an inner step, and make a round if it is due or the last."""
        self._since += 1
        due = steps_between_rounds(self._outer, self.state.line, BATCH, self._arm.replicas)
        if is_last or self._since >= due:
            self._round(is_last=is_last)

    def _round(self, *, is_last: bool) -> None:
        before, strategy = self.state, self._arm.strategy(self._schema, self.state)
        sent = {
            replica: strategy.contribution(before, self._weights[replica], self._residuals[replica])
            for replica in range(self._arm.replicas)
        }
        aggregate = trio.run(self.meeting.agreed, sent, before.outer_step)
        if aggregate is None:
            raise AssertionError("a round of honest replicas was abandoned")
        codec = make_codec(self._outer.codec)
        self._residuals = [strategy.next_residual(None, one, codec.round_trip(one)) for one in sent.values()]
        choice = self._choice(strategy, aggregate)
        line = before.line.after(CertifiedWork(BATCH * self._since, choice=choice))
        self.state, self._since = replace(strategy.next_state(before, aggregate, line.choice), line=line), 0
        # After the last round, as a node's held-out loss and its export: the mean of the replicas, without momentum.
        shown = strategy.mean(before, aggregate) if is_last else self.state.anchor
        self._weights.copy_(shown.expand_as(self._weights))

    def _choice(self, strategy: FragmentStep, aggregate: Tensor) -> int | None:
        """The best candidate for this aggregate, as a seat measures it; None if no measurement is due."""
        if len(strategy.candidates) == 1 or not self.state.line.needs_choice:
            return None
        losses = list[tuple[float, ...]]()
        for place in range(len(strategy.candidates)):
            load_vector(self._model, strategy.next_state(self.state, aggregate, place).anchor)
            losses.append(sequence_losses(self._model, self._pinned))
        return chosen_candidate(losses, len(self._pinned))


def sequence_losses(model: StageModel, rows: Tensor) -> tuple[float, ...]:
    """Nats per token of each sequence (n, t + 1)."""
    with torch.no_grad():
        logits = model.logits(model(rows[:, :-1]))
        each = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="none")
    return tuple(each.view(len(rows), -1).mean(dim=1).tolist())


def trained(
    corpus: Corpus, attempts: Sequence[Attempt], steps: int, shape: Architecture = SHAPE
) -> dict[Attempt, Learnt]:
    """Train all attempts side by side for this number of inner steps; what each has learnt.

    All must have the same amount of data per replica and optimizer. Learning rates decay to a tenth along a cosine,
    which helps every arm: without it, averaging looks better than it is, because it also reduces the noise of a
    constant rate. Attempts with rounds end with one.
    """
    decay = replace(INNER, schedule="cosine", decay_steps=steps - INNER.warmup_steps)
    sources = [
        [attempt.arm.data_of * number + part for part in range(attempt.arm.data_of)]
        for attempt in attempts
        for number in range(attempt.arm.replicas)
    ]
    owners = [attempt for attempt in attempts for _ in range(attempt.arm.replicas)]
    models = new_models(shape, len(owners))
    for model, owner in zip(models, owners, strict=True):
        initialise(model, owner.seed)
    inner = replace(INNER, optimizer=attempts[0].arm.optimizer)
    stack = StackedReplicas(models, inner)
    groups, start = dict[Attempt, Group](), 0
    for attempt in attempts:
        stop = start + attempt.arm.replicas
        if attempt.arm.outer is not None:
            groups[attempt] = Group(attempt.arm, stack.weights[start:stop], models[start], corpus.choice)
        start = stop
    feeds = {
        (owner.seed, number): replica_data(owner.seed, number)
        for owner, numbers in zip(owners, sources, strict=True)
        for number in numbers
    }
    rates = torch.tensor([owner.rate for owner in owners])
    for step in range(steps):
        batches = {key: corpus.batch(feed) for key, feed in feeds.items()}  # replicas of one number have equal data
        rows = torch.stack(
            [
                torch.cat([batches[one.seed, each] for each in numbers])
                for one, numbers in zip(owners, sources, strict=True)
            ]
        )
        stack.step(rows, rates * (learning_rate_at(step, decay) / decay.learning_rate))
        for group in groups.values():
            group.after_step(is_last=step + 1 == steps)
    return _measured(corpus, stack, owners, groups, steps)


def _measured(
    corpus: Corpus, stack: StackedReplicas, owners: Sequence[Attempt], groups: Mapping[Attempt, Group], steps: int
) -> dict[Attempt, Learnt]:
    losses = [stack.held_out_losses(rows).tolist() for rows in (corpus.held_out, corpus.unseen, corpus.tuning)]
    first = {owner: row for row, owner in reversed(list(enumerate(owners)))}
    found = dict[Attempt, Learnt]()
    for owner, row in first.items():
        held_out, unseen, tuning = (each[row] for each in losses)
        group = groups.get(owner)
        bits = 0.0 if group is None else 8 * group.meeting.sent_bytes / (stack.weights.shape[1] * steps)
        rounds = 0 if group is None else group.state.outer_step
        found[owner] = Learnt(held_out, unseen, tuning, bits, rounds)
    return found


def of_all(
    corpus: Corpus,
    seeds: Sequence[int],
    steps: int,
    arms: Sequence[Arm] = ARMS,
    rates: Mapping[str, float] = TUNED,
) -> dict[tuple[str, int, int], Learnt]:
    """Every arm with its tuned rate, by name, seed and steps."""
    found = dict[tuple[str, int, int], Learnt]()
    for same in _alike(arms):
        attempts = [Attempt(arm, seed, rates[arm.name]) for arm in same for seed in seeds]
        found |= {(one.arm.name, one.seed, steps): got for one, got in trained(corpus, attempts, steps).items()}
    return found


def _alike(arms: Sequence[Arm]) -> list[list[Arm]]:
    """Arms that can train side by side."""
    kinds = sorted({(arm.data_of, arm.optimizer) for arm in arms})
    return [[arm for arm in arms if (arm.data_of, arm.optimizer) == kind] for kind in kinds]


def tuned(
    corpus: Corpus,
    steps: int = min(STEPS),
    arms: Sequence[Arm] = ARMS,
    rates: Sequence[float] = RATES,
    shape: Architecture = SHAPE,
) -> dict[str, dict[float, float]]:
    """Loss of every arm on the tuning windows at each rate, with the tuning seed."""
    found = dict[str, dict[float, float]]()
    for arm in arms:
        attempts = [Attempt(arm, TUNING_SEED, rate) for rate in rates]
        learnt = trained(corpus, attempts, steps, shape)
        found[arm.name] = {one.rate: learnt[one].tuning for one in attempts}
    return found


Found: TypeAlias = dict[tuple[str, int, int], Learnt]
"""What arms have learnt, by name, seed and steps."""


@dataclass(frozen=True)
class Job:
    """The arms of a table that train side by side, with one seed."""

    table: str
    steps: int
    seed: int
    kind: int  # place in `_alike`

    @property
    def arms(self) -> list[Arm]:
        """What it trains."""
        return _alike(TABLES[self.table].arms)[self.kind]

    def learnt(self) -> Found:
        """Train them, or take what an earlier start of the same measurement kept in $BENCHMARK_KEEP."""
        folder = os.environ.get("BENCHMARK_KEEP")
        kept = None if folder is None else Path(folder) / f"{self.table}-{self.steps}-{self.seed}-{self.kind}.json"
        if kept is not None and kept.exists():
            by_name = msgspec.json.decode(kept.read_bytes(), type=dict[str, Learnt])
        else:
            table = TABLES[self.table]
            attempts = [Attempt(arm, self.seed, table.rate(arm.name, self.steps)) for arm in self.arms]
            learnt = trained(Corpus.read(None), attempts, self.steps, table.shape)
            by_name = {one.arm.name: got for one, got in learnt.items()}
            if kept is not None:
                kept.write_bytes(msgspec.json.encode(by_name))
        return {(name, self.seed, self.steps): got for name, got in by_name.items()}


def jobs(name: str) -> list[Job]:
    """All trainings of a table."""
    table = TABLES[name]
    kinds = range(len(_alike(table.arms)))
    return [Job(name, steps, seed, kind) for steps in table.steps for seed in table.seeds for kind in kinds]


def measure(name: str = MAIN) -> Report:
    """The arms of one table, paired by seed, on held-out text and on a text that no arm has seen or was tuned on."""
    found = Found()
    for learnt in of_each(Job.learnt, jobs(name)).values():
        found |= learnt
    return report(name, found)


def report(name: str, found: Found) -> Report:
    """What all jobs of a table have found."""
    table = TABLES[name]
    rows = [row for steps in table.steps for arm in table.arms for row in _rows(table, found, arm.name, steps)]
    chosen = ", ".join(f"{arm.name} {_rates(table, arm.name)}" for arm in table.arms)
    shape, replicas = table.shape, table.replicas
    conditions = (
        f"{shape.layer_count} layers of {shape.hidden_size}, {parameter_count(shape):,} parameters; "
        f"{BATCH} x {shape.sequence_length} bytes per inner step "
        f"and replica, {replicas} replicas, from nothing. AdamW with a warm-up of {INNER.warmup_steps} steps, then a "
        f"cosine down to a tenth of a rate that {table.rates_are}: {chosen}. Synchronous: "
        f"one model with the data of all {replicas}. Together: the default of a run, {DEFAULT.codec}."
    )
    if any(arm.is_earlier for arm in table.arms):
        conditions += " The earlier default: every 500 steps, outer step 0.7, momentum 0.9."
    seeds = ", ".join(map(str, table.seeds))
    several = f"Seeds {seeds}; means with their 95 % interval (Student's t); differences are paired by seed."
    one = f"One seed, {seeds}: differences between seeds are not in the figures."
    interval = f"{one if len(table.seeds) == 1 else several} The unseen text is {_unseen_name()}."
    return Report("together" + (name and f"_{name}"), table.title, tuple(rows), (conditions, interval))


def _rates(table: Table, name: str) -> str:
    """The rate of an arm, or the one for each number of steps."""
    return " and ".join(dict.fromkeys(f"{table.rate(name, steps):g}" for steps in table.steps))


def _rows(table: Table, found: Found, name: str, steps: int) -> list[Row]:
    learnt = [found[name, seed, steps] for seed in table.seeds]
    prefix = f"{steps:,} steps, {name}"
    figure = f"{_shown([one.held_out for one in learnt])}; unseen text {_shown([one.unseen for one in learnt])}"
    bits = fmean(one.bits for one in learnt)
    if learnt[0].rounds:
        figure += f"; {learnt[0].rounds} rounds, {bits:.2f} bits"
    rows = [Row(f"{prefix}: loss, nats per byte", figure, "report", None)]
    if name in {ALONE, SYNCHRONOUS}:
        return rows
    for other, goal in ((ALONE, table.goal_to_alone), (SYNCHRONOUS, table.goal)):
        aim = goal if name in {TOGETHER, INT8} else None
        for place, get in _PLACES.items():
            pairs = zip(learnt, (found[other, seed, steps] for seed in table.seeds), strict=True)
            shares = [get(one) / get(than) - 1 for one, than in pairs]
            is_met = None if aim is None else fmean(shares) <= aim
            wanted = "report" if aim is None else f"<= {100 * aim:+g}%"
            rows.append(Row(f"{prefix}, against {other}, {place}", _shown(shares, "+.1%"), wanted, is_met))
    if table.bits is not None:
        wanted = f"<= {table.bits:g}"
        rows.append(Row(f"{prefix}: bits per parameter and step", f"{bits:.3f}", wanted, bits <= table.bits))
    return rows


_PLACES: Mapping[str, Callable[[Learnt], float]] = {
    "held out": lambda learnt: learnt.held_out,
    "unseen text": lambda learnt: learnt.unseen,
}


def _shown(values: Sequence[float], form: str = ".4f") -> str:
    """Mean and interval; of one value only itself."""
    mean, half = mean_with_interval(values)
    return f"{mean:{form}}" + (f" ± {half:{form.removeprefix('+')}}" if len(values) > 1 else "")


def _unseen_name() -> str:
    paths = sorted(TEXTS.rglob("*.txt")) if TEXTS.is_dir() else []
    return paths[-1].stem if paths else "the last one"


QUICK = (ALONE, TOGETHER, OLD, SYNCHRONOUS)


def quick(seed: int, folder: Path | None) -> None:
    """One seed of the main arms; the last line is JSON. Raises NotHereError."""
    torch.set_num_threads(1)
    steps = max(STEPS)
    arms = [arm for arm in ARMS if arm.name in QUICK]
    rates = {arm.name: TABLES[MAIN].rate(arm.name, steps) for arm in arms}
    found = of_all(Corpus.read(folder), (seed,), steps, arms, rates)
    for (name, _, _), one in found.items():
        losses = f"{one.held_out:.4f} held out, {one.unseen:.4f} unseen"
        sys.stdout.write(f"{name}: {losses}, {one.bits:.3f} bits, {one.rounds} rounds\n")
    alone, together, synchronous = (found[name, seed, steps] for name in (ALONE, TOGETHER, SYNCHRONOUS))
    line = {"alone": alone.held_out, "together": together.held_out, "synchronous": synchronous.held_out}
    line = {name: round(value, 5) for name, value in {**line, "bits": together.bits}.items()}
    sys.stdout.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    tuned_table = TABLES[sys.argv[1] if len(sys.argv) > 1 else MAIN]
    for tuned_steps, tuned_arm in product(tuned_table.steps, tuned_table.arms):
        (losses,) = tuned(Corpus.read(None), tuned_steps, (tuned_arm,), shape=tuned_table.shape).values()
        best = partial(min, key=losses.__getitem__)(losses)
        shown = ", ".join(f"{rate:g}: {loss:.4f}" for rate, loss in losses.items())
        print(f"{tuned_steps:,} steps, {tuned_arm.name}: best {best:g} ({shown})", flush=True)
