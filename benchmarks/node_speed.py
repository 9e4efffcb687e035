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
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from statistics import fmean
from typing import IO

import psutil
import torch

from benchmarks.node_process import NodeProcess, running_node
from benchmarks.prepared_run import build_data, fix_run
from benchmarks.record import NotHereError, Report, Row, mean_with_interval
from benchmarks.sizes import size
from neuroshard.host.computer import default_threads
from neuroshard.model.architecture import flops_per_token, parameter_count
from neuroshard.model.memory_need import memory_need
from neuroshard.types import Architecture

PAIRS = int(os.environ.get("BENCHMARK_PAIRS", size(30, 1)))
SEGMENT_SECONDS = size(4.0, 0.5)
SECONDS_TO_FREE = 10.0  # after a pause: longer than the GPU's memory may take
SETTLE_SECONDS = size(1.0, 0.1)  # after a pause: a checkpoint being written must not slow the other side


@dataclass(frozen=True)
class Case:
    """A model, its batch, and where both sides compute."""

    shape: tuple[int, int, int, int, int]  # width, layers, heads, key/value heads, feed-forward
    batch_size: int = 4
    length: int = 256
    vocabulary: int = 4096
    device: str = "cpu"
    compiled: bool = False  # whether the bare loop of the pairs goes through torch.compile

    def architecture(self, ids: int) -> Architecture:
        """The model, once the ids in use are known."""
        width, layers, heads, key_value_heads, feed_forward = self.shape
        return Architecture(width, layers, heads, key_value_heads, feed_forward, ids, self.length)


TINY_CASE = Case((64, 2, 2, 1, 128), length=64, vocabulary=300)
CASES = {
    "2.4M": size(Case((192, 4, 3, 1, 512), vocabulary=2816), TINY_CASE),  # of the demo
    "5M": size(Case((256, 4, 4, 2, 704)), TINY_CASE),
    "16M": size(Case((384, 8, 6, 3, 1024)), TINY_CASE),
    "350M": Case((1024, 24, 16, 8, 2816), batch_size=16, length=1024, vocabulary=32_000, device="cuda"),
}


@dataclass(frozen=True)
class Segment:
    """One turn of either side."""

    tokens_a_second: float
    cores: float  # CPU-seconds of the whole process a second

    @property
    def tokens_a_cpu_second(self) -> float:
        """The rate that other programs and other virtual machines on the same cores disturb least."""
        return self.tokens_a_second / self.cores


@dataclass(frozen=True)
class Comparison:
    """Both sides, turn by turn."""

    case: Case
    architecture: Architecture
    node: list[Segment]
    bare: list[Segment]
    thread_shares: dict[str, float]  # cores by thread while the node trained, mean
    precision: str
    fp32_rate: float  # of the bare loop, tokens a second
    # of the bare loop through torch.compile; None if that is not tried, or tried in the pairs
    compiled_rate: float | None
    write_seconds: float
    stall_seconds: float
    step_seconds: float
    matmul_flops: float  # fp32 on a CPU, else in the precision of the comparison
    flops_per_token: int
    parameters: int
    first_steps_seconds: float  # of the node, from its start to its third step
    device_megabytes: float | None  # that a pause gave back to the GPU; None on a CPU
    pause_seconds: float | None  # from the request until the GPU's memory was free again; None on a CPU

    def ratios(self, figure: Callable[[Segment], float]) -> list[float]:
        """Node over bare loop, pair by pair."""
        return [figure(node) / figure(bare) for node, bare in zip(self.node, self.bare, strict=True)]

    def means(self, figure: Callable[[Segment], float]) -> tuple[float, float]:
        """Node and bare loop."""
        return fmean(map(figure, self.node)), fmean(map(figure, self.bare))


class BareLoop:
    """The yardstick's process."""

    def __init__(self, process: subprocess.Popen[str], tokens_a_step: int) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._commands: IO[str] = process.stdin
        self._answers: IO[str] = process.stdout
        self._tokens_a_step = tokens_a_step
        self.matmul_flops = float(json.loads(self._answers.readline())["matmul_flops"])

    def segment(self) -> Segment:
        """Let it train for one turn."""
        self._commands.write(f"{SEGMENT_SECONDS}\n")
        self._commands.flush()
        answer = json.loads(self._answers.readline())
        seconds = float(answer["seconds"])
        return Segment(float(answer["steps"]) * self._tokens_a_step / seconds, float(answer["cpu_seconds"]) / seconds)


@contextmanager
def bare_loop(architecture: Architecture, case: Case, precision: str, *, compiled: bool = False) -> Generator[BareLoop]:
    """A bare loop that waits for its turn; gone when the block ends."""
    given = {
        "architecture": asdict(architecture),
        "batch_size": case.batch_size,
        "threads": default_threads(),
        "precision": precision,
        "device": case.device,
        "compiled": compiled,
    }
    command = [sys.executable, "-m", "benchmarks.bare_loop", json.dumps(given)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield BareLoop(process, case.batch_size * case.length)
        assert process.stdin is not None
        process.stdin.close()


@contextmanager
def node_of(case: Case) -> Generator[tuple[NodeProcess, Architecture]]:
    """A node that trains the model of a case on data of its own; gone when the block ends."""
    with tempfile.TemporaryDirectory() as folder:
        pins, ids = build_data(Path(folder) / "genesis", case.vocabulary)
        architecture = case.architecture(ids)
        data_dir = Path(folder) / "node"
        fix_run(data_dir, pins, architecture, case.batch_size, learning_rate=1e-3)
        # the bare loop, which takes turns with the node, is another program on the GPU
        options = ["--genesis", str(Path(folder) / "genesis"), "--device", case.device, "--gpu-share", "100"]
        with running_node(data_dir, options) as node:
            yield node, architecture


def measure(name: str) -> Report:
    """One of CASES. Raises NotHereError for one that needs a GPU where there is none."""
    case = CASES[name]
    if case.device == "cuda" and not torch.cuda.is_available():
        raise NotHereError("PyTorch sees no CUDA device here")
    with node_of(case) as (node, architecture):
        comparison = compare(node, architecture, case)
    where = "all cores" if case.device == "cpu" else torch.cuda.get_device_name()
    title = f"A running node against a bare PyTorch loop, {name} parameters (same precision, {where})"
    return Report(
        f"node_speed_{name.lower()}", title, tuple(_rows(name, comparison)), (_threads_note(name, comparison),)
    )


def compare(node: NodeProcess, architecture: Architecture, case: Case) -> Comparison:
    """PAIRS turns of node and bare loop, the order alternating."""
    first_steps_seconds = node.wait_for_steps(3)
    device_megabytes, pause_seconds = _pause(node, case)
    precision = str(node.get("/api/status")["training"]["precision"])
    node_segments: list[Segment] = []
    bare_segments: list[Segment] = []
    shares: list[Mapping[str, float]] = []
    compiled_rate: float | None = None
    with bare_loop(architecture, case, "fp32") as fp32:
        fp32_rate, matmul_flops = fp32.segment().tokens_a_second, fp32.matmul_flops
    if case.device != "cpu" and not case.compiled:
        with bare_loop(architecture, case, precision, compiled=True) as compiled:
            compiled_rate = compiled.segment().tokens_a_second
    with bare_loop(architecture, case, precision, compiled=case.compiled) as bare:
        for pair in range(PAIRS):
            for side in ("node", "bare") if pair % 2 == 0 else ("bare", "node"):
                if side == "node":
                    segment, share = _node_segment(node)
                    node_segments.append(segment)
                    shares.append(share)
                else:
                    bare_segments.append(bare.segment())
    status = node.get("/api/status")
    names = {name for share in shares for name in share}
    return Comparison(
        case=case,
        architecture=architecture,
        node=node_segments,
        bare=bare_segments,
        thread_shares={name: fmean(share.get(name, 0.0) for share in shares) for name in names},
        precision=precision,
        write_seconds=status["checkpoints"]["last_write_seconds"],
        stall_seconds=status["checkpoints"]["last_stall_seconds"],
        step_seconds=case.batch_size * case.length / fmean(segment.tokens_a_second for segment in node_segments),
        matmul_flops=matmul_flops if case.device == "cpu" else bare.matmul_flops,
        fp32_rate=fp32_rate,
        compiled_rate=compiled_rate,
        flops_per_token=flops_per_token(architecture),
        parameters=parameter_count(architecture),
        first_steps_seconds=first_steps_seconds,
        device_megabytes=device_megabytes,
        pause_seconds=pause_seconds,
    )


def _pause(node: NodeProcess, case: Case) -> tuple[float | None, float | None]:
    """Pause the node. Returns the MB that a GPU gets back, and the seconds that it takes; None on a CPU."""
    if case.device == "cpu":
        node.post("/api/training/pause")
        return None, None
    before, _ = torch.cuda.mem_get_info()
    started = time.perf_counter()
    node.post("/api/training/pause")
    largest, at = before, started
    while time.perf_counter() - started < SECONDS_TO_FREE:
        free, _ = torch.cuda.mem_get_info()
        if free > largest:
            largest, at = free, time.perf_counter()
        time.sleep(0.02)
    return (largest - before) / 1e6, at - started


def _node_segment(node: NodeProcess) -> tuple[Segment, Mapping[str, float]]:
    """From the first to the last step of a turn, polled once a second like a dashboard; and the cores by thread."""
    process = psutil.Process(node.process.pid)
    node.post("/api/training/resume")
    started, cpu_at_start = time.time(), _cpu_seconds(process)
    shares: Mapping[str, float] = {}
    while time.time() - started < SEGMENT_SECONDS or len(node.points_since(started)) < 2:
        time.sleep(min(1.0, SEGMENT_SECONDS))
        status = node.get("/api/status")
        shares = {thread["name"]: thread["cores"] for thread in status["resources"]["threads"]}
    cores = (_cpu_seconds(process) - cpu_at_start) / (time.time() - started)
    node.post("/api/training/pause")
    time.sleep(SETTLE_SECONDS)
    inside = node.points_since(started)
    tokens = inside[-1]["tokens"] - inside[0]["tokens"]
    return Segment(tokens / (inside[-1]["time"] - inside[0]["time"]), cores), shares


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def _rows(name: str, comparison: Comparison) -> list[Row]:
    def rate(segment: Segment) -> float:
        return segment.tokens_a_second

    ratio, half = mean_with_interval(comparison.ratios(rate))
    cpu_ratio, cpu_half = mean_with_interval(comparison.ratios(lambda segment: segment.tokens_a_cpu_second))
    node_cores, bare_cores = comparison.means(lambda segment: segment.cores)
    node, bare = comparison.means(rate)
    stall_share = comparison.stall_seconds / comparison.step_seconds
    return [
        Row(
            f"{name} ({comparison.parameters / 1e6:.1f} M): node / bare loop, {len(comparison.node)} pairs",
            f"{ratio:.3f} ± {half:.3f} (95 %)",
            ">= 0.95, aim 0.99",
            ratio >= 0.95,
        ),
        Row(f"{name}: node, bare loop", f"{node:,.0f}, {bare:,.0f} tokens/s", "report", None),
        Row(
            f"{name}: the same in tokens a CPU-second; cores used by node, bare loop",
            f"{cpu_ratio:.3f} ± {cpu_half:.3f}; {node_cores:.2f}, {bare_cores:.2f}",
            "report",
            None,
        ),
        *(_cpu_rows(name, comparison) if comparison.case.device == "cpu" else _gpu_rows(name, comparison)),
        Row(f"{name}: checkpoint stall / step", f"{stall_share:.3f}", "<= 0.1", stall_share <= 0.1),
        Row(f"{name}: checkpoint write, in the background", f"{comparison.write_seconds:.2f} s", "report", None),
        Row(
            f"{name}: precision the start-up probe chose; its speed / fp32",
            f"{comparison.precision}; {bare / comparison.fp32_rate:.2f}",
            "report",
            None,
        ),
    ]


def _cpu_rows(name: str, comparison: Comparison) -> list[Row]:
    efficiency = comparison.fp32_rate * comparison.flops_per_token / comparison.matmul_flops
    is_large = comparison.parameters > 10_000_000
    return [
        Row(
            f"{name}: bare loop / fp32 matmul peak ({comparison.matmul_flops / 1e9:.0f} GFLOP/s)",
            f"{efficiency:.2f}",
            ">= 0.50 at 16 M" if is_large else "report",
            efficiency >= 0.5 if is_large else None,
        )
    ]


def _gpu_rows(name: str, comparison: Comparison) -> list[Row]:
    peak = comparison.matmul_flops / comparison.flops_per_token
    efficiency = fmean(segment.tokens_a_second for segment in comparison.node) / peak
    compiled = comparison.compiled_rate or 0.0
    need = memory_need(comparison.architecture, batch_size=comparison.case.batch_size, device="cuda")
    freed, planned = comparison.device_megabytes or 0.0, need.device_bytes / 1e6
    return [
        Row(
            f"{name}: node / {comparison.precision} matmul peak ({comparison.matmul_flops / 1e12:.0f} TFLOP/s)",
            f"{efficiency:.2f}",
            ">= 0.40",
            efficiency >= 0.4,
        ),
        Row(
            f"{name}: bare loop with torch.compile / that peak",
            f"{compiled / peak:.2f}",
            ">= 0.40",
            compiled >= 0.4 * peak,
        ),
        Row(
            f"{name}: a pause frees {freed:,.0f} MB of the GPU, of {planned:,.0f} planned, in",
            f"{comparison.pause_seconds or 0.0:.2f} s",
            "<= 1 s",
            (comparison.pause_seconds or inf) <= 1.0,
        ),
        Row(f"{name}: third step after the start", f"{comparison.first_steps_seconds:.1f} s", "report", None),
    ]


def _threads_note(name: str, comparison: Comparison) -> str:
    shares = sorted(comparison.thread_shares.items(), key=lambda item: -item[1])
    listed = ", ".join(f"{thread} {cores:.3f}" for thread, cores in shares if cores >= 0.0005)
    return f'{name}: cores used by thread of the node: {listed} ("native" are the matrix product\'s own threads).'
