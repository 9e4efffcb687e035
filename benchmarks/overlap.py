"""What it costs when rounds end some inner steps late, and when computers of unequal speed meet by the clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean, stdev

from benchmarks.laboratory import BATCH, HELD_OUT, SHAPE, Outcome, Scheme, Start, Texts, parameter_count, together
from benchmarks.record import Report, Row
from benchmarks.sizes import size
from neuroshard.config.run_parameters import OuterOptimization

SEEDS = size((1, 2, 3), (1, 2))
REPLICAS, INNER_STEPS, ROUNDS, WARM_STEPS = size((4, 50, 8, 400), (2, 4, 2, 1))
LATE = size((0.1, 0.25, 0.5, 1.0), (0.25, 1.0))  # of the time between two rounds
CODECS = size(("int8", "int4"), ("int8",))
PACES = size((20, 40, 80), (2, 4, 8))  # of computers 1, 2 and 4 times as fast
EQUAL = size((47, 47, 46), (5, 5, 4))  # the same steps in all
TOLERANCE = 0.01  # of the loss


def measure() -> Report:
    """One model for each seed and way."""
    texts = Texts()
    starts = [Start.of(texts, seed, WARM_STEPS, REPLICAS) for seed in SEEDS]
    outer = OuterOptimization(inner_steps=INNER_STEPS, interval="fixed")

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
        "Unequal speeds travel in int8; every contribution weighs the same in the trimmed mean."
    )
