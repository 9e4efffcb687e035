"""Training with hostile members, beside the honest ones alone: every attack, against three ways to aggregate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import fmean, stdev

from benchmarks.hostile import attacks
from benchmarks.laboratory import BATCH, SHAPE, Outcome, Scheme, Start, Texts, parameter_count, together
from benchmarks.plots import Plot, Point
from benchmarks.record import Report, Row
from benchmarks.recorded_attacks import Record, recorded, replayed
from benchmarks.seeds import of_each
from benchmarks.sizes import size
from neuroshard.config.run_parameters import CodecName, OuterOptimization
from neuroshard.data.held_out_losses import PINNED_SEQUENCES

SEEDS = size((1, 2, 3), (1, 2))
CODECS: tuple[CodecName, ...] = size(("int8", "int4"), ("int8",))
INNER_STEPS, ROUNDS, WARM_STEPS, MOST = size((25, 8, 400, 16), (2, 1, 1, 4))
OUTER = OuterOptimization(inner_steps=INNER_STEPS, trim_fraction=0.25)
GOAL, FALSE_REFUSALS = 0.03, 0.05
ROBUST = "fraction 0.25"
AGGREGATIONS: Mapping[str, OuterOptimization] = {
    ROBUST: OUTER,
    "fraction 0.1": replace(OUTER, trim_fraction=0.1),
    "plain mean": replace(OUTER, aggregator="mean"),
}


@dataclass(frozen=True)
class Group:
    """So many members, the last ones hostile."""

    members: int
    liars: int
    codec: CodecName
    is_recorded: bool = False

    @property
    def honest(self) -> int:
        """Members that are not hostile."""
        return self.members - self.liars

    def shows_weaker(self, seed: int) -> bool:
        """Whether the less robust ways to aggregate are tried, too."""
        return self.is_recorded or (self == GROUPS[0] and seed == SEEDS[0])

    def __str__(self) -> str:
        return f"{self.liars} of {self.members}, {self.codec}{', recorded' if self.is_recorded else ''}"


@dataclass(frozen=True)
class Attempt:
    """A training of a group; without an attack that of its honest members alone."""

    group: Group
    seed: int
    attack: str = ""
    aggregation: str = ROBUST

    def scheme(self) -> Scheme:
        """How it is done."""
        group, outer = self.group, replace(AGGREGATIONS[self.aggregation], codec=self.group.codec)
        if not self.attack:
            return Scheme(outer, ROUNDS, group.honest, votes=True)
        attack = attacks(frozenset(range(group.honest)))[self.attack]
        hostile = dict.fromkeys(range(group.honest, group.members), attack)
        return Scheme(outer, ROUNDS, group.members, attacks=hostile, votes=True)


LARGE = Group(MOST, MOST // 4, "int8")
TRAINED = (*(Group(n, n // 4, codec) for n in size((4, 8), (4,)) for codec in CODECS), *size((LARGE,), ()))
GROUPS = (*TRAINED, *(replace(LARGE, codec=codec, is_recorded=True) for codec in CODECS))
NAMES = tuple(attacks(frozenset()))[: size(None, 2)]


def measure() -> Report:
    """Every attack in every group."""
    attempts = [
        Attempt(group, seed, attack, aggregation)
        for group in GROUPS
        for seed in SEEDS
        for attack in ("", *NAMES)
        for aggregation in AGGREGATIONS
        if aggregation == ROBUST or (attack and group.shows_weaker(seed))
    ]
    outcomes = of_each(_outcome, attempts)
    rows, points = list[Row](), list[Point]()
    for group in GROUPS:
        calm = ", ".join(f"{outcomes[Attempt(group, seed)].loss:.4f}" for seed in SEEDS)
        rows.append(Row(f"{group}: the honest alone", calm, "report", None))
        for name in NAMES:
            worse = [_worse(outcomes, group, name, ROBUST, seed) for seed in SEEDS]
            caught = sum(outcomes[Attempt(group, seed, name)].caught for seed in SEEDS)
            figure = f"{_percent(worse)}, refused {caught} of {len(SEEDS) * ROUNDS * group.liars}"
            down = sum(outcomes[Attempt(group, seed, name)].voted_down for seed in SEEDS)
            figure += f", voted down {down} of {len(SEEDS) * ROUNDS} rounds" if down else ""
            seeds = [seed for seed in SEEDS if group.shows_weaker(seed)]
            for weaker in (one for one in AGGREGATIONS if one != ROBUST and seeds):
                figure += f"; {weaker} {fmean(_worse(outcomes, group, name, weaker, seed) for seed in seeds):+.1%}"
            rows.append(Row(f"{group}: {name}", figure, f"<= {GOAL:.0%}", fmean(worse) <= GOAL))
            points.append(Point(str(group), name, 100 * fmean(worse), 100 * stdev(worse)))
    rows.append(_false_refusals(outcomes))
    plot = Plot("attack", "worse than the honest alone, % of the loss", tuple(points), {"goal": 100 * GOAL})
    return Report("attacks", "Hostile members", tuple(rows), (_conditions(),), plot)


def _outcome(attempt: Attempt) -> Outcome:
    texts, start = _prepared(attempt.seed)
    if attempt.group.is_recorded:
        return replayed(texts, start, attempt.scheme(), _record(attempt.group, attempt.seed))
    return together(texts, start, attempt.scheme())


@cache
def _prepared(seed: int) -> tuple[Texts, Start]:
    texts = Texts()
    return texts, Start.of(texts, seed, WARM_STEPS, MOST)


@cache
def _record(group: Group, seed: int) -> Record:
    texts, start = _prepared(seed)
    return recorded(texts, start, Scheme(replace(OUTER, codec=group.codec), ROUNDS, group.members))


def _worse(outcomes: Mapping[Attempt, Outcome], group: Group, name: str, aggregation: str, seed: int) -> float:
    return outcomes[Attempt(group, seed, name, aggregation)].loss / outcomes[Attempt(group, seed)].loss - 1


def _false_refusals(outcomes: Mapping[Attempt, Outcome]) -> Row:
    attacked = {one: way for one, way in outcomes.items() if one.attack and one.aggregation == ROBUST}
    sent = sum(ROUNDS * one.group.honest for one in attacked)
    share = sum(way.refused for way in attacked.values()) / sent
    figure = f"{share:.2%} of {sent:,}"
    return Row("honest contributions refused", figure, f"< {FALSE_REFUSALS:.0%}", share < FALSE_REFUSALS)


def _percent(worse: Sequence[float]) -> str:
    return f"{fmean(worse):+.1%} ± {stdev(worse):.1%}"


def _conditions() -> str:
    return (
        f"Replicas of {parameter_count():,} parameters go on from {WARM_STEPS} steps of one: {ROUNDS} rounds of "
        f"{INNER_STEPS} inner steps of {BATCH} x {SHAPE.sequence_length} bytes of books; gates, codec, trimmed mean "
        "with fraction 0.25, the next view without the refused and the honest members' vote by the held-out loss of "
        f"{PINNED_SEQUENCES} sequences, as in a round. How much worse the held-out loss "
        "ends than that of the honest members alone, in percent of it; beside it, in the first group for one seed, the "
        f"trimmed mean with fraction 0.1 and the plain mean behind the same gates. Seeds {', '.join(map(str, SEEDS))}; "
        "of what was recorded all for every way. A liar knows all honest "
        "contributions. Recorded: the pseudo-gradients of an honest training of all members, in each round those of "
        "the hostile replaced, and the outer steps that follow. What was recorded does not react to what an attack has "
        "done, so that what it pushes the same way in every round adds up, more than in training, and momentum, which "
        "the vote leaves out, carries it on. Among 4 members one "
        "value at either end is trimmed with both fractions, so they are the same there, and nothing is guaranteed "
        "against 1 of 4 that stays inside of the others' spread. What no codec can say (NaN) counts as absent."
    )
