"""Do real nodes learn more together than one of them alone, and than one machine that takes the data of all?"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import httpx
from torch import Tensor

from benchmarks.held_out_shard import held_out_of, saved_loss, shard_windows, with_held_out
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
        rows = shard_windows(folder / "genesis", run)
        alone = _of_one(folder / "alone", run, folder / "genesis", rows)
        synchronous = [
            _of_one(folder / f"synchronous-{rate}", _synchronous(run, rate), folder / "genesis", rows) for rate in RATES
        ]
        together, rounds = _of_several(folder, run, rows)
    note = (
        "Nats per token of a held-out shard, the same one for all, of the model that a node would export when it has "
        f"passed the named step. The shard has {len(rows)} windows. The model and the schedule of the demo, whose text "
        f"is Python's documentation. All nodes share this computer; {load_average()} programs wanted a core at the end."
    )
    found = [*_loss_rows(alone, synchronous, together), *_round_rows(rounds)]
    return Report("real_together", "Real nodes against one of them", tuple(found), (note,))


def _loss_rows(alone: Losses, synchronous: Sequence[Losses], together: Sequence[Losses]) -> Iterator[Row]:
    for mark in MARKS:
        one, big = alone[mark], min(each[mark] for each in synchronous)
        several = [node[mark] for node in together]
        yield Row(f"own step {mark}: one node alone", f"{one:.3f}", "report", None)
        shown = ", ".join(
            f"{each[mark]:.3f} at {rate:g} times the rate" for each, rate in zip(synchronous, RATES, strict=True)
        )
        yield Row(f"own step {mark}: one node with {NODES} times the batch", shown, "report", None)
        figure = f"{fmean(several):.3f} ({', '.join(f'{loss:.3f}' for loss in several)})"
        yield Row(f"own step {mark}: {NODES} nodes", figure, f"< {one:.3f}", fmean(several) < one)
        if big < one:
            share = (one - fmean(several)) / (one - big)
            yield Row(f"own step {mark}: share of that gain", f"{share:.0%}", f">= {GOAL:.0%}", share >= GOAL)


def _synchronous(run: RunParameters, rate: float) -> RunParameters:
    inner = replace(run.inner, learning_rate=rate * run.inner.learning_rate)
    larger = replace(run, sequences_per_step=NODES * run.sequences_per_step, inner=inner)
    return with_held_out(larger, held_out_of(run))


def _of_one(data_dir: Path, run: RunParameters, genesis: Path, rows: Tensor) -> Losses:
    keep_own_run(data_dir, run)
    with running_node(data_dir, ["--genesis", str(genesis), "--no-network"]) as node:
        (losses,) = _at_marks([node], rows)
        return losses


def _of_several(folder: Path, run: RunParameters, rows: Tensor) -> tuple[Sequence[Losses], list[dict[str, Any]]]:
    """The losses of each node, and the records of the first node's rounds, oldest first."""
    with _swarm(folder, run) as nodes:
        rounds = dict[int, dict[str, Any]]()
        losses = _at_marks(nodes, rows, rounds)
        return losses, [rounds[step] for step in sorted(rounds)]


@contextmanager
def _swarm(folder: Path, run: RunParameters) -> Generator[Sequence[NodeProcess]]:
    """Nodes that start at about the same time; the others know the address of the first one."""
    with staged_swarm(folder, run, folder / "genesis", has_owner=True) as swarm:
        yield [swarm.start(number).node if number == 0 else swarm.launch(number) for number in range(NODES)]


def _at_marks(
    nodes: Sequence[NodeProcess], rows: Tensor, rounds: dict[int, dict[str, Any]] | None = None
) -> Sequence[Losses]:
    """Losses of each node when it has passed each mark; `rounds` gets the first node's rounds. Raises TimeoutError."""
    found = [dict[int, float]() for _ in nodes]
    began = time.monotonic()
    while time.monotonic() - began < LONGEST_SECONDS:
        with suppress(httpx.HTTPError):  # a node that starts or is busy answers next time
            for node, losses in zip(nodes, found, strict=True):
                steps = int(node.get("/api/status")["training"]["steps"])
                for mark in MARKS:
                    if mark not in losses and steps >= mark:
                        losses[mark] = saved_loss(node, mark, rows)
            if rounds is not None:
                rounds.update({one["outer_step"]: one for one in _rounds(nodes[0])})
        if all(len(losses) == len(MARKS) for losses in found):
            return found
        time.sleep(POLL_SECONDS)
    raise TimeoutError(f"not all nodes reached step {max(MARKS)} within {LONGEST_SECONDS:.0f} s")


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
