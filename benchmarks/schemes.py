"""What replicas learn at equal tokens, and the bytes that it takes, with every codec beside one replica alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
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
from benchmarks.record import Report, Row
from neuroshard.config.run_parameters import OuterOptimization
from neuroshard.training.strategy import steps_between_rounds

SEEDS = (1, 2, 3)
REPLICAS, INNER_STEPS, ROUNDS, WARM_STEPS, LONG = 4, 25, 16, 400, 500
OUTER = OuterOptimization(inner_steps=INNER_STEPS)
SCHEMES: Mapping[str, OuterOptimization] = {
    "fp32": replace(OUTER, codec="fp32"),
    "fp32, mean, no momentum": replace(OUTER, codec="fp32", aggregator="mean", momentum=0.0),
    "bf16": replace(OUTER, codec="bf16"),
    "int8": OUTER,
    "int4": replace(OUTER, codec="int4"),
    "int8, streaming": replace(OUTER, strategy="streaming"),
    "int8, sparta": replace(OUTER, strategy="sparta"),
    "int8, sparta in every inner step": replace(OUTER, strategy="sparta", inner_steps=1),
    "topk, mean": replace(OUTER, codec="topk", aggregator="mean"),
    "topk, mean, outer step 1.0": replace(OUTER, codec="topk", aggregator="mean", learning_rate=1.0),
}
STEPPED = replace(OUTER, strategy="averaging", aggregator="mean", inner_steps=1)
AVERAGINGS: Mapping[str, OuterOptimization] = {
    "fp32": replace(STEPPED, codec="fp32"),
    "int8": STEPPED,
    "powersgd of rank 16": replace(STEPPED, codec="powersgd", rank=16),
    "powersgd of rank 4": replace(STEPPED, codec="powersgd", rank=4),
}
TOLERANCE, AIM = 0.02, 0.01  # nats; bits


def measure() -> Report:
    """One model for each seed and scheme."""
    texts = Texts()
    starts = [Start.of(texts, seed, WARM_STEPS, REPLICAS) for seed in SEEDS]
    steps = INNER_STEPS * ROUNDS
    alone = [apart(texts, start, steps, BATCH) for start in starts]
    every = [apart(texts, start, steps, REPLICAS * BATCH) for start in starts]
    found = {
        name: [together(texts, start, Scheme(outer, steps // outer.inner_steps, REPLICAS)) for start in starts]
        for name, outer in SCHEMES.items()
    }
    stepped = {
        name: [averaged(texts, start, Scheme(outer, steps, REPLICAS)) for start in starts]
        for name, outer in AVERAGINGS.items()
    }
    plain = 2 * 32 * (REPLICAS - 1) / REPLICAS  # bits of a gradient in fp32, reduced in a ring
    rows = [
        Row("one replica alone", f"{_spread(alone)} nats, 0 bits", "report", None),
        Row("every gradient averaged", f"{_spread(every)} nats, {plain:.0f} bits", "report", None),
        *(Row(f"gradients averaged in {name}", _told(ways), "report", None) for name, ways in stepped.items()),
        *(Row(f"rounds in {name}", _told(ways), "report", None) for name, ways in found.items()),
        *_comparisons(found),
        _refused([*found.values(), *stepped.values()]),
    ]
    return Report("schemes", "Loss against bytes", tuple(rows), (_conditions(),))


def _comparisons(found: Mapping[str, Sequence[Outcome]]) -> list[Row]:
    apart_by = [a.loss - b.loss for a, b in zip(found["int4"], found["fp32"], strict=True)]
    mean = fmean(apart_by)
    difference = f"{mean:+.4f} ± {stdev(apart_by):.4f} nats"
    rows = [Row("int4 - fp32", difference, f"within {TOLERANCE}", abs(mean) <= TOLERANCE)]
    for name in ("int8", "int4", "topk, mean"):
        bits = fmean(way.bits for way in found[name]) * INNER_STEPS / LONG
        rows.append(
            Row(f"{name}: bits of a parameter and step at {LONG} inner steps", f"{bits:.4f}", f"aim {AIM}", bits <= AIM)
        )
    return rows


def _refused(ways: Sequence[Sequence[Outcome]]) -> Row:
    refused = sum(way.refused for of_scheme in ways for way in of_scheme)
    return Row("contributions refused by the gates", str(refused), "report", None)


def _told(ways: Sequence[Outcome]) -> str:
    own = [way.own_loss for way in ways if way.own_loss is not None and way.own_loss != way.loss]
    more = f" (replicas' own weights: {fmean(own):.4f} ± {stdev(own):.4f})" if len(own) > 1 else ""
    return f"{_spread(ways)} nats{more}, {fmean(way.bits for way in ways):.3f} bits"


def _spread(ways: Sequence[Outcome]) -> str:
    losses = [way.loss for way in ways]
    return f"{fmean(losses):.4f} ± {stdev(losses):.4f}"


def _conditions() -> str:
    return (
        f"{REPLICAS} replicas of {parameter_count():,} parameters go on from {WARM_STEPS} steps of one of them: "
        f"{ROUNDS} rounds of {INNER_STEPS} inner steps of {BATCH} x {SHAPE.sequence_length} bytes of books. "
        f"Held-out loss, nats a byte, of the last anchor on {HELD_OUT} windows; where rounds are about parts "
        f"also the mean of the replicas' own weights after the last step; ± between seeds "
        f"{', '.join(map(str, SEEDS))} for weights and data, most of it that of the weights. Bits: what a member "
        "sends, of a parameter and inner step, from the lengths of the encoded slices: its contribution to two "
        f"reducers, its share of the results to everybody. Trimmed mean, outer step {OUTER.learning_rate}, momentum "
        f"from 0.5 to {OUTER.momentum}, unless the row says otherwise; top-k has no outer momentum. Streaming has a "
        f"round each {steps_between_rounds(SCHEMES['int8, streaming'])} inner steps, SPARTA each "
        f"{steps_between_rounds(SCHEMES['int8, sparta'])}, so that every slice has its turn once, or each. Averaged "
        "gradients have a step after every batch, with powersgd in two rounds, by the mean of all. The bits at "
        f"{LONG} inner steps are those measured, times {INNER_STEPS} / {LONG}."
    )
