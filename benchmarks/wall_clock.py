"""Minutes in which slow computers behind home lines reach, together, the loss that one of them reaches alone."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import httpx

from benchmarks.node_process import NodeProcess, running_node
from benchmarks.prepared_run import build_data
from benchmarks.record import NotHereError, Report, Row, load_average
from benchmarks.shaped_line import Home, NoLineError, enter, home_lines
from benchmarks.sizes import size
from benchmarks.staged_swarm import keep_own_run, staged_swarm
from benchmarks.texts import real_text_folder
from neuroshard.config.run_parameters import InnerOptimization, RunParameters
from neuroshard.model.architecture import parameter_count
from neuroshard.optim.schedule import scaled_learning_rate
from neuroshard.runs.proposal import propose_demo, run_parameters

NODES = size(4, 2)
MINUTES = float(os.environ.get("BENCHMARK_MINUTES", size(20, 0.5)))
VOCABULARY = size(2_048, 300)
UP_MBIT, DOWN_MBIT, ONE_WAY_MS = 10, 50, 25  # of each home; a packet crosses two lines
CORES = 0.5  # of each node
POLL_SECONDS = 2.0
GOAL = 0.5
PROCESSOR = Path("/sys/fs/cgroup/cpu")
PERIOD_US = 100_000
SHARES = 100 * 1_024  # against other programs of this computer, which get what the nodes leave

Curve = Sequence[tuple[float, float]]
"""Seconds since the start of the processes, and the held-out loss in nats per token."""


@dataclass(frozen=True)
class _Swarm:
    """What the nodes did until each had reached the loss of one alone, or the time was over."""

    curves: Sequence[Curve]
    steps: Sequence[int]  # of each node
    rounds: int
    uploaded: Sequence[int]  # bytes, of each node


def measure() -> Report:
    """One node for MINUTES, then NODES of them. Raises NotHereError without lines or control of the processor."""
    try:
        with tempfile.TemporaryDirectory() as name, home_lines(NODES, UP_MBIT, DOWN_MBIT, ONE_WAY_MS) as homes:
            folder = Path(name)
            pins, ids = build_data(folder / "genesis", VOCABULARY, real_text_folder())
            # the demo's model with the optimization of an ordinary run, whose rate does not end with a short visit
            proposal = propose_demo(ids)
            inner = InnerOptimization(learning_rate=scaled_learning_rate(proposal.architecture.hidden_size))
            run = run_parameters(replace(proposal, inner=inner), pins, name="benchmark")
            alone = _alone(folder, run, homes[0])
            target = alone[-1][1]
            swarm = _together(folder, run, homes, target)
    except NoLineError as error:
        raise NotHereError(str(error)) from error
    return _report(run, alone, swarm)


def _report(run: RunParameters, alone: Curve, swarm: _Swarm) -> Report:
    target = alone[-1][1]
    reached = [_crossing(curve, target) for curve in swarm.curves]
    whole = alone[-1][0]
    rows = [Row(f"one node: loss after {whole / 60:.1f} minutes", f"{target:.3f} nats", "report", None)]
    if all(seconds is not None for seconds in reached):
        seconds = [each for each in reached if each is not None]
        share = fmean(seconds) / whole
        each = ", ".join(f"{one / 60:.1f}" for one in seconds)
        figure = f"{share:.2f} (minutes of each: {each})"
        rows.append(Row(f"{NODES} nodes: share of that time until the same loss", figure, f"<= {GOAL}", share <= GOAL))
    else:
        lowest = ", ".join(f"{min(loss for _, loss in curve):.3f}" for curve in swarm.curves)
        figure = f"not reached in the same time; lowest: {lowest}"
        rows.append(Row(f"{NODES} nodes: share of that time until the same loss", figure, f"<= {GOAL}", met=False))
    for part in (0.25, 0.5):
        moment = part * whole
        several = fmean(_at(curve, moment) for curve in swarm.curves)
        rows.append(
            Row(
                f"after {moment / 60:.1f} minutes: one alone, {NODES} together",
                f"{_at(alone, moment):.3f}, {several:.3f} nats",
                "report",
                None,
            )
        )
    sent = ", ".join(f"{count / 1e6:.0f}" for count in swarm.uploaded)
    rows.append(Row("rounds; MB sent by each node", f"{swarm.rounds}; {sent}", "report", None))
    rows.append(Row("own steps of each node", ", ".join(map(str, swarm.steps)), "report", None))
    note = (
        f"{parameter_count(run.architecture) / 1e6:.1f} M parameters, {run.sequences_per_step} sequences of "
        f"{run.architecture.sequence_length} ids in a step, books, the shipped recipe. Times count from the start of "
        f"the processes. Each node has {CORES:g} of a core (a quota of the system) and a home line of {UP_MBIT} Mbit/s "
        f"up, {DOWN_MBIT} down, {4 * ONE_WAY_MS:g} ms between two homes, emulated; {load_average()} programs wanted a "
        "core at the end."
    )
    return Report("wall_clock", "Minutes to a loss: four slow computers against one", tuple(rows), (note,))


def _alone(folder: Path, run: RunParameters, home: Home) -> Curve:
    keep_own_run(folder / "alone", run)
    options = ["--genesis", str(folder / "genesis"), "--no-network", "--cpu-threads", "1"]
    with (
        _part_of_a_core("alone") as quota,
        running_node(folder / "alone", options, place=(*quota, *home.prefix)) as node,
    ):
        began = time.time()
        curve = list[tuple[float, float]]()
        while not curve or curve[-1][0] < 60 * MINUTES:
            time.sleep(POLL_SECONDS)
            curve = _curve(home, node, began) or curve
    return curve


def _together(folder: Path, run: RunParameters, homes: Sequence[Home], target: float) -> _Swarm:
    with ExitStack() as stack:
        quotas = [stack.enter_context(_part_of_a_core(f"node{number}")) for number in range(len(homes))]
        swarm = stack.enter_context(staged_swarm(folder, run, folder / "genesis", has_owner=True))  # ends before them
        nodes = list[NodeProcess]()
        began = time.time()
        for number, (home, quota) in enumerate(zip(homes, quotas, strict=True)):
            nodes.append(swarm.launch(number, place=(*quota, *home.prefix), host=home.address))
            if number == 0:
                enter(home.name)
                swarm.learn_address(number, nodes[0])
        curves: list[Curve] = [[] for _ in nodes]
        while time.time() - began < 60 * MINUTES and not all(_crossing(curve, target) for curve in curves):
            time.sleep(POLL_SECONDS)
            curves = [
                _curve(home, node, began) or earlier for home, node, earlier in zip(homes, nodes, curves, strict=True)
            ]
        steps, uploaded = list[int](), list[int]()
        for home, node in zip(homes, nodes, strict=True):
            enter(home.name)
            status = node.get("/api/status")
            steps.append(int(status["training"]["steps"]))
            uploaded.append(int(status["network"]["bytes_sent"]))
        rounds = [one for one in nodes[-1].get("/api/rounds")["rounds"] if one["abandoned_for"] is None]
        return _Swarm(curves, steps, len(rounds), uploaded)


def _curve(home: Home, node: NodeProcess, began: float) -> Curve:
    """Empty while the node does not answer, as when it starts."""
    enter(home.name)
    with suppress(httpx.HTTPError):
        points = node.get("/api/training/history")["held_out"]
        return [(float(one["time"]) - began, float(one["loss"])) for one in points]
    return []


def _crossing(curve: Curve, target: float) -> float | None:
    """Seconds until the loss was as low as the target, on the line between two evaluations."""
    for (first, high), (last, low) in pairwise(curve):
        if low <= target:
            return first + (last - first) * max(0.0, high - target) / max(1e-9, high - low)
    return None


def _at(curve: Curve, seconds: float) -> float:
    """The loss at this moment, on the line between two evaluations; the nearest one outside of them."""
    for (first, high), (last, low) in pairwise(curve):
        if first <= seconds <= last:
            return high + (low - high) * (seconds - first) / max(1e-9, last - first)
    return curve[0][1] if seconds < curve[0][0] else curve[-1][1]


@contextmanager
def _part_of_a_core(name: str) -> Generator[Sequence[str]]:
    """What to put before a command so that it gets no more than CORES. Raises NotHereError if the system cannot."""
    group = PROCESSOR / f"neuroshard-{os.getpid()}-{name}"
    try:
        group.mkdir()
        (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (group / "cpu.cfs_quota_us").write_text(str(int(CORES * PERIOD_US)))
        (group / "cpu.shares").write_text(str(SHARES))
    except OSError as error:
        raise NotHereError(f"the system limits no processor time in {PROCESSOR}: {error.strerror}") from error
    try:
        yield ("sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh")
    finally:
        for _ in range(100):
            with suppress(OSError):  # its last process has not ended yet
                group.rmdir()
                break
            time.sleep(0.1)
