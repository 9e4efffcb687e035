"""CPU seconds of one (4, 512, 1024) float32 tensor there and back, beside hivemind's remote expert."""

from __future__ import annotations

from statistics import median
from typing import Any

from benchmarks.bulk_processes import BulkPair, bulk_pair
from benchmarks.hivemind_process import hivemind_facts
from benchmarks.record import Report, Row
from benchmarks.sizes import size

ROUNDS = size(5, 1)
TRIPS = size(10, 1)
# What the same measurement gave elsewhere; used where hivemind cannot run, and said so.
PUBLISHED_HIVEMIND_CPU_SECONDS = 0.281


def measure() -> Report:
    """Pool, libp2p and hivemind in turns. $BENCHMARK_HIVEMIND_PYTHON is a Python that has hivemind 1.1.12."""
    cpu: dict[str, list[float]] = {"pool": [], "libp2p": []}
    wall: dict[str, list[float]] = {"pool": [], "libp2p": []}
    hivemind: list[dict[str, Any]] = []
    notes: list[str] = []
    with bulk_pair("pool") as pool, bulk_pair("libp2p") as libp2p:
        for _ in range(ROUNDS):
            for way, pair in (("pool", pool), ("libp2p", libp2p)):
                cpu_seconds, seconds = _round_trip(pair)
                cpu[way].append(cpu_seconds)
                wall[way].append(seconds)
            if not notes:
                facts = hivemind_facts("benchmarks.hivemind_round_trip", TRIPS)
                if isinstance(facts, str):
                    notes.append(facts)
                else:
                    hivemind.append(facts)
    other = median(facts["cpu"] for facts in hivemind) if hivemind else PUBLISHED_HIVEMIND_CPU_SECONDS
    rows = (
        _row("over the pool", cpu["pool"], wall["pool"], other, 0.5),
        _row("over libp2p", cpu["libp2p"], wall["libp2p"], other, 1.0),
        _hivemind_row(hivemind),
    )
    notes.append(f"Medians of {ROUNDS} turns of {TRIPS} round trips; user and system time of all processes.")
    return Report("tensor_round_trip", "One tensor there and back", rows, tuple(notes))


def _round_trip(pair: BulkPair) -> tuple[float, float]:
    """CPU and wall seconds of one."""
    pair.round_trips(1)
    before = pair.cpu_seconds()
    sent = pair.round_trips(TRIPS)
    return (pair.cpu_seconds() - before) / TRIPS, sent.seconds / TRIPS


def _row(way: str, cpu: list[float], wall: list[float], other: float, goal: float) -> Row:
    share = median(cpu) / other
    figure = f"{median(cpu):.3f} CPU-s, {median(wall) * 1e3:.0f} ms; {share:.2f} of hivemind's"
    return Row(f"(4, 512, 1024) float32 there and back {way}", figure, f"<= {goal:g} of hivemind's", share <= goal)


def _hivemind_row(facts: list[dict[str, Any]]) -> Row:
    if not facts:
        figure = f"{PUBLISHED_HIVEMIND_CPU_SECONDS} CPU-s, measured elsewhere, not in this run"
        return Row("hivemind 1.1.12, remote expert", figure, "report", None)
    cpu, wall = (median(fact[name] for fact in facts) for name in ("cpu", "seconds"))
    figure = f"{cpu:.3f} CPU-s, {wall * 1e3:.0f} ms, {facts[0]['processes']} processes"
    return Row(f"hivemind {facts[0]['version']}, remote expert that gives its input back", figure, "report", None)
