"""A node on a GPU: MFU, the node against a compiled bare loop, stalls, pauses and the start. Needs a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from statistics import fmean

import torch

from benchmarks.node_process import NodeProcess
from benchmarks.node_speed import CASES, Case, Comparison, compare, node_of
from benchmarks.record import WAS_NOT_RUN, Report, Row
from neuroshard.host.matmul_speed import peak_speed
from neuroshard.host.resources import Device, devices_of
from neuroshard.model.memory_need import memory_need

SECONDS_TO_COMPILE = 600.0
COMPILATION_ENDS = ("Blocks are compiled", "Training computes without compilation", "Training computes eagerly")
MODELS: Mapping[str, Case] = {
    "350M": replace(CASES["350M"], compiled=True),
    "1B": Case((2048, 20, 16, 8, 5632), batch_size=8, length=1024, vocabulary=32_000, device="cuda", compiled=True),
}


@dataclass(frozen=True)
class Measured:
    """What one model gave."""

    comparison: Comparison
    peak_flops: float
    planned_megabytes: float
    first_step_seconds: float

    @property
    def tokens_a_second(self) -> float:
        """Of the node."""
        return fmean(segment.tokens_a_second for segment in self.comparison.node)

    @property
    def mfu(self) -> float:
        """Useful operations a second over the peak of the device."""
        return self.tokens_a_second * self.comparison.flops_per_token / self.peak_flops

    @property
    def ratio(self) -> float:
        """Node over compiled bare loop, mean of the pairs."""
        return fmean(self.comparison.ratios(lambda segment: segment.tokens_a_second))

    @property
    def stall_share(self) -> float:
        """Stall of a checkpoint in steps."""
        return self.comparison.stall_seconds / self.comparison.step_seconds

    @property
    def freed_share(self) -> float:
        """Memory that a pause gives back, of what the plan counts."""
        return (self.comparison.device_megabytes or 0.0) / self.planned_megabytes

    @property
    def pause_seconds(self) -> float:
        """From the request to the last byte given back."""
        return self.comparison.pause_seconds or float("inf")


@dataclass(frozen=True)
class Figure:
    """One figure and its goal, for each model."""

    item: str
    value: Callable[[Measured], float]
    form: str
    goal: str = "report"
    is_met: Callable[[float], bool] | None = None

    def row(self, model: str, measured: Measured | None) -> Row:
        """The figure of a model; None: nothing was measured."""
        item = f"{model}, bf16: {self.item}"
        if measured is None:
            return Row(item, WAS_NOT_RUN, self.goal, None)
        value = self.value(measured)
        return Row(item, self.form.format(value), self.goal, None if self.is_met is None else self.is_met(value))


FIGURES = (
    Figure("MFU of the node", lambda m: m.mfu, "{:.3f}", ">= 0.50", lambda value: value >= 0.5),
    Figure("tokens/s of the node", lambda m: m.tokens_a_second, "{:,.0f}"),
    Figure("node / bare compiled loop", lambda m: m.ratio, "{:.3f}", ">= 0.98", lambda value: value >= 0.98),
    Figure("stall of a checkpoint / step", lambda m: m.stall_share, "{:.3f}", "<= 0.05", lambda value: value <= 0.05),
    Figure("a pause frees the device's memory in", lambda m: m.pause_seconds, "{:.2f} s", "<= 1 s", lambda v: v <= 1),
    Figure("memory that a pause frees / planned memory", lambda m: m.freed_share, "{:.3f}"),
    Figure("first step after the start", lambda m: m.first_step_seconds, "{:.1f} s", "<= 10 s", lambda v: v <= 10),
)


def measure() -> Report:
    """All figures of all models, or rows that say that they were not run."""
    devices = devices_of("cuda")
    if not devices:
        rows = tuple(figure.row(model, None) for model in MODELS for figure in FIGURES)
        return Report("gpu", "A node on a GPU", rows, ("PyTorch sees no CUDA device here.",))
    device = devices[0]
    rows, notes = list[Row](), list[str]()
    for model, case in MODELS.items():
        measured, note = measure_model(case, device)
        rows += (figure.row(model, measured) for figure in FIGURES)
        notes.append(f"{model}: {note}")
    return Report("gpu", f"A node on a GPU: {device.name}", tuple(rows), tuple(notes), device=device.name)


def measure_model(case: Case, device: Device) -> tuple[Measured, str]:
    """Train a model on a node that has compiled it, and on a compiled bare loop, in turns."""
    with node_of(case) as (node, architecture):
        first_step_seconds = node.wait_for_steps(1)
        compilation = _compiled(node)
        comparison = compare(node, architecture, case)
    need = memory_need(architecture, batch_size=case.batch_size, device="cuda", compiles=True)
    peak = peak_speed(device, torch.bfloat16)
    note = (
        f"{comparison.parameters / 1e6:,.1f} M parameters, {case.batch_size} x {case.length} tokens, computed in "
        f"{comparison.precision}. {compilation} Peak {peak.flops_per_second / 1e12:,.0f} TFLOP/s "
        f"({peak.source}); {len(comparison.node)} pairs."
    )
    return Measured(comparison, peak.flops_per_second, need.device_bytes / 1e6, first_step_seconds), note


def _compiled(node: NodeProcess) -> str:
    """Wait until the compiled form is used or refused; the line of the log that says which."""
    deadline = time.perf_counter() + SECONDS_TO_COMPILE
    while time.perf_counter() < deadline:
        messages: list[str] = [line["message"] for line in node.get("/api/logs?limit=1000")["records"]]
        if found := [message for message in messages if message.startswith(COMPILATION_ENDS)]:
            return found[-1]
        time.sleep(1.0)
    return f"compilation has not ended within {SECONDS_TO_COMPILE:g} s."
