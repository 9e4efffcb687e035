"""Tokens a second of a running node against a bare PyTorch loop with the same model, batch and optimizer.

Both live at the same time, in processes of their own; one is paused while the other works, in turns.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import IO, Any, cast

from benchmarks.node_process import NodeProcess, running_node
from benchmarks.prepared_run import build_data, fix_run
from benchmarks.record import Report, Row, mean_with_interval
from neuroshard.model.family import flops_per_token, parameter_count
from neuroshard.node.cores import default_threads
from neuroshard.types import Architecture

PAIRS = int(os.environ.get("BENCHMARK_PAIRS", "30"))
SEGMENT_SECONDS = 4.0
SETTLE_SECONDS = 1.0  # after a pause: a checkpoint being written must not slow the other side
BATCH, LENGTH, VOCABULARY = 4, 256, 4096
SIZES = {"5M": (256, 4, 4, 2, 704), "16M": (384, 8, 6, 3, 1024)}


@dataclass(frozen=True)
class Comparison:
    """Paired rates in tokens a second."""

    node: list[float]
    bare: list[float]
    thread_shares: dict[str, float]  # cores by thread while the node trained, mean
    precision: str
    fp32_rate: float  # of the bare loop, tokens a second
    write_seconds: float
    stall_seconds: float
    step_seconds: float
    matmul_flops: float
    flops_per_token: int
    parameters: int

    @property
    def ratios(self) -> list[float]:
        """Node over bare loop, pair by pair."""
        return [a / b for a, b in zip(self.node, self.bare, strict=True)]


@dataclass(frozen=True)
class BareLoop:
    """The yardstick's process."""

    commands: IO[str]
    answers: IO[str]
    matmul_flops: float


@contextmanager
def bare_loop(architecture: Architecture, precision: str) -> Generator[BareLoop]:
    """A bare loop that waits for its turn; gone when the block ends."""
    given = {
        "architecture": asdict(architecture),
        "batch_size": BATCH,
        "threads": default_threads(),
        "precision": precision,
    }
    command = [sys.executable, "-m", "benchmarks.bare_loop", json.dumps(given)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield BareLoop(process.stdin, process.stdout, float(json.loads(process.stdout.readline())["matmul_flops"]))
        process.stdin.close()


def measure(name: str) -> Report:
    """One of SIZES."""
    width, layers, heads, key_value_heads, feed_forward = SIZES[name]
    with tempfile.TemporaryDirectory() as folder:
        pins, ids = build_data(Path(folder) / "genesis", VOCABULARY)
        architecture = Architecture(width, layers, heads, key_value_heads, feed_forward, ids, LENGTH)
        data_dir = Path(folder) / "node"
        fix_run(data_dir, pins, architecture, BATCH, learning_rate=1e-3)
        with running_node(data_dir, ["--genesis", str(Path(folder) / "genesis")]) as node:
            comparison = compare(node, architecture)
    title = f"A running node against a bare PyTorch loop, {name} parameters (same precision, all cores)"
    return Report(
        f"node_speed_{name.lower()}", title, tuple(_rows(name, comparison)), (_threads_note(name, comparison),)
    )


def compare(node: NodeProcess, architecture: Architecture) -> Comparison:
    """PAIRS turns of node and bare loop, the order alternating."""
    node.wait_for_steps(3)
    node.post("/api/training/pause")
    precision = str(node.get("/api/status")["training"]["precision"])
    node_rates: list[float] = []
    bare_rates: list[float] = []
    shares: list[Mapping[str, float]] = []
    with bare_loop(architecture, "fp32") as fp32:
        fp32_rate = _bare_segment(fp32)
    with bare_loop(architecture, precision) as bare:
        for pair in range(PAIRS):
            for side in ("node", "bare") if pair % 2 == 0 else ("bare", "node"):
                if side == "node":
                    rate, share = _node_segment(node)
                    node_rates.append(rate)
                    shares.append(share)
                else:
                    bare_rates.append(_bare_segment(bare))
    status = node.get("/api/status")
    names = {name for share in shares for name in share}
    return Comparison(
        node=node_rates,
        bare=bare_rates,
        thread_shares={name: fmean(share.get(name, 0.0) for share in shares) for name in names},
        precision=precision,
        write_seconds=status["checkpoints"]["last_write_seconds"],
        stall_seconds=status["checkpoints"]["last_stall_seconds"],
        step_seconds=status["training"]["step_seconds"],
        matmul_flops=bare.matmul_flops,
        fp32_rate=fp32_rate,
        flops_per_token=flops_per_token(architecture),
        parameters=parameter_count(architecture),
    )


def _node_segment(node: NodeProcess) -> tuple[float, Mapping[str, float]]:
    """Tokens a second between the first and the last step of a segment, polled once a second like a dashboard."""
    node.post("/api/training/resume")
    started = time.time()
    shares: Mapping[str, float] = {}
    while time.time() - started < SEGMENT_SECONDS:
        time.sleep(1.0)
        status = node.get("/api/status")
        shares = {thread["name"]: thread["cores"] for thread in status["resources"]["threads"]}
    node.post("/api/training/pause")
    time.sleep(SETTLE_SECONDS)
    points = cast("list[dict[str, Any]]", node.get("/api/training/history")["points"])
    inside = [point for point in points if point["time"] >= started]
    tokens = inside[-1]["tokens"] - inside[0]["tokens"]
    return tokens / (inside[-1]["time"] - inside[0]["time"]), shares


def _bare_segment(loop: BareLoop) -> float:
    loop.commands.write(f"{SEGMENT_SECONDS}\n")
    loop.commands.flush()
    answer = json.loads(loop.answers.readline())
    return float(answer["steps"]) * BATCH * LENGTH / float(answer["seconds"])


def _rows(name: str, comparison: Comparison) -> list[Row]:
    ratio, half = mean_with_interval(comparison.ratios)
    bare = fmean(comparison.bare)
    efficiency = comparison.fp32_rate * comparison.flops_per_token / comparison.matmul_flops
    stall_share = comparison.stall_seconds / comparison.step_seconds
    is_large = comparison.parameters > 10_000_000
    return [
        Row(
            f"{name} ({comparison.parameters / 1e6:.1f} M): node / bare loop, {len(comparison.ratios)} pairs",
            f"{ratio:.3f} ± {half:.3f} (95 %)",
            ">= 0.95, aim 0.99",
            ratio >= 0.95,
        ),
        Row(f"{name}: node, bare loop", f"{fmean(comparison.node):,.0f}, {bare:,.0f} tokens/s", "report", None),
        Row(
            f"{name}: bare loop / fp32 matmul peak ({comparison.matmul_flops / 1e9:.0f} GFLOP/s)",
            f"{efficiency:.2f}",
            ">= 0.50 at 16 M" if is_large else "report",
            efficiency >= 0.5 if is_large else None,
        ),
        Row(f"{name}: checkpoint stall / step", f"{stall_share:.3f}", "<= 0.1", stall_share <= 0.1),
        Row(f"{name}: checkpoint write, in the background", f"{comparison.write_seconds:.2f} s", "report", None),
        Row(
            f"{name}: precision the start-up probe chose; its speed / fp32",
            f"{comparison.precision}; {bare / comparison.fp32_rate:.2f}",
            "report",
            None,
        ),
    ]


def _threads_note(name: str, comparison: Comparison) -> str:
    shares = sorted(comparison.thread_shares.items(), key=lambda item: -item[1])
    listed = ", ".join(f"{thread} {cores:.3f}" for thread, cores in shares if cores >= 0.0005)
    return f'{name}: cores used by thread of the node: {listed} ("native" are the matrix product\'s own threads).'
