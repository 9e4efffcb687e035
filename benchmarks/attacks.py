"""Training with hostile members, beside the honest ones alone: every attack, against three ways to aggregate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import fmean, stdev

from benchmarks.hostile import attacks
from benchmarks.laboratory import BATCH, SHAPE, Outcome, Scheme, Start, Texts, parameter_count, together
from benchmarks.record import Report, Row
from neuroshard.config.run_parameters import CodecName, OuterOptimization

SEEDS = (1, 2, 3)
INNER_STEPS, ROUNDS, WARM_STEPS, MOST = 25, 8, 400, 8
OUTER = OuterOptimization(inner_steps=INNER_STEPS, trim_fraction=0.25)
GOAL, FALSE_REFUSALS = 0.03, 0.05
WEAKER: Mapping[str, OuterOptimization] = {
    "fraction 0.1": replace(OUTER, trim_fraction=0.1),
    "plain mean": replace(OUTER, aggregator="mean"),
}


@dataclass(frozen=True)
class _Group:
    """So many members, the last ones hostile."""

    members: int
    liars: int
    codec: CodecName
    seeds: tuple[int, ...]

    @property
    def honest(self) -> int:
        return self.members - self.liars


GROUPS = (_Group(4, 1, "int8", SEEDS), _Group(4, 1, "int4", SEEDS[:1]), _Group(8, 2, "int8", SEEDS[:1]))


def measure() -> Report:
    """Every attack in every group."""
    texts = Texts()
    starts = {seed: Start.of(texts, seed, WARM_STEPS, MOST) for seed in SEEDS}
    rows, refused, sent = list[Row](), 0, 0
    for group in GROUPS:
        calm = {seed: _calm(texts, starts[seed], group) for seed in group.seeds}
        rows.append(Row(f"{_named(group)}: the honest alone", _losses(list(calm.values())), "report", None))
        for name in attacks(frozenset(range(group.honest))):
            ways = [_attacked(texts, starts[seed], group, OUTER, name) for seed in group.seeds]
            worse = [way.loss / calm[seed].loss - 1 for way, seed in zip(ways, group.seeds, strict=True)]
            weaker = _weaker(texts, starts[SEEDS[0]], group, name, calm[SEEDS[0]].loss)
            caught = sum(way.caught for way in ways)
            told = f"{_percent(worse)}, refused {caught} of {len(ways) * ROUNDS * group.liars}{weaker}"
            rows.append(Row(f"{_named(group)}: {name}", told, f"<= {GOAL:.0%}", fmean(worse) <= GOAL))
            refused += sum(way.refused for way in ways)
            sent += len(ways) * ROUNDS * group.honest
    share = refused / sent
    rows.append(
        Row(
            "honest contributions refused",
            f"{share:.2%} of {sent:,}",
            f"< {FALSE_REFUSALS:.0%}",
            share < FALSE_REFUSALS,
        )
    )
    return Report("attacks", "Hostile members", tuple(rows), (_conditions(),))


def _calm(texts: Texts, start: Start, group: _Group) -> Outcome:
    return together(texts, start, Scheme(replace(OUTER, codec=group.codec), ROUNDS, group.honest))


def _attacked(texts: Texts, start: Start, group: _Group, outer: OuterOptimization, name: str) -> Outcome:
    attack = attacks(frozenset(range(group.honest)))[name]
    liars = dict.fromkeys(range(group.honest, group.members), attack)
    return together(texts, start, Scheme(replace(outer, codec=group.codec), ROUNDS, group.members, attacks=liars))


def _weaker(texts: Texts, start: Start, group: _Group, name: str, calm: float) -> str:
    """The same with what is less robust, for one seed of the first group."""
    if group is not GROUPS[0]:
        return ""
    found = {told: _attacked(texts, start, group, outer, name).loss / calm - 1 for told, outer in WEAKER.items()}
    return "; " + ", ".join(f"{told} {worse:+.1%}" for told, worse in found.items())


def _named(group: _Group) -> str:
    return f"{group.liars} of {group.members}, {group.codec}"


def _losses(ways: list[Outcome]) -> str:
    return ", ".join(f"{way.loss:.4f}" for way in ways)


def _percent(worse: list[float]) -> str:
    return f"{fmean(worse):+.1%} ± {stdev(worse):.1%}" if len(worse) > 1 else f"{worse[0]:+.1%}"


def _conditions() -> str:
    return (
        f"Replicas of {parameter_count():,} parameters go on from {WARM_STEPS} steps of one: {ROUNDS} rounds of "
        f"{INNER_STEPS} inner steps of {BATCH} x {SHAPE.sequence_length} bytes of books; gates, codec, trimmed mean "
        "with fraction 0.25 and the next view without the refused, as in a round. How much worse the held-out loss "
        "ends than that of the honest members alone, in percent of it; in the first group beside it, for one seed, "
        "the trimmed mean with fraction 0.1 and the plain mean behind the same gates. A liar knows all honest "
        "contributions. Among 4 members one value at either end is trimmed with both fractions, so they are the "
        "same there, and nothing is guaranteed against 1 of 4 that stays inside of the others' spread. What no "
        "codec can say (NaN) counts as absent."
    )
