"""What four replicas learn that agree every 25 steps, against one alone and against averaging every gradient."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev

from benchmarks.laboratory import (
    BATCH,
    HELD_OUT,
    INNER,
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
from benchmarks.sizes import size
from neuroshard.config.run_parameters import CodecName, OuterOptimization

SEEDS = size((1, 2, 3), (1, 2))
REPLICAS, INNER_STEPS, ROUNDS = 4, size(25, 2), int(os.environ.get("BENCHMARK_ROUNDS", size(16, 1)))
LONG_ROUNDS, WARM_STEPS = size((48, 400), (2, 2))
OUTER = OuterOptimization(inner_steps=INNER_STEPS, interval="fixed", aggregator="trimmed_mean")
GOAL, AIM, CODEC_TOLERANCE = 0.5, 0.7, 0.02


def measure(length: str = "") -> Report:
    """One model for each seed and way; of the "long" run from nothing only what rounds in fp32 make of it."""
    texts = Texts()
    if length == "long":
        return _long(texts)
    starts = [Start.of(texts, seed, WARM_STEPS, REPLICAS) for seed in SEEDS]
    bounds = _Bounds.of(texts, starts)
    fp32 = [_replicas(texts, start, "fp32") for start in starts]
    int8 = [_replicas(texts, start, "int8") for start in starts]
    plain = [_replicas(texts, start, "int8", keeps_residuals=False) for start in starts]
    unlearnt = [Start.of(texts, seed, 0, REPLICAS) for seed in SEEDS]
    new_bounds = _Bounds.of(texts, unlearnt)
    new = [_replicas(texts, start, "fp32") for start in unlearnt]
    by = _differences(int8, fp32)
    refused = sum(way.refused for way in (*fp32, *int8, *plain, *new))
    rows = (
        *bounds.rows(),
        *bounds.share_rows("rounds in fp32", fp32),
        *bounds.share_rows("rounds in int8 with error feedback", int8),
        Row("int8 with error feedback - fp32", by[0], f"within {CODEC_TOLERANCE}", abs(by[1]) <= CODEC_TOLERANCE),
        Row("int8 without error feedback - fp32", _differences(plain, fp32)[0], "report", None),
        *new_bounds.rows("from nothing, "),
        *new_bounds.share_rows("from nothing, rounds in fp32", new),
        Row("contributions refused by the gates", str(refused), "report", None),
    )
    return Report("diloco", "Replicas that agree every 25 steps", rows, (_conditions(),))


def _long(texts: Texts) -> Report:
    starts = [Start.of(texts, seed, 0, REPLICAS) for seed in SEEDS]
    bounds = _Bounds.of(texts, starts, LONG_ROUNDS)
    ways = [_replicas(texts, start, "fp32", rounds=LONG_ROUNDS) for start in starts]
    rows = (*bounds.rows(), *bounds.share_rows("rounds in fp32", ways))
    title = f"Replicas that agree every 25 steps, from nothing, {LONG_ROUNDS} rounds"
    return Report("diloco_long", title, rows, ("As in `diloco`, whose runs from nothing are a third as long.",))


@dataclass(frozen=True)
class _Bounds:
    """What rounds can be between, by seed."""

    alone: Sequence[Outcome]
    together: Sequence[Outcome]

    @staticmethod
    def of(texts: Texts, starts: Sequence[Start], rounds: int = ROUNDS) -> _Bounds:
        """Train both from every start."""
        return _Bounds(
            [apart(texts, start, INNER_STEPS * rounds, BATCH) for start in starts],
            [apart(texts, start, INNER_STEPS * rounds, REPLICAS * BATCH) for start in starts],
        )

    def rows(self, prefix: str = "") -> tuple[Row, Row]:
        """Their losses."""
        return (
            Row(f"{prefix}one replica alone: held-out loss", _listed(self.alone), "report", None),
            Row(f"{prefix}every gradient averaged: held-out loss", _listed(self.together), "report", None),
        )

    def share_rows(self, name: str, ways: Sequence[Outcome]) -> tuple[Row, Row]:
        """The losses of a way, and how much of the gap between the bounds it closes."""
        shares = [
            (one.loss - way.loss) / (one.loss - all_.loss)
            for one, way, all_ in zip(self.alone, ways, self.together, strict=True)
        ]
        share = f"{fmean(shares):.0%} ± {stdev(shares):.0%} ({', '.join(f'{share:.0%}' for share in shares)})"
        return (
            Row(f"{name}: held-out loss", _listed(ways), "report", None),
            Row(f"{name}: share of the gap closed", share, f">= {GOAL:.0%}, aim {AIM:.0%}", fmean(shares) >= GOAL),
        )


def _conditions() -> str:
    return (
        f"{REPLICAS} replicas of {parameter_count():,} parameters begin with the model and the moments that one has "
        f"after {WARM_STEPS} steps: {ROUNDS} rounds of {INNER_STEPS} inner steps of {BATCH} x "
        f"{SHAPE.sequence_length} bytes of books; outer step {OUTER.learning_rate}, momentum {OUTER.momentum} from "
        "step 400 on, trimmed mean. Alone: as many steps of one replica. Every gradient averaged: as many steps of "
        f"{REPLICAS} x {BATCH} sequences. All have AdamW at {INNER.learning_rate:g}, constant after "
        f"{INNER.warmup_steps} steps, the better of 2e-3 and 4e-3 for one replica alone with another seed. Seeds "
        f"{', '.join(map(str, SEEDS))} for weights and data; ± is the standard deviation between them. The held-out "
        f"loss, nats a byte, is that of the last anchor on {HELD_OUT} windows from the last tenth of each book. "
        "From nothing: without the steps that all have in common."
    )


def _replicas(
    texts: Texts, start: Start, codec: CodecName, *, keeps_residuals: bool = True, rounds: int = ROUNDS
) -> Outcome:
    return together(texts, start, Scheme(replace(OUTER, codec=codec), rounds, REPLICAS, keeps_residuals))


def _differences(ours: Sequence[Outcome], theirs: Sequence[Outcome]) -> tuple[str, float]:
    """Over equal seeds: in words, and the mean."""
    values = [a.loss - b.loss for a, b in zip(ours, theirs, strict=True)]
    return f"{fmean(values):+.4f} ± {stdev(values):.4f} nats", fmean(values)


def _listed(ways: Sequence[Outcome]) -> str:
    return ", ".join(f"{way.loss:.4f}" for way in ways)
