"""Tokens a second of three nodes that hold a third of a model each, against one node with all of it and both cores.

Both live at the same time; one is paused while the other works, in turns.
"""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.node_process import NodeProcess, running_node
from benchmarks.prepared_run import build_data
from benchmarks.record import Report, Row, mean_with_interval
from benchmarks.sizes import size
from benchmarks.staged_swarm import alone, driver_of, keep_own_run, staged_parameters, staged_swarm, wait_until_trained
from neuroshard.config.run_parameters import RunParameters
from neuroshard.membership.stage_coverage import StageRange
from neuroshard.model.architecture import parameter_count
from neuroshard.node.own_stages import TIER_MB, least_load, need_of
from neuroshard.runs.proposal import HardwareBudget
from neuroshard.types import Architecture

PAIRS = int(os.environ.get("BENCHMARK_PAIRS", size(12, 1)))
SEGMENT_SECONDS = size(12.0, 0.5)
SETTLE_SECONDS = 1.5
STAGES, BATCH, MICROBATCHES, LENGTH, VOCABULARY = size((3, 2, 8, 256, 4096), (2, 1, 2, 64, 300))
SHAPE = size((384, 9, 6, 3, 1024), (64, 2, 2, 1, 128))  # width, layers, heads, key/value heads, feed-forward


@dataclass(frozen=True)
class Variant:
    """How the three nodes hold their stages."""

    name: str
    memory_mb: tuple[int | None, ...]  # of each, in the order in which they start; None: what the computer has
    goal: str
    least: float


def measure() -> Report:
    """PAIRS turns with each variant, the order alternating."""
    width, layers, heads, key_value_heads, feed_forward = SHAPE
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pins, ids = build_data(folder / "genesis", VOCABULARY)
        architecture = Architecture(width, layers, heads, key_value_heads, feed_forward, ids, LENGTH)
        parameters = staged_parameters(pins, architecture, stages=STAGES, batch_size=BATCH, microbatches=MICROBATCHES)
        keep_own_run(folder / "lone", alone(parameters))
        variants = (
            Variant("activations kept", (None,) * STAGES, ">= 0.6, aim 0.8", 0.6),
            Variant("activations computed again", _least_memory(parameters), ">= 0.5", 0.5),
        )
        with running_node(folder / "lone", ["--genesis", str(folder / "genesis"), "--no-network"]) as lone:
            lone.wait_for_steps(2)
            lone.post("/api/training/pause")
            lone_precision = str(lone.get("/api/status")["training"]["precision"])
            rows, notes = list[Row](), list[str]()
            for variant in variants[size(0, 1) :]:  # the second one at the tiny size: both take the same way
                measured = _measured(variant, folder, parameters, lone)
                rows += measured.rows
                notes.append(f"{variant.name}: stages in {', '.join(measured.precisions)}")
    return Report(
        "pipeline_speed",
        "Three nodes with a third of the model each against one node with all of it (same two cores)",
        tuple(rows),
        (_conditions(lone_precision, variants[1]), f"{'; '.join(notes)}."),
    )


@dataclass(frozen=True)
class Measured:
    """What came of a variant."""

    rows: tuple[Row, ...]
    precisions: tuple[str, ...]


def _measured(variant: Variant, folder: Path, parameters: RunParameters, lone: NodeProcess) -> Measured:
    """A swarm against the lone node, which is paused before and after."""
    place = folder / variant.name.replace(" ", "-")
    with staged_swarm(place, parameters, folder / "genesis") as swarm:
        members = [swarm.start(number, memory_mb=memory) for number, memory in enumerate(variant.memory_mb)]
        wait_until_trained(members, 2)
        driver = driver_of(members).node
        driver.post("/api/training/pause")
        ratios, rates = _compared(driver, lone)
        pipeline = driver.get("/api/pipeline")
        precisions = tuple(str(member.status["training"]["precision"]) for member in members)
    rows = (
        _row(variant, ratios, parameter_count(parameters.architecture)),
        Row(f"{variant.name}: three nodes, one node", f"{rates[0]:,.0f}, {rates[1]:,.0f} tokens/s", "report", None),
        *_flow_rows(variant, pipeline),
    )
    return Measured(rows, precisions)


def _least_memory(parameters: RunParameters) -> tuple[int, ...]:
    """MB that just hold each stage, so that next to none is left for activations; the smallest first.

    Who has little takes a stage that fits, and leaves the largest to the last one.
    """
    return tuple(sorted(_least_tier(parameters, StageRange(at, at + 1)) for at in range(parameters.stage_count)))


def _least_tier(parameters: RunParameters, stage: StageRange) -> int:
    tiers = count(TIER_MB, TIER_MB)
    load = least_load(parameters, stage)
    return next(
        tier for tier in tiers if need_of(parameters, stage, HardwareBudget(tier, "cpu", None, 1e9), load).fits(tier)
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
    node.post("/api/training/resume")
    rate = node.training_rate(SEGMENT_SECONDS)
    node.post("/api/training/pause")
    time.sleep(SETTLE_SECONDS)
    return rate


def _row(variant: Variant, ratios: list[float], parameters: int) -> Row:
    ratio, half = mean_with_interval(ratios)
    return Row(
        f"three nodes / one node, {parameters / 1e6:.1f} M parameters, {len(ratios)} pairs, {variant.name}",
        f"{ratio:.3f} ± {half:.3f} (95 %)",
        variant.goal,
        ratio >= variant.least,
    )


def _flow_rows(variant: Variant, pipeline: dict[str, Any]) -> list[Row]:
    """What the driver says of the last minute."""
    flow = pipeline.get("flow") or {}
    return [
        Row(f"{variant.name}: {words}, last minute", f"{flow[name]:.3g}", "report", None)
        for name, words in (
            ("bubble_share", "bubble"),
            ("recompute_share", "share of computing that is done again"),
            ("wire_bytes_per_token", "bytes on the wire a token"),
        )
        if flow.get(name) is not None
    ]


def _conditions(lone_precision: str, recomputing: Variant) -> str:
    return (
        f"{MICROBATCHES} microbatches of {BATCH} x {LENGTH} tokens in flight, which are a step; the lone node in "
        f"{lone_precision}; loopback, fp32 on the wire. The lone node takes the same microbatches with two threads, "
        f"each of the three has one. For the second variant the three may use {recomputing.memory_mb} MB (`--memory`), "
        "which leaves next to no room for the activations of microbatches in flight, and for fewer of these."
    )
