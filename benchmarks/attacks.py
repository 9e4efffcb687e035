"""Training with hostile members, compared with the honest ones alone: every attack, and several ways to aggregate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import fmean, stdev

from benchmarks.hostile import ATTACKS, SPREADS, attacked
from benchmarks.laboratory import BATCH, SHAPE, Outcome, Scheme, Start, Texts, parameter_count, together
from benchmarks.plots import Plot, Point
from benchmarks.record import Report, Row
from benchmarks.seeds import of_each, seeds
from benchmarks.sizes import size
from neuroshard.config.run_parameters import OuterOptimization
from neuroshard.data.held_out_losses import PINNED_SEQUENCES

SEEDS = seeds(size(3, 2))
GROUPS = size((8, 16), (4,))  # members, a quarter of them hostile
INNER_STEPS, ROUNDS, WARM_STEPS = size((25, 8, 400), (2, 1, 1))
OUTER = OuterOptimization(inner_steps=INNER_STEPS, interval="fixed", trim_fraction=0.25)
GOAL, CLEAN_GOAL, FALSE_REFUSALS = 0.03, 0.003, 0.05
SHIPPED = "trimmed mean, fraction 0.25, near-copies as one"
MEAN = "plain mean"


@dataclass(frozen=True)
class Way:
    """A way to aggregate."""

    outer: OuterOptimization = OUTER
    are_friends: bool = False


WAYS: Mapping[str, Way] = {
    SHIPPED: Way(),
    "near-copies one by one": Way(are_friends=True),
    "fraction 0.1": Way(replace(OUTER, trim_fraction=0.1)),
    "median": Way(replace(OUTER, aggregator="median")),
    "Krum": Way(replace(OUTER, aggregator="krum")),
    "centred clipping": Way(replace(OUTER, aggregator="centred_clipping")),
    MEAN: Way(replace(OUTER, aggregator="mean")),
}
COMPARED = ("a little is enough", "mimic")  # the attacks on every way, in the first group with the first seed
NAMES = ATTACKS[: size(None, 2)]


@dataclass(frozen=True)
class Attempt:
    """A training of a group; without an attack either that of its honest members alone, or of all, and all honest."""

    members: int
    seed: int
    attack: str = ""
    way: str = SHIPPED
    is_whole: bool = False

    @property
    def honest(self) -> int:
        """Members that are not hostile."""
        return self.members - self.members // 4

    def scheme(self) -> Scheme:
        """How it is done."""
        way = WAYS[self.way]
        count = self.members if self.attack or self.is_whole else self.honest
        scheme = Scheme(way.outer, ROUNDS, count, votes=True, are_friends=way.are_friends)
        return attacked(scheme, self.honest, self.attack) if self.attack else scheme


def attempts() -> list[Attempt]:
    """All trainings, the most telling first."""
    found = list[Attempt]()
    for seed in SEEDS:
        for members in GROUPS:
            clean = [Attempt(members, seed, way=way, is_whole=True) for way in (SHIPPED, MEAN)]
            found += [Attempt(members, seed), *clean, *(Attempt(members, seed, name) for name in NAMES)]
    for way in WAYS:
        if way != SHIPPED:
            found += [Attempt(GROUPS[0], SEEDS[0], name, way) for name in COMPARED if name in NAMES]
            found.append(Attempt(GROUPS[0], SEEDS[0], way=way, is_whole=True))
    return list(dict.fromkeys(found))


def measure() -> Report:
    """Every attack in every group."""
    outcomes = of_each(_outcome, attempts())
    rows, points = list[Row](), list[Point]()
    for members in GROUPS:
        group, liars = f"{members // 4} of {members}", members // 4
        calm = ", ".join(f"{outcomes[Attempt(members, seed)].loss:.4f}" for seed in SEEDS)
        rows.append(Row(f"{group}: the honest alone", calm, "report", None))
        rows.append(_clean(outcomes, members))
        for name in NAMES:
            worse = [_worse(outcomes, Attempt(members, seed, name)) for seed in SEEDS]
            ways = [outcomes[Attempt(members, seed, name)] for seed in SEEDS]
            figure = f"{_percent(worse)}, refused {sum(way.caught for way in ways)} of {len(SEEDS) * ROUNDS * liars}"
            down = sum(way.voted_down for way in ways)
            figure += f", voted down {down} of {len(SEEDS) * ROUNDS} rounds" if down else ""
            rows.append(Row(f"{group}: {name}", figure, f"<= {GOAL:.0%}", fmean(worse) <= GOAL))
            points.append(Point(group, name, 100 * fmean(worse), 100 * stdev(worse) if len(worse) > 1 else 0.0))
    rows += [_other_way(outcomes, way) for way in WAYS if way != SHIPPED]
    rows.append(_false_refusals(outcomes))
    plot = Plot("attack", "worse than the honest alone, % of the loss", tuple(points), {"goal": 100 * GOAL})
    return Report("attacks", "Hostile members", tuple(rows), (_conditions(),), plot)


def _outcome(attempt: Attempt) -> Outcome:
    texts, start = _prepared(attempt.seed)
    return together(texts, start, attempt.scheme())


@cache
def _prepared(seed: int) -> tuple[Texts, Start]:
    texts = Texts()
    return texts, Start.of(texts, seed, WARM_STEPS, max(GROUPS))


def _worse(outcomes: Mapping[Attempt, Outcome], attempt: Attempt) -> float:
    return outcomes[attempt].loss / outcomes[Attempt(attempt.members, attempt.seed)].loss - 1


def _cost(outcomes: Mapping[Attempt, Outcome], members: int, seed: int, way: str) -> float:
    clean, mean = (outcomes[Attempt(members, seed, way=one, is_whole=True)].loss for one in (way, MEAN))
    return clean / mean - 1


def _clean(outcomes: Mapping[Attempt, Outcome], members: int) -> Row:
    cost = [_cost(outcomes, members, seed, SHIPPED) for seed in SEEDS]
    refused = sum(outcomes[Attempt(members, seed, is_whole=True)].refused for seed in SEEDS)
    figure = f"{_percent(cost, 2)}, refused {refused} of {len(SEEDS) * ROUNDS * members}"
    item = f"{members} honest: above their plain mean"
    return Row(item, figure, f"<= {CLEAN_GOAL:.1%}", fmean(cost) <= CLEAN_GOAL)


def _other_way(outcomes: Mapping[Attempt, Outcome], way: str) -> Row:
    members, seed = GROUPS[0], SEEDS[0]
    parts = [f"{name} {_worse(outcomes, Attempt(members, seed, name, way)):+.1%}" for name in COMPARED if name in NAMES]
    parts.append(f"all honest {_cost(outcomes, members, seed, way):+.2%} above their plain mean")
    return Row(f"{members // 4} of {members}, one seed: {way}", ", ".join(parts), "report", None)


def _false_refusals(outcomes: Mapping[Attempt, Outcome]) -> Row:
    attacked_ones = {one: way for one, way in outcomes.items() if one.attack and one.way == SHIPPED}
    sent = sum(ROUNDS * one.honest for one in attacked_ones)
    share = sum(way.refused for way in attacked_ones.values()) / sent
    figure = f"{share:.2%} of {sent:,}"
    return Row("honest contributions refused under attack", figure, f"< {FALSE_REFUSALS:.0%}", share < FALSE_REFUSALS)


def _percent(worse: Sequence[float], digits: int = 1) -> str:
    mean = f"{fmean(worse):+.{digits}%}"
    return f"{mean} ± {stdev(worse):.{digits}%}" if len(worse) > 1 else f"{mean} (one seed)"


def _conditions() -> str:
    return (
        f"Replicas of {parameter_count():,} parameters go on from {WARM_STEPS} steps of one: {ROUNDS} rounds of "
        f"{INNER_STEPS} inner steps of {BATCH} x {SHAPE.sequence_length} bytes of books; gates, int8, aggregator and "
        f"the honest members' vote by the held-out loss of {PINNED_SEQUENCES} sequences, as in a round that is open to "
        "strangers. All attacks act in training. The figure is how much worse the held-out loss ends than that of the "
        f"honest members alone, in percent of it. Seeds {', '.join(map(str, SEEDS))}. A liar knows all honest "
        'contributions and the rule. The liars of "a little is enough", "inner product", "mimic", "one poisoned '
        'slice" and "slow drift" adapt: in each round they try three strengths (mimic has one) and noise of '
        f"{', '.join(f'{spread:g}' for spread in SPREADS)} of their norm that makes them less similar to each other, "
        "and send what moves the aggregate farthest from that of the honest alone. What no codec can say (NaN) counts "
        'as refused, and so does nothing of a copy, which counts as one with its original. "Near-copies one by one" '
        "has the gates of friends."
    )
