"""What replicas learn at equal tokens, and the bytes that it takes: every codec and strategy beside one alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from statistics import fmean, stdev

from benchmarks.averaging_laboratory import averaged
from benchmarks.laboratory import (
    BATCH,
    HELD_OUT,
    SHAPE,
    Outcome,
    Scheme,
    Start,
    Texts,
    apart,
    parameter_count,
    together,
)
from benchmarks.plots import Plot, Point
from benchmarks.record import Report, Row
from benchmarks.seeds import of_each
from benchmarks.sizes import size
from neuroshard.config.run_parameters import OuterOptimization
from neuroshard.consensus.sync_strategies import steps_between_rounds
from neuroshard.optim.outer import LineProgress

SEEDS = size((1, 2, 3), (1, 2))
REPLICAS, INNER_STEPS, ROUNDS, WARM_STEPS = size((4, 25, 16, 400), (2, 4, 1, 1))
STEPS = INNER_STEPS * ROUNDS
LATE = 0.25  # of the inner steps between two rounds
ALONE, EVERY = "one replica alone", "every gradient averaged"
OUTER = OuterOptimization(inner_steps=INNER_STEPS, interval="fixed", aggregator="trimmed_mean", codec="int8")
STEPPED = replace(OUTER, strategy="averaging", aggregator="mean", inner_steps=1)
AVERAGINGS: Mapping[str, OuterOptimization] = {
    "gradients averaged in fp32": replace(STEPPED, codec="fp32"),
    "gradients averaged in int8": STEPPED,
    "gradients averaged in factors, rank 16": replace(STEPPED, codec="fp32", rank=16),
    "gradients averaged in factors, rank 4": replace(STEPPED, codec="fp32", rank=4),
}
FP32, INT8, INT4, TOPK = "rounds in fp32", "rounds in int8", "rounds in int4", "rounds in topk, mean"
STREAMING, SPARTA, OVERLAPPED = f"{INT8}, streaming", f"{INT8}, sparta", f"{INT8}, overlapped"
TOGETHER: Mapping[str, OuterOptimization] = {
    FP32: replace(OUTER, codec="fp32"),
    f"{FP32}, mean, no momentum": replace(OUTER, codec="fp32", aggregator="mean", momentum=0.0),
    "rounds in bf16": replace(OUTER, codec="bf16"),
    INT8: OUTER,
    INT4: replace(OUTER, codec="int4"),
    OVERLAPPED: OUTER,
    STREAMING: replace(OUTER, strategy="streaming"),
    SPARTA: replace(OUTER, strategy="sparta"),
    f"{SPARTA} in every inner step": replace(OUTER, strategy="sparta", inner_steps=1),
    TOPK: replace(OUTER, codec="topk", aggregator="mean"),
    f"{TOPK}, outer step 1.0": replace(OUTER, codec="topk", aggregator="mean", learning_rate=1.0),
}
TOLERANCE = 0.02  # nats


def measure() -> Report:
    """One model for each seed and scheme."""
    names = (ALONE, EVERY, *AVERAGINGS, *TOGETHER)
    outcomes = of_each(_outcome, [(name, seed) for name in names for seed in SEEDS])
    found = {name: [outcomes[name, seed] for seed in SEEDS] for name in names}
    rows = [Row(name, told(ways), "report", None) for name, ways in found.items()]
    rows += [difference(found, INT4, FP32, TOLERANCE), _refused(list(outcomes.values()))]
    return Report("schemes", "Loss against bytes", tuple(rows), (_conditions(),), plot(found, ALONE))


def _outcome(job: tuple[str, int]) -> Outcome:
    name, seed = job
    texts, start = prepared(seed)
    if name == ALONE:
        return apart(texts, start, STEPS, BATCH)
    if name == EVERY:
        plain = 2 * 32 * (REPLICAS - 1) / REPLICAS  # bits of a gradient in fp32, reduced in a ring
        return replace(apart(texts, start, STEPS, REPLICAS * BATCH), bits=plain)
    if name in AVERAGINGS:
        return averaged(texts, start, Scheme(AVERAGINGS[name], STEPS, REPLICAS))
    outer = TOGETHER[name]
    late = LATE if name == OVERLAPPED else 0.0
    return together(texts, start, Scheme(outer, STEPS // outer.inner_steps, REPLICAS, late_share=late))


@cache
def prepared(seed: int) -> tuple[Texts, Start]:
    """What all ways of a seed begin with."""
    texts = Texts()
    return texts, Start.of(texts, seed, WARM_STEPS, REPLICAS)


def told(ways: Sequence[Outcome]) -> str:
    """Loss and bits of one way of training."""
    own = [way.own_loss for way in ways if way.own_loss is not None and way.own_loss != way.loss]
    more = f" (replicas' own weights: {_spread(own)})" if own else ""
    return f"{_spread([way.loss for way in ways])} nats{more}, {_bits(ways):.4g} bits"


def difference(found: Mapping[str, Sequence[Outcome]], one: str, other: str, tolerance: float) -> Row:
    """How much worse one way is than another, in pairs of one seed."""
    apart_by = [a.loss - b.loss for a, b in zip(found[one], found[other], strict=True)]
    figure = f"{fmean(apart_by):+.4f} ± {stdev(apart_by):.4f} nats"
    return Row(f"{one}: beside {other}", figure, f"<= {tolerance:+g}", fmean(apart_by) <= tolerance)


def plot(found: Mapping[str, Sequence[Outcome]], alone: str) -> Plot:
    """Loss by bits; who is alone sends nothing and is a line."""
    points = [
        Point(name, _bits(ways), fmean(way.loss for way in ways), stdev(way.loss for way in ways))
        for name, ways in found.items()
        if name != alone
    ]
    level = fmean(way.loss for way in found[alone])
    return Plot("bits of a parameter and step", "held-out loss, nats a byte", tuple(points), {alone: round(level, 4)})


def _bits(ways: Sequence[Outcome]) -> float:
    return fmean(way.bits for way in ways)


def _refused(outcomes: Sequence[Outcome]) -> Row:
    refused = sum(way.refused for way in outcomes)
    return Row("contributions refused by the gates", str(refused), "report", None)


def _spread(losses: Sequence[float]) -> str:
    return f"{fmean(losses):.4f}" + (f" ± {stdev(losses):.4f}" if len(losses) > 1 else "")


def _conditions() -> str:
    return (
        f"{REPLICAS} replicas of {parameter_count():,} parameters go on from {WARM_STEPS} steps of one of them: "
        f"{ROUNDS} rounds of {INNER_STEPS} inner steps of {BATCH} x {SHAPE.sequence_length} bytes of books. "
        f"Held-out loss, nats a byte, of the last anchor on {HELD_OUT} windows; where the anchor is not what all train "
        "on, also the mean of the replicas' own weights after the last step; ± between seeds "
        f"{', '.join(map(str, SEEDS))} for weights and data, most of it that of the weights. Bits: what a member "
        "sends, of a parameter and inner step, from the lengths of the encoded slices: its contribution to two "
        f"reducers, its share of the results to everybody. Trimmed mean, outer step {OUTER.learning_rate}, momentum "
        f"up to {OUTER.momentum}, unless the row says otherwise; top-k has no outer momentum. Overlapped: a "
        f"round ends {LATE:.0%} of the inner steps after it began. Streaming has a round each "
        f"{_interval(STREAMING)} inner steps, SPARTA each {_interval(SPARTA)}, so that every slice has its turn once, "
        "or each. "
        "Averaged gradients have a step after every batch, in factors (PowerSGD) in two rounds, by the mean of all."
    )


def _interval(name: str) -> int:
    return steps_between_rounds(TOGETHER[name], LineProgress(), BATCH, REPLICAS)
