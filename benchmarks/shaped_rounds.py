"""A certified round of 25 M numbers over the lines of homes, beside hivemind's averager over the same lines."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.hivemind_process import hivemind_python
from benchmarks.record import NotHereError, Report, Row, load_average
from benchmarks.rounds import Peer, medians, one_round, our_peers, running
from benchmarks.shaped_line import Home, NoLineError, home_lines
from benchmarks.sizes import size

ROUNDS = int(os.environ.get("BENCHMARK_ROUNDS", size(3, 1)))
MEMBERS = size((2, 4), (2,))
UP_MBIT, DOWN_MBIT, ONE_WAY_MS = 20, 100, 25
FP16 = 1  # the place in hivemind_averager.CODECS
LARGEST_ERROR = 0.1  # relative


@dataclass(frozen=True)
class Kind:
    """A kind of round, and how many times faster than hivemind's fp16 it should be; `limit` is the ratio of bytes."""

    codec: str
    are_strangers: bool
    goal: float
    limit: float

    @property
    def name(self) -> str:
        """For people."""
        return f"{'strangers' if self.are_strangers else 'friends'}, {self.codec}"


KINDS = (
    Kind("int8", False, 1.8, 2.0),
    Kind("int4", False, 3.4, 4.0),
    Kind("int8", True, 0.9, 1.0),
    Kind("int4", True, 1.8, 2.0),
)


def measure() -> Report:
    """$BENCHMARK_HIVEMIND_PYTHON is a Python that has hivemind 1.1.12. Raises NotHereError without lines."""
    rows, notes = list[Row](), list[str]()
    for members in MEMBERS:
        try:
            with home_lines(members, UP_MBIT, DOWN_MBIT, ONE_WAY_MS) as homes:
                ours, theirs = _ours(homes), _hivemind(homes)
        except NoLineError as error:
            raise NotHereError(str(error)) from error
        if isinstance(theirs, str):
            rows += [_row(members, kind, ours[kind], None) for kind in KINDS]
            notes.append(f"{members} peers: {theirs}")
        else:
            rows += [_row(members, kind, ours[kind], theirs["seconds"]) for kind in KINDS]
            figure = f"{theirs['seconds']:.2f} s, {theirs['cpu']:.1f} CPU-s"
            rows.append(Row(f"{members} peers, hivemind 1.1.12, fp16", figure, "report", None))
    return Report("shaped_rounds", "A certified round of 25 M numbers over home lines", tuple(rows), (*notes, _how()))


def _how() -> str:
    is_first = hasattr(os, "sched_getscheduler") and os.sched_getscheduler(0) == os.SCHED_RR
    priority = "; all processes ran before those of other programs (SCHED_RR)" if is_first else ""
    return (
        f"Medians of {ROUNDS} rounds, the slowest member's seconds; CPU seconds of all processes; load average "
        f"{load_average()}{priority}. Each member has a line of {UP_MBIT} Mbit/s up, {DOWN_MBIT} Mbit/s down and "
        f"{ONE_WAY_MS} ms each way, so a message takes {2 * ONE_WAY_MS} ms to another member. Ours encode, exchange, "
        "judge, audit, vote twice and decode; hivemind's matchmaking is not counted, our intents and proposal are. "
        "All members are seats. Among strangers each slice has two reducers, not three, for which the goals were set."
    )


def _ours(homes: Sequence[Home]) -> Mapping[Kind, Mapping[str, float]]:
    found: dict[Kind, list[Mapping[str, float]]] = {kind: [] for kind in KINDS}
    with our_peers([(home.prefix, home.address) for home in homes]) as peers:
        one_round(peers, 0, "int4")  # makes the connections
        for number in range(1, ROUNDS + 1):
            for place, kind in enumerate(KINDS):
                of_round = one_round(peers, 10 * number + place, kind.codec, are_strangers=kind.are_strangers)
                found[kind].append(of_round)
    return {kind: medians(rounds) for kind, rounds in found.items()}


def _hivemind(homes: Sequence[Home]) -> Mapping[str, float] | str:
    """The slowest peer's seconds and the CPU seconds of all, or why they could not be measured."""
    python = hivemind_python()
    if python is None:
        return "hivemind was not run: BENCHMARK_HIVEMIND_PYTHON names no Python that has it."
    commands = [
        [*home.prefix, python, "-m", "benchmarks.hivemind_home", home.address, *map(str, (place, len(homes), FP16))]
        for place, home in enumerate(homes)
    ]
    try:
        with running(commands) as peers:
            return _averaged(peers)
    except RuntimeError as error:
        return f"hivemind was not measured: {error}."


def _averaged(peers: Sequence[Peer]) -> Mapping[str, float]:
    """Raises RuntimeError."""
    (initial, *_) = [peer.answer()["maddrs"] for peer in peers]
    _all(peers, {"initial": initial})
    rounds = list[Mapping[str, float]]()
    for _ in range(ROUNDS):
        _all(peers, {"meet": True})
        told = _all(peers, {"average": True})
        rounds.append({"seconds": max(one["seconds"] for one in told), "cpu": sum(one["cpu"] for one in told)})
    errors = [one["error"] for one in _all(peers, {"check": True})]
    if max(errors) > LARGEST_ERROR:
        raise RuntimeError(f"what came out is not the mean: relative error {max(errors):.2f}")
    return medians(rounds)


def _all(peers: Sequence[Peer], order: Mapping[str, object]) -> Sequence[Mapping[str, float]]:
    for peer in peers:
        peer.order(order)
    return [peer.answer() for peer in peers]


def _row(members: int, kind: Kind, ours: Mapping[str, float], hivemind_seconds: float | None) -> Row:
    item = f"{members} members, {kind.name}"
    figure = f"{ours['seconds']:.2f} s, {ours['cpu']:.1f} CPU-s, a member sends {ours['bytes']:.2f} contributions"
    if hivemind_seconds is None:
        return Row(item, figure, "beside hivemind", None)
    ratio = hivemind_seconds / ours["seconds"]
    goal = f">= {kind.goal:g} times hivemind's (fp16); by bytes {kind.limit:g}"
    return Row(item, f"{figure}; {ratio:.2f} times hivemind's speed", goal, ratio >= kind.goal)
