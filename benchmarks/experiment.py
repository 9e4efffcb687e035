"""`python -m benchmarks.experiment --help`: train replicas as you choose, beside one alone, and print the table."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import fmean
from typing import get_args, get_type_hints

from benchmarks.averaging_laboratory import averaged
from benchmarks.hostile import ATTACKS, attacked
from benchmarks.laboratory import BATCH, Outcome, Scheme, Start, Texts, apart, together
from benchmarks.record import Row, table
from benchmarks.schemes import told
from benchmarks.seeds import of_each
from neuroshard.config.run_parameters import CodecName, OuterOptimization, StrategyName
from neuroshard.consensus.sync_strategies import steps_between_rounds
from neuroshard.identity.run_parameters import scheme_objection
from neuroshard.optim.outer import LineProgress

ALONE = "one replica alone"


@dataclass(frozen=True)
class Attempt:
    """One training."""

    options: argparse.Namespace
    seed: int
    is_alone: bool = False
    late_share: float = 0.0

    def __hash__(self) -> int:
        return hash((self.seed, self.is_alone, self.late_share))


def main() -> None:
    """Train and print."""
    parser = _parser()
    options = parser.parse_args()
    if (objection := _objection(options)) is not None:
        parser.error(objection)
    seeds = range(1, options.seeds + 1)
    found = of_each(_outcome, [Attempt(options, seed, is_alone) for seed in seeds for is_alone in (True, False)])
    ways = [found[Attempt(options, seed)] for seed in seeds]
    rows = [
        Row(ALONE, told([found[Attempt(options, seed, is_alone=True)] for seed in seeds]), "report", None),
        Row(_named(options), told(ways), "report", None),
        Row("refused: honest, hostile; rounds abandoned", _counted(ways), "report", None),
    ]
    if options.line_mbit:
        rows += _over_a_line(options, fmean(way.bits for way in ways), seeds)
    print(table(rows))


def _parser() -> argparse.ArgumentParser:
    outer = OuterOptimization()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--strategy", choices=get_args(StrategyName), default=outer.strategy)
    parser.add_argument("--codec", choices=get_args(CodecName), default=outer.codec)
    aggregators = get_args(get_type_hints(OuterOptimization)["aggregator"])
    parser.add_argument("--aggregator", choices=aggregators, default=outer.aggregator)
    parser.add_argument("--trim-fraction", type=float, default=outer.trim_fraction)
    parser.add_argument("--rank", type=int, default=outer.rank, help="of averaged gradients' factors; 0: none")
    parser.add_argument("--inner-steps", type=int, default=25)
    parser.add_argument("--steps", type=int, default=400, help="inner steps of each replica")
    parser.add_argument("--warm-steps", type=int, default=400, help="of the one that all go on from")
    parser.add_argument("--replicas", type=int, default=4, help="in all")
    parser.add_argument("--hostile", type=int, default=0, help="of these")
    parser.add_argument("--attack", choices=ATTACKS, default="sign flip")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--line-mbit", type=float, default=0.0, help="up, of each home; 0: no line is thought of")
    parser.add_argument("--parameters", type=float, default=25e6, help="of a model whose rounds would cross the line")
    parser.add_argument("--step-seconds", type=float, default=1.0, help="of that model's inner step")
    return parser


def _objection(options: argparse.Namespace) -> str | None:
    outer = _outer(options)
    if min(options.replicas, options.steps, options.inner_steps, options.seeds) < 1 or options.warm_steps < 0:
        return "--replicas, --steps, --inner-steps and --seeds must be at least 1, --warm-steps at least 0"
    if not 0 <= options.hostile < options.replicas:
        return "--hostile must be less than --replicas"
    if options.hostile and outer.strategy == "averaging":
        return "--hostile is for members of rounds with a robust aggregator; strategy averaging has none"
    between = steps_between_rounds(outer, LineProgress(), BATCH, options.replicas)
    if options.steps % between:
        return f"--steps must be a multiple of the steps between two rounds, {between}"
    if options.line_mbit and outer.strategy == "averaging":
        return "--line-mbit is for strategies whose rounds go on beside the training"
    return scheme_objection(outer)


def _outer(options: argparse.Namespace) -> OuterOptimization:
    return OuterOptimization(
        inner_steps=options.inner_steps,
        interval="fixed",
        strategy=options.strategy,
        codec=options.codec,
        aggregator=options.aggregator,
        trim_fraction=options.trim_fraction,
        rank=options.rank,
    )


def _outcome(attempt: Attempt) -> Outcome:
    options, outer = attempt.options, _outer(attempt.options)
    texts, start = _prepared(attempt.seed, options.warm_steps, options.replicas)
    if attempt.is_alone:
        return apart(texts, start, options.steps, BATCH)
    if outer.strategy == "averaging":
        return averaged(texts, start, Scheme(replace(outer, inner_steps=1), options.steps, options.replicas))
    honest = options.replicas - options.hostile
    scheme = Scheme(
        outer,
        options.steps // outer.inner_steps,
        options.replicas,
        late_share=attempt.late_share,
        votes=bool(options.hostile),
        are_friends=not options.hostile,
    )
    return together(texts, start, attacked(scheme, honest, options.attack) if options.hostile else scheme)


@cache
def _prepared(seed: int, warm_steps: int, replicas: int) -> tuple[Texts, Start]:
    texts = Texts()
    return texts, Start.of(texts, seed, warm_steps, replicas)


def _over_a_line(options: argparse.Namespace, bits: float, seeds: Sequence[int]) -> list[Row]:
    """What rounds of a larger model take of the time, and what is learnt where they go on beside the training."""
    between = steps_between_rounds(_outer(options), LineProgress(), BATCH, options.replicas)
    seconds = bits * between * options.parameters / (1e6 * options.line_mbit)
    share = seconds / (between * options.step_seconds)
    figure = f"{seconds:,.1f} s of sending a round, {share:.1%} of the {between * options.step_seconds:,.0f} s between"
    rows = [Row(f"{options.parameters / 1e6:,.0f} M parameters, {options.line_mbit:g} Mbit/s", figure, "report", None)]
    if share > 1:
        return [*rows, Row("rounds beside the training", "the line is too slow for them", "report", None)]
    late = of_each(_outcome, [Attempt(options, seed, late_share=share) for seed in seeds])
    return [*rows, Row("rounds beside the training", told(list(late.values())), "report", None)]


def _counted(ways: Sequence[Outcome]) -> str:
    return (
        f"{sum(way.refused for way in ways)}, {sum(way.caught for way in ways)}; {sum(way.abandoned for way in ways)}"
    )


def _named(options: argparse.Namespace) -> str:
    liars = f", {options.hostile} with {options.attack}" if options.hostile else ""
    return f"{options.replicas} replicas, {options.strategy}, {options.codec}, {options.aggregator}{liars}"


if __name__ == "__main__":
    main()
