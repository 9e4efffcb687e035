"""Training with hostile members, compared with the honest ones alone: every attack, and several ways to aggregate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import fmean, stdev

from benchmarks.hostile import ATTACKS, SPREADS, attacked
from benchmarks.laboratory import BATCH, LARGER_SHAPE, SHAPE, Outcome, Scheme, Start, Texts, parameter_count, together
from benchmarks.plots import Plot, Point
from benchmarks.record import Report, Row
from benchmarks.seeds import of_each, seeds
from benchmarks.sizes import size
from neuroshard.config.run_parameters import OuterOptimization
from neuroshard.data.held_out_losses import PINNED_SEQUENCES
from neuroshard.types import Architecture

INNER_STEPS, ROUNDS, WARM_STEPS = size((25, 8, 400), (2, 1, 1))
OUTER = OuterOptimization(inner_steps=INNER_STEPS, interval="fixed", aggregator="trimmed_mean", trim_fraction=0.25)
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


@dataclass(frozen=True)
class Grid:
    """The trainings of one model."""

    shape: Architecture
    seeds: tuple[int, ...]
    groups: tuple[int, ...]  # members, a quarter of them hostile
    attacks: tuple[str, ...]
    ways: tuple[str, ...] = (SHIPPED,)  # to aggregate


GRIDS = {
    "122k": Grid(SHAPE, seeds(size(3, 2)), size((8, 16), (4,)), ATTACKS[: size(None, 2)], tuple(WAYS)),
    # the worst three of the 122k grid, and the adaptive attack that is known best
    "2.4M": Grid(
        size(LARGER_SHAPE, SHAPE), (1,), size((16,), (4,)), ("a little is enough", "mimic", "x100", "inner product")
    ),
}


@dataclass(frozen=True)
class Attempt:
    """A training of a group; without an attack either that of its honest members alone, or of all, and all honest."""

    model: str
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


def attempts(model: str) -> list[Attempt]:
    """All trainings of a model's grid, the most telling first."""
    found, grid = list[Attempt](), GRIDS[model]
    for seed in grid.seeds:
        for members in grid.groups:
            clean = [Attempt(model, members, seed, way=way, is_whole=True) for way in (SHIPPED, MEAN)]
            attacked_ones = [Attempt(model, members, seed, name) for name in grid.attacks]
            found += [Attempt(model, members, seed), *clean, *attacked_ones]
    members, seed = grid.groups[0], grid.seeds[0]
    for way in grid.ways:
        if way != SHIPPED:
            found += [Attempt(model, members, seed, name, way) for name in COMPARED if name in grid.attacks]
            found.append(Attempt(model, members, seed, way=way, is_whole=True))
    return list(dict.fromkeys(found))


def measure(model: str = "122k") -> Report:
    """Every attack in every group."""
    results = Results(model, of_each(_outcome, attempts(model)))
    grid, rows, points = GRIDS[model], list[Row](), list[Point]()
    for members in grid.groups:
        group = f"{members // 4} of {members}"
        calm = ", ".join(f"{results.alone(members, seed).loss:.4f}" for seed in grid.seeds)
        rows += [Row(f"{group}: the honest alone", calm, "report", None), results.clean(members)]
        for name in grid.attacks:
            worse = [results.worse(members, seed, name) for seed in grid.seeds]
            rows.append(results.attacked(members, name, worse))
            points.append(Point(group, name, 100 * fmean(worse), 100 * stdev(worse) if len(worse) > 1 else 0.0))
    rows += [results.other_way(way) for way in grid.ways if way != SHIPPED]
    rows.append(results.false_refusals())
    plot = Plot("attack", "worse than the honest alone, % of the loss", tuple(points), {"goal": 100 * GOAL})
    name, title = (
        ("attacks", "Hostile members") if model == "122k" else (f"attacks_{model}", f"Hostile members, {model}")
    )
    return Report(name, title, tuple(rows), (_conditions(grid),), plot)


def _outcome(attempt: Attempt) -> Outcome:
    texts, start = _prepared(attempt.model, attempt.seed)
    return together(texts, start, attempt.scheme())


@cache
def _prepared(model: str, seed: int) -> tuple[Texts, Start]:
    texts, grid = Texts(), GRIDS[model]
    return texts, Start.of(texts, seed, WARM_STEPS, max(grid.groups), grid.shape)


@dataclass(frozen=True)
class Results:
    """The outcomes of a grid."""

    model: str
    outcomes: Mapping[Attempt, Outcome]

    def alone(self, members: int, seed: int) -> Outcome:
        """The honest members of a group without the hostile ones."""
        return self.outcomes[Attempt(self.model, members, seed)]

    def worse(self, members: int, seed: int, name: str, way: str = SHIPPED) -> float:
        """How much an attack raises the loss above that of the honest members alone, as a share of it."""
        attacked_one = self.outcomes[Attempt(self.model, members, seed, name, way)]
        return attacked_one.loss / self.alone(members, seed).loss - 1

    def clean(self, members: int) -> Row:
        """What the rule costs a group in which all are honest."""
        all_seeds = GRIDS[self.model].seeds
        cost = [self._cost(members, seed, SHIPPED) for seed in all_seeds]
        refused = sum(self.outcomes[Attempt(self.model, members, seed, is_whole=True)].refused for seed in all_seeds)
        figure = f"{_percent(cost)}, refused {refused} of {len(all_seeds) * ROUNDS * members}"
        item = f"{members} honest: above their plain mean"
        return Row(item, figure, f"<= {CLEAN_GOAL:.1%}", fmean(cost) <= CLEAN_GOAL)

    def attacked(self, members: int, name: str, worse: Sequence[float]) -> Row:
        """What an attack did to a group, by seed."""
        all_seeds, liars = GRIDS[self.model].seeds, members // 4
        ways = [self.outcomes[Attempt(self.model, members, seed, name)] for seed in all_seeds]
        figure = f"{_percent(worse)}, refused {sum(way.caught for way in ways)} of {len(all_seeds) * ROUNDS * liars}"
        down = sum(way.voted_down for way in ways)
        figure += f", voted down {down} of {len(all_seeds) * ROUNDS} rounds" if down else ""
        return Row(f"{liars} of {members}: {name}", figure, f"<= {GOAL:.0%}", fmean(worse) <= GOAL)

    def other_way(self, way: str) -> Row:
        """Another way to aggregate, in the first group with the first seed."""
        grid = GRIDS[self.model]
        members, seed = grid.groups[0], grid.seeds[0]
        names = [name for name in COMPARED if name in grid.attacks]
        parts = [f"{name} {self.worse(members, seed, name, way):+.1%}" for name in names]
        parts.append(f"all honest {self._cost(members, seed, way):+.2%} above their plain mean")
        return Row(f"{members // 4} of {members}, one seed: {way}", ", ".join(parts), "report", None)

    def false_refusals(self) -> Row:
        """Honest contributions that were refused while others attacked."""
        attacked_ones = {one: way for one, way in self.outcomes.items() if one.attack and one.way == SHIPPED}
        sent = sum(ROUNDS * one.honest for one in attacked_ones)
        share = sum(way.refused for way in attacked_ones.values()) / sent
        figure = f"{share:.2%} of {sent:,}"
        return Row(
            "honest contributions refused under attack", figure, f"< {FALSE_REFUSALS:.0%}", share < FALSE_REFUSALS
        )

    def _cost(self, members: int, seed: int, way: str) -> float:
        one, mean = (self.outcomes[Attempt(self.model, members, seed, way=each, is_whole=True)] for each in (way, MEAN))
        return one.loss / mean.loss - 1


def _percent(worse: Sequence[float]) -> str:
    mean = f"{fmean(worse):+.2%}"
    return f"{mean} ± {stdev(worse):.2%}" if len(worse) > 1 else f"{mean} (one seed)"


def _conditions(grid: Grid) -> str:
    return (
        f"Replicas of {parameter_count(grid.shape):,} parameters go on from {WARM_STEPS} steps of one: {ROUNDS} rounds "
        f"of {INNER_STEPS} inner steps of {BATCH} x {SHAPE.sequence_length} bytes of books; gates, int8, aggregator "
        f"and the honest members' vote by the held-out loss of {PINNED_SEQUENCES} sequences, as in a round that is "
        "open to strangers. All attacks act in training. The figure is how much worse the held-out loss ends than that "
        f"of the honest members alone, in percent of it. Seeds {', '.join(map(str, grid.seeds))}. A liar knows all "
        'honest contributions and the rule. The liars of "a little is enough", "inner product", "mimic", "one poisoned '
        'slice" and "slow drift" adapt: in each round they try three strengths (mimic has one) and noise of '
        f"{', '.join(f'{spread:g}' for spread in SPREADS)} of their norm that makes them less similar to each other, "
        "and send what moves the aggregate farthest from that of the honest alone. What no codec can say (NaN) counts "
        'as refused, and so does nothing of a copy, which counts as one with its original. "Near-copies one by one" '
        "has the gates of friends."
    )
