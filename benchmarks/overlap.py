"""What it costs when rounds end some inner steps late, and when computers of unequal speed meet by the clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from statistics import fmean, stdev

import anyio
import trio

from benchmarks.laboratory import (
    BATCH,
    HELD_OUT,
    SHAPE,
    Meeting,
    Outcome,
    Scheme,
    Start,
    Texts,
    decaying,
    held_out_loss,
    inner_step,
    parameter_count,
    replica_data,
    run_of,
    together,
)
from benchmarks.record import Report, Row, mean_with_interval
from benchmarks.seeds import of_each
from benchmarks.sizes import size
from neuroshard.config.run_parameters import OuterOptimization
from neuroshard.model.weights import flatten, load_vector
from neuroshard.optim.outer import fresh_outer_state
from neuroshard.pipeline.executor import ComputeThread
from neuroshard.training.outer_sync import OuterSync

SEEDS = size((1, 2, 3), (1, 2))
REPLICAS, INNER_STEPS, ROUNDS, WARM_STEPS = size((4, 50, 8, 400), (2, 4, 2, 1))
LATE = size((0.1, 0.25, 0.5, 1.0), (0.25, 1.0))  # of the time between two rounds
CODECS = size(("int8", "int4"), ("int8",))
PACES = size((20, 40, 80), (2, 4, 8))  # of computers 1, 2 and 4 times as fast
EQUAL = size((47, 47, 46), (5, 5, 4))  # the same steps in all
TOLERANCE = 0.01  # of the loss
# From nothing with the default of a run: intervals that grow, and contributions that weigh as their work.
DEFAULT = OuterOptimization()
SPEEDS, EVEN = size(((1, 2, 4), (1, 1, 1)), ((1, 2), (1, 1)))
DEFAULT_SEEDS, DEFAULT_STEPS, DEFAULT_TOLERANCE = size(((1, 2, 3, 4, 5), 1_200, 0.003), ((1, 2), 8, 0.003))


def measure(part: str = "") -> Report:
    """One model for each seed and way; "speeds": only the default of a run among unequal speeds."""
    if part == "speeds":
        return Report("unequal_speeds", "Computers of unequal speed from nothing", (_from_nothing(),), (_from(),))
    texts = Texts()
    starts = [Start.of(texts, seed, WARM_STEPS, REPLICAS) for seed in SEEDS]
    outer = OuterOptimization(inner_steps=INNER_STEPS, interval="fixed", aggregator="trimmed_mean")

    def ways(scheme: Scheme) -> list[Outcome]:
        return [together(texts, start, scheme) for start in starts]

    rows = list[Row]()
    for codec in CODECS:
        scheme = Scheme(replace(outer, codec=codec), ROUNDS, REPLICAS)
        at_once = ways(scheme)
        rows.append(Row(f"{codec}, training waits for the round", _spread(at_once), "report", None))
        for share in LATE:
            late = ways(replace(scheme, late_share=share))
            item = f"{codec}, the round takes {share:.0%} of the steps between two of them"
            rows.append(_beside(item, late, at_once, None))
    by_speed = {
        name: ways(Scheme(outer, ROUNDS, len(PACES), paces=paces, late_share=share))
        for name, (paces, share) in _SPEEDS.items()
    }
    for name, equal in (("waits", "equal, waits"), ("overlaps", "equal, overlaps")):
        item = f"1, 2 and 4 times as fast, training {name}: beside equal speeds at equal tokens"
        rows.append(_beside(item, by_speed[name], by_speed[equal], TOLERANCE))
    return Report("overlap", "Rounds beside the next inner steps, and unequal speeds", tuple(rows), (_conditions(),))


_SPEEDS: Mapping[str, tuple[tuple[int, ...], float]] = {
    "waits": (PACES, 0.0),
    "equal, waits": (EQUAL, 0.0),
    "overlaps": (PACES, 0.25),
    "equal, overlaps": (EQUAL, 0.25),
}


def from_nothing(job: tuple[tuple[int, ...], int]) -> float:
    """Held-out loss of replicas of these speeds that make DEFAULT_STEPS inner steps each in the mean, with one seed."""
    (speeds, seed), texts, count = job, Texts(), len(job[0])
    start, data = Start.of(texts, seed, 0, count), [replica_data(seed, replica) for replica in range(count)]
    executors, inner = [start.executor() for _ in speeds], decaying(DEFAULT_STEPS)
    with closing(ComputeThread(cpu_threads=1)) as compute:
        state = fresh_outer_state(flatten(executors[0].model))
        outer = [OuterSync(compute=compute, executor=one, versions=run_of(DEFAULT), state=state) for one in executors]

        async def train() -> None:
            made = 0
            while (left := DEFAULT_STEPS * count - made) > 0:
                due = min(outer[0].sequences_due(count) // BATCH, left)
                work = [max(1, round(due * speed / sum(speeds))) for speed in speeds]
                for replica, steps in enumerate(work):
                    for step in range(steps):
                        scheduled = (made + step * due // steps) // count  # by the tokens of all
                        rows = texts.batch(BATCH, data[replica])
                        await compute.run(partial(inner_step, executors[replica], rows, scheduled, inner))
                        outer[replica].after_step(BATCH)
                meeting = Meeting(Scheme(DEFAULT, 1, count), work=work)
                async with anyio.create_task_group() as tasks:
                    for replica, one in enumerate(outer):
                        tasks.start_soon(one.run_round, partial(meeting.exchange, replica), 0.0)
                made += sum(work)

        trio.run(train)
    load_vector(executors[0].model, outer[0].state.anchor)
    return held_out_loss(executors[0].model, texts)


def _from_nothing() -> Row:
    losses = of_each(from_nothing, [(speeds, seed) for speeds in (SPEEDS, EVEN) for seed in DEFAULT_SEEDS])
    shares = [losses[SPEEDS, seed] / losses[EVEN, seed] - 1 for seed in DEFAULT_SEEDS]
    (mean, half), (uneven, even) = (
        mean_with_interval(shares),
        (fmean(losses[speeds, seed] for seed in DEFAULT_SEEDS) for speeds in (SPEEDS, EVEN)),
    )
    figure = f"{uneven:.4f} beside {even:.4f} nats, {mean:+.2%} ± {half:.2%}"
    item = f"speeds {':'.join(map(str, SPEEDS))}: beside equal speeds at equal tokens"
    return Row(item, figure, f"<= {DEFAULT_TOLERANCE:.1%}", mean <= DEFAULT_TOLERANCE)


def _beside(item: str, ways: Sequence[Outcome], others: Sequence[Outcome], tolerance: float | None) -> Row:
    apart = [one.loss - other.loss for one, other in zip(ways, others, strict=True)]
    share = fmean(apart) / fmean(other.loss for other in others)
    figure = f"{_spread(ways)}; {fmean(apart):+.4f} ± {stdev(apart):.4f} nats, {share:+.2%}"
    refused = sum(way.refused for way in ways)
    figure += f"; {refused} contributions refused" if refused else ""
    if tolerance is None:
        return Row(item, figure, "report", None)
    return Row(item, figure, f"within {tolerance:.0%}", abs(share) <= tolerance)


def _spread(ways: Sequence[Outcome]) -> str:
    losses = [way.loss for way in ways]
    return f"{fmean(losses):.4f} ± {stdev(losses):.4f} nats"


def _conditions() -> str:
    return (
        f"{REPLICAS} replicas ({len(PACES)} of unequal speed) of {parameter_count():,} parameters go on from "
        f"{WARM_STEPS} steps of one of them: {ROUNDS} rounds, {INNER_STEPS} inner steps of {BATCH} x "
        f"{SHAPE.sequence_length} bytes of books between two of them ({', '.join(map(str, PACES))} by speed, "
        f"{', '.join(map(str, EQUAL))} where speeds are equal). Held-out loss of the last anchor, nats a byte, on "
        f"{HELD_OUT} windows; ± between seeds {', '.join(map(str, SEEDS))}, of differences between pairs of one seed. "
        f"Unequal speeds travel in {DEFAULT.codec}; every contribution weighs the same in the trimmed mean."
    )


def _from() -> str:
    return (
        f"{len(SPEEDS)} replicas of {parameter_count():,} parameters from nothing, {DEFAULT_STEPS:,} inner steps of "
        f"{BATCH} x {SHAPE.sequence_length} bytes of books each in the mean. The default of a run: growing intervals, "
        f"{DEFAULT.codec}, momentum by its law, contributions that weigh as their work. The learning rate falls from "
        f"0.003 to a tenth along a cosine, by the tokens of all. Held-out loss of the last anchor, nats a byte, on "
        f"{HELD_OUT} windows; seeds {', '.join(map(str, DEFAULT_SEEDS))}, the mean with its 95 % interval (Student's "
        "t), paired by seed."
    )
