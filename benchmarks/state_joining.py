"""A newcomer takes over a model of 25 M parameters from three replicas, two of which are killed while it fetches."""

from __future__ import annotations

import re
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.node_process import NodeProcess
from benchmarks.prepared_run import build_data
from benchmarks.record import Report, Row
from benchmarks.sizes import size
from benchmarks.staged_swarm import START_SECONDS, Member, staged_parameters, staged_swarm, wait_until_trained
from neuroshard.model.architecture import parameter_count
from neuroshard.types import Architecture

DONORS, TRIES, VOCABULARY = size((3, 3, 1024), (2, 1, 300))
SHAPE = size((512, 8, 8, 4, 1408), (64, 2, 2, 1, 128))  # width, layers, heads, key/value heads, feed-forward
LENGTH, BATCH, MICROBATCHES, MEMORY_MB = 64, 1, 2, 2500
KILLED_AT = 0.15  # of the bytes have come
LOOK_SECONDS = 0.02
GOAL_SECONDS = 20.0


def measure() -> Report:
    """All nodes train on one thread each, but for the newcomer that fetches; donors come back between two tries."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pins, ids = build_data(folder / "genesis", VOCABULARY)
        width, layers, heads, key_value_heads, feed_forward = SHAPE
        architecture = Architecture(width, layers, heads, key_value_heads, feed_forward, ids, LENGTH)
        parameters = staged_parameters(pins, architecture, stages=1, batch_size=BATCH, microbatches=MICROBATCHES)
        with staged_swarm(folder, parameters, folder / "genesis") as swarm:
            donors = [swarm.start(number, memory_mb=MEMORY_MB) for number in range(DONORS)]
            tries = list[tuple[float, float]]()
            for number in range(DONORS, DONORS + TRIES):
                wait_until_trained(donors, 3)
                tries.append(_join(swarm.launch(number, memory_mb=MEMORY_MB), donors[1:]))
                print(tries[-1], flush=True)
                if len(tries) < TRIES:
                    donors[1:] = [swarm.start(donor.number, memory_mb=MEMORY_MB) for donor in donors[1:]]
    return _report(parameter_count(architecture), tries)


def _join(node: NodeProcess, killed: list[Member]) -> tuple[float, float]:
    """Seconds from the start of the process to the first step, and the part of them since the first bytes came."""
    node.wait_for("bytes", lambda status: _share(status) > 0, START_SECONDS)
    fetching = time.perf_counter()
    while _share(node.get("/api/status")) < KILLED_AT:
        time.sleep(LOOK_SECONDS)
    for member in killed:
        member.node.kill()
    status = node.wait_for("training", lambda status: status["state"] == "training", START_SECONDS)
    seconds = node.wait_for_steps(status["training"]["steps"] + 1, START_SECONDS)
    node.kill()
    return seconds, time.perf_counter() - fetching


def _share(status: dict[str, Any]) -> float:
    """Of the state's bytes that have come; 0 before it fetches."""
    for stage in status["startup"]:
        if told := re.search(r"Fetching .*: ([\d.]+) of ([\d.]+) MB", stage["detail"]):
            return float(told[1]) / float(told[2])
    return 1.0 if status["state"] == "training" else 0.0


def _report(parameters: int, tries: list[tuple[float, float]]) -> Report:
    whole, fetching = (list(column) for column in zip(*tries, strict=True))
    rows = (
        Row(
            f"start of the process to the first step, slowest of {TRIES}",
            f"{max(whole):.1f} s (median {median(whole):.1f} s)",
            f"< {GOAL_SECONDS:.0f} s",
            max(whole) < GOAL_SECONDS,
        ),
        Row("of that since the first bytes came", ", ".join(f"{one:.1f}" for one in fetching) + " s", "report", None),
    )
    note = (
        f"{parameters:,} parameters: weights, two moments, anchor and velocity. {DONORS} replicas train on one thread; "
        f"two are killed when {KILLED_AT:.0%} of the bytes have come. All share the cores of one machine."
    )
    return Report("state_joining", "A newcomer's state while two of three donors die", rows, (note,))
