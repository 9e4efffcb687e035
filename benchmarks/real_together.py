"""Do real nodes learn more together than one of them alone, and than one machine that takes the data of all?"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import httpx

from benchmarks.node_process import NodeProcess, running_node
from benchmarks.prepared_run import build_data
from benchmarks.record import Report, Row, load_average
from benchmarks.sizes import size
from benchmarks.staged_swarm import keep_own_run, staged_swarm
from neuroshard.config.run_parameters import RunParameters
from neuroshard.runs.proposal import propose_demo, run_parameters

NODES = size(3, 2)
VOCABULARY = size(2_048, 300)
MARKS = size((300, 600), (0,))  # own steps
RATES = size((1.0, 2.0), (1.0,))  # of the synchronous machine, times that of one node: its better one counts
POLL_SECONDS = 1.0
LONGEST_SECONDS = 5_400.0
GOAL = 0.8  # share of the synchronous machine's gain

Losses = Mapping[int, float]
"""Held-out loss in nats per token, by the node's own step."""


def measure() -> Report:
    """One node, three nodes, and one node with three times the batch, on the same run otherwise."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pins, ids = build_data(folder / "genesis", VOCABULARY)
        run = run_parameters(propose_demo(ids), pins, name="benchmark")
        alone = _of_one(folder / "alone", run, folder / "genesis")
        synchronous = [
            _of_one(folder / f"synchronous-{rate}", _synchronous(run, rate), folder / "genesis") for rate in RATES
        ]
        together, rounds = _of_several(folder, run)
    rows = list[Row]()
    for mark in MARKS:
        one, big = alone[mark], min(each[mark] for each in synchronous)
        several = [node[mark] for node in together]
        rows.append(Row(f"own step {mark}: one node alone", f"{one:.3f}", "report", None))
        shown = ", ".join(
            f"{each[mark]:.3f} at {rate:g} times the rate" for each, rate in zip(synchronous, RATES, strict=True)
        )
        rows.append(Row(f"own step {mark}: one node with {NODES} times the batch", shown, "report", None))
        figure = f"{fmean(several):.3f} ({', '.join(f'{loss:.3f}' for loss in several)})"
        rows.append(Row(f"own step {mark}: {NODES} nodes", figure, f"< {one:.3f}", fmean(several) < one))
        if big < one:
            share = (one - fmean(several)) / (one - big)
            rows.append(Row(f"own step {mark}: share of that gain", f"{share:.0%}", f">= {GOAL:.0%}", share >= GOAL))
    note = (
        "Held-out loss in nats per token, between the two evaluations next to the named step of each node. The model "
        f"and the schedule of the demo, whose text is Python's documentation. All nodes share this computer; "
        f"{load_average()} programs wanted a core at the end."
    )
    return Report("real_together", "Real nodes against one of them", (*rows, *_round_rows(rounds)), (note,))


def _synchronous(run: RunParameters, rate: float) -> RunParameters:
    inner = replace(run.inner, learning_rate=rate * run.inner.learning_rate)
    return replace(run, sequences_per_step=NODES * run.sequences_per_step, inner=inner)


def _of_one(data_dir: Path, run: RunParameters, genesis: Path) -> Losses:
    keep_own_run(data_dir, run)
    with running_node(data_dir, ["--genesis", str(genesis), "--no-network"]) as node:
        _wait(lambda: _passed_all(node))
        return _at_marks(node)


def _of_several(folder: Path, run: RunParameters) -> tuple[list[Losses], list[dict[str, Any]]]:
    """The losses of each node, and the records of the first node's rounds, oldest first."""
    with _swarm(folder, run) as nodes:
        rounds = dict[int, dict[str, Any]]()

        def watch() -> bool:
            rounds.update({one["outer_step"]: one for one in _rounds(nodes[0])})
            return all(_passed_all(node) for node in nodes)

        _wait(watch)
        return [_at_marks(node) for node in nodes], [rounds[step] for step in sorted(rounds)]


@contextmanager
def _swarm(folder: Path, run: RunParameters) -> Generator[Sequence[NodeProcess]]:
    """Nodes that start at about the same time; the others know the address of the first one."""
    with staged_swarm(folder, run, folder / "genesis", has_owner=True) as swarm:
        yield [swarm.start(number).node if number == 0 else swarm.launch(number) for number in range(NODES)]


def _wait(is_done: Callable[[], bool]) -> None:
    began = time.monotonic()
    while time.monotonic() - began < LONGEST_SECONDS:
        with suppress(httpx.HTTPError):  # a node that starts or is busy answers next time
            if is_done():
                return
        time.sleep(POLL_SECONDS)
    raise TimeoutError(f"not all nodes reached step {max(MARKS)} within {LONGEST_SECONDS:.0f} s")


def _curve(node: NodeProcess) -> list[tuple[int, float]]:
    return [(int(one["step"]), float(one["loss"])) for one in node.get("/api/training/history")["held_out"]]


def _passed_all(node: NodeProcess) -> bool:
    return any(step >= max(MARKS) for step, _ in _curve(node))


def _at_marks(node: NodeProcess) -> Losses:
    """On the line between the two evaluations next to each mark."""
    curve, found = _curve(node), dict[int, float]()
    for mark in MARKS:
        before = [point for point in curve if point[0] <= mark] or curve[:1]
        (first, low), (last, high) = before[-1], next(point for point in curve if point[0] >= mark)
        found[mark] = high if last <= first else low + (high - low) * (mark - first) / (last - first)
    return found


def _rounds(node: NodeProcess) -> list[dict[str, Any]]:
    return [one for one in node.get("/api/rounds")["rounds"] if one["abandoned_for"] is None]


def _round_rows(rounds: Sequence[Mapping[str, Any]]) -> list[Row]:
    """The number of rounds, and the seconds of their phases."""
    if not rounds:
        return [Row("rounds", "0", "> 0", met=False)]
    phases = [one["phases"] for one in rounds]
    names = ("gather", "exchange", "vote")
    seconds = ", ".join(f"{name} {fmean(phase[name] for phase in phases):.2f} s" for name in names)
    return [Row("rounds; mean seconds of their phases", f"{len(rounds)}; {seconds}", "report", None)]
