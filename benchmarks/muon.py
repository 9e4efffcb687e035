"""Muon as the inner optimizer: alone, together with intervals up to 25 and 100, and synchronous, against AdamW."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch

from benchmarks.laboratory import BATCH, INNER, SHAPE
from benchmarks.record import Report, Row, mean_with_interval
from benchmarks.together import (
    ARMS,
    DEFAULT,
    REPLICAS,
    SEEDS,
    STEPS,
    SYNCHRONOUS,
    TOGETHER,
    TUNED,
    Arm,
    Corpus,
    Learnt,
    of_all,
    tuned,
)

SHORT_INTERVAL = 25
MUON_ALONE, MUON_TOGETHER, MUON_SHORT, MUON_SYNCHRONOUS = (
    "Muon, one replica alone",
    "Muon, together, intervals to 100",
    "Muon, together, intervals to 25",
    "Muon, synchronous",
)
ADAMW_SHORT = "AdamW, together, intervals to 25"
SHORT = replace(DEFAULT, inner_steps=min(SHORT_INTERVAL, DEFAULT.inner_steps))
MUON_ARMS = (
    Arm(MUON_ALONE, optimizer="muon"),
    Arm(MUON_TOGETHER, REPLICAS, outer=DEFAULT, optimizer="muon"),
    Arm(MUON_SHORT, REPLICAS, outer=SHORT, optimizer="muon"),
    Arm(MUON_SYNCHRONOUS, data_of=REPLICAS, optimizer="muon"),
)
# `python -m benchmarks.muon` prints the loss of every arm at each of these rates; MUON_TUNED has the rates in use.
MUON_RATES = (4e-3, 8e-3, 12e-3, 16e-3)
MUON_TUNED = {MUON_ALONE: 8e-3, MUON_TOGETHER: 8e-3, MUON_SHORT: 8e-3, MUON_SYNCHRONOUS: 12e-3}


def measure() -> Report:
    """The arms of Muon, and those of AdamW that they are compared with, paired by seed."""
    torch.set_num_threads(1)
    began = time.monotonic()
    arms = (
        *MUON_ARMS,
        Arm(ADAMW_SHORT, REPLICAS, outer=SHORT),
        *(arm for arm in ARMS if arm.name in {TOGETHER, SYNCHRONOUS}),
    )
    rates = {**TUNED, **MUON_TUNED, ADAMW_SHORT: TUNED[TOGETHER]}
    corpus, rows = Corpus.read(None), list[Row]()
    for steps in STEPS:
        rows += _rows(of_all(corpus, SEEDS, steps, arms, rates), steps)
    chosen = ", ".join(f"{arm.name} {rates[arm.name]:g}" for arm in arms)
    conditions = (
        f"{SHAPE.layer_count} layers of {SHAPE.hidden_size}; {BATCH} x {SHAPE.sequence_length} bytes per inner step "
        f"and replica, {REPLICAS} replicas, from nothing; a warm-up of {INNER.warmup_steps} steps, then a cosine "
        f"down to a tenth of a tuned rate: {chosen}. Arms without the name of an optimizer have AdamW. Held-out text; "
        f"seeds {', '.join(map(str, SEEDS))}; means with their 95 % interval (Student's t), paired by seed. "
        f"{time.monotonic() - began:,.0f} s."
    )
    return Report("muon", "Muon as the inner optimizer", tuple(rows), (conditions,))


def _rows(found: Mapping[tuple[str, int, int], Learnt], steps: int) -> list[Row]:
    """The losses of all arms, then those of Muon together against others."""
    names = dict.fromkeys(name for name, _, mark in found if mark == steps)
    losses = {name: [found[name, seed, steps].held_out for seed in SEEDS] for name in names}
    rows = [
        Row(f"{steps:,} steps, {name}: loss, nats per byte", _shown(values), "report", None)
        for name, values in losses.items()
    ]
    for name, others in {
        MUON_TOGETHER: (MUON_ALONE, MUON_SYNCHRONOUS, TOGETHER, SYNCHRONOUS),
        MUON_SHORT: (MUON_ALONE, MUON_SYNCHRONOUS, ADAMW_SHORT, SYNCHRONOUS),
    }.items():
        for other in others:
            shares = [one / than - 1 for one, than in zip(losses[name], losses[other], strict=True)]
            mean, half = mean_with_interval(shares)
            rows.append(Row(f"{steps:,} steps, {name}, against {other}", f"{mean:+.1%} ± {half:.1%}", "report", None))
    return rows


def _shown(values: list[float]) -> str:
    mean, half = mean_with_interval(values)
    return f"{mean:.4f} ± {half:.4f}"


if __name__ == "__main__":
    torch.set_num_threads(1)
    for arm_name, losses in tuned(Corpus.read(None), arms=MUON_ARMS, rates=MUON_RATES).items():
        best = partial(min, key=losses.__getitem__)(losses)
        shown = ", ".join(f"{rate:g}: {loss:.4f}" for rate, loss in losses.items())
        print(f"{arm_name}: best {best:g} ({shown})", flush=True)
