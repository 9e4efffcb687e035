"""Tokens a second of three nodes that hold a third of a model each, against one node with all of it and both cores.

Both live at the same time; one is paused while the other works, in turns.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from statistics import fmean
from typing import Any, cast

from benchmarks.node_process import NodeProcess, running_node
from benchmarks.prepared_run import build_data
from benchmarks.record import Report, Row, mean_with_interval
from benchmarks.staged_swarm import alone, driver_of, keep_own_run, staged_parameters, staged_swarm, wait_until_trained
from neuroshard.model.family import parameter_count
from neuroshard.types import Architecture

PAIRS = int(os.environ.get("BENCHMARK_PAIRS", "12"))
SEGMENT_SECONDS = 12.0
SETTLE_SECONDS = 1.5
STAGES, BATCH, MICROBATCHES, LENGTH, VOCABULARY = 3, 2, 8, 256, 4096
SHAPE = (384, 9, 6, 3, 1024)  # width, layers, heads, key/value heads, feed-forward


def measure() -> Report:
    """PAIRS turns, the order alternating."""
    width, layers, heads, key_value_heads, feed_forward = SHAPE
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pins, ids = build_data(folder / "genesis", VOCABULARY)
        architecture = Architecture(width, layers, heads, key_value_heads, feed_forward, ids, LENGTH)
        parameters = staged_parameters(pins, architecture, stages=STAGES, batch_size=BATCH, microbatches=MICROBATCHES)
        keep_own_run(folder / "lone", alone(parameters))
        with (
            running_node(folder / "lone", ["--genesis", str(folder / "genesis"), "--no-network"]) as lone,
            staged_swarm(folder, parameters, folder / "genesis") as swarm,
        ):
            lone.wait_for_steps(2)
            lone.post("/api/training/pause")
            members = [swarm.start(number) for number in range(STAGES)]
            wait_until_trained(members, 2)
            driver = driver_of(members).node
            driver.post("/api/training/pause")
            ratios, rates = _compared(driver, lone)
            pipeline = driver.get("/api/pipeline")
            precisions = [str(member.status["training"]["precision"]) for member in members]
            lone_precision = str(lone.get("/api/status")["training"]["precision"])
    return Report(
        "pipeline_speed",
        "Three nodes with a third of the model each against one node with all of it (same two cores)",
        (
            _row(ratios, parameter_count(architecture)),
            Row("three nodes, one node", f"{rates[0]:,.0f}, {rates[1]:,.0f} tokens/s", "report", None),
            *_flow_rows(pipeline),
        ),
        (_conditions(precisions, lone_precision),),
    )


def _compared(driver: NodeProcess, lone: NodeProcess) -> tuple[list[float], tuple[float, float]]:
    """Ratios pair by pair, and the mean rates of both."""
    ours: list[float] = []
    theirs: list[float] = []
    for pair in range(PAIRS):
        for side in ("swarm", "lone") if pair % 2 == 0 else ("lone", "swarm"):
            if side == "swarm":
                ours.append(_segment(driver))
            else:
                theirs.append(_segment(lone))
    return [a / b for a, b in zip(ours, theirs, strict=True)], (fmean(ours), fmean(theirs))


def _segment(node: NodeProcess) -> float:
    """Tokens a second between the first and the last step of a turn."""
    started = time.time()
    node.post("/api/training/resume")
    time.sleep(SEGMENT_SECONDS)
    node.post("/api/training/pause")
    time.sleep(SETTLE_SECONDS)
    points = cast("list[dict[str, Any]]", node.get("/api/training/history")["points"])
    inside = [point for point in points if point["time"] >= started]
    return float(inside[-1]["tokens"] - inside[0]["tokens"]) / float(inside[-1]["time"] - inside[0]["time"])


def _row(ratios: list[float], parameters: int) -> Row:
    ratio, half = mean_with_interval(ratios)
    return Row(
        f"three nodes / one node, {parameters / 1e6:.1f} M parameters, {len(ratios)} pairs, activations kept",
        f"{ratio:.3f} ± {half:.3f} (95 %)",
        ">= 0.6, aim 0.8",
        ratio >= 0.6,
    )


def _flow_rows(pipeline: dict[str, Any]) -> list[Row]:
    """What the driver says of the last minute."""
    flow = pipeline.get("flow") or {}
    return [
        Row(f"of the last minute: {words}", f"{flow[name]:.3g}", "report", None)
        for name, words in (
            ("bubble_share", "bubble"),
            ("recompute_share", "recomputed microbatches"),
            ("wire_bytes_per_token", "bytes on the wire a token"),
        )
        if flow.get(name) is not None
    ]


def _conditions(precisions: list[str], lone_precision: str) -> str:
    return (
        f"{MICROBATCHES} microbatches of {BATCH} x {LENGTH} tokens in flight, which are a step; stages in "
        f"{', '.join(precisions)}, the lone node in {lone_precision}; loopback, fp32 on the wire. The lone node takes "
        "the same microbatches with two threads, each of the three has one."
    )
