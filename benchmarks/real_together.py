"""Do real nodes of one demo learn more together than one of them alone, at the same number of own steps?"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any

import httpx

from benchmarks.node_process import NodeProcess, running_node
from benchmarks.record import Report, Row, load_average
from benchmarks.sizes import size
from neuroshard.config.instance_lock import read_lock_owner

NODES = size(3, 2)
MARKS = size((50, 100, 150), (2,))  # own steps
SMOOTHED = size(10, 1)  # the losses of so many last steps are averaged
POLL_SECONDS = 2.0
LONGEST_SECONDS = 3_600.0


def measure() -> Report:
    """The demo alone, then with several nodes."""
    alone, _ = losses(1)
    together, rounds = losses(NODES)
    rows = list[Row]()
    for mark in MARKS:
        one, several = alone[0][mark], [node[mark] for node in together]
        rows.append(Row(f"loss at own step {mark}: one node alone", f"{one:.3f}", "report", None))
        figure = f"{fmean(several):.3f} ({', '.join(f'{loss:.3f}' for loss in several)})"
        rows.append(Row(f"loss at own step {mark}: {NODES} nodes", figure, f"< {one:.3f}", fmean(several) < one))
    rows += round_rows(rounds)
    note = (
        f"Training loss in nats per token, mean of {SMOOTHED} steps up to the named one, from /api/training/history of "
        f"each node. All nodes share this computer; {load_average()} programs wanted a core at the end."
    )
    return Report("real_together", "Real nodes against one of them", tuple(rows), (note,))


def losses(nodes: int, arguments: Sequence[str] = ()) -> tuple[list[dict[int, float]], list[dict[str, Any]]]:
    """Loss of each node at each mark, and the records of the first node's rounds, oldest first."""
    with tempfile.TemporaryDirectory() as name:
        options = [*arguments, *(["--nodes", str(nodes)] if nodes > 1 else [])]
        with running_node(Path(name), options, demo=True) as first:
            first.wait_for_steps(1, 900.0)
            rounds, found, began = dict[int, dict[str, Any]](), dict[int, dict[int, float]](), time.monotonic()
            while min((len(found.get(number, {})) for number in range(nodes)), default=0) < len(MARKS):
                if time.monotonic() - began > LONGEST_SECONDS:
                    raise TimeoutError(f"not all nodes reached step {max(MARKS)}: {found}")
                for number in range(nodes):
                    node = first if number == 0 else _further(first.data_dir / f"node-{number + 1}", first)
                    with suppress(httpx.HTTPError):  # a further node starts later; one that is busy answers next time
                        found.setdefault(number, {}).update({} if node is None else _marks(node))
                        if nodes > 1 and number == 0:
                            rounds |= {one["outer_step"]: one for one in _rounds(first)}
                time.sleep(POLL_SECONDS)
        return [found[number] for number in range(nodes)], [rounds[step] for step in sorted(rounds)]


def _further(folder: Path, first: NodeProcess) -> NodeProcess | None:
    """A node that the first one has started; None until it answers."""
    owner = read_lock_owner(folder) if folder.is_dir() else None
    if owner is None or owner.port is None:
        return None
    return NodeProcess(first.process, owner.port, folder, first.started)


def _marks(node: NodeProcess) -> Mapping[int, float]:
    """Smoothed loss at the marks that the node has passed. Steps that it inherited with a state count as its own."""
    points = node.get("/api/training/history")["points"]
    by_step = {int(point["step"]): float(point["loss"]) for point in points}
    found = dict[int, float]()
    for mark in MARKS:
        steps = [step for step in by_step if mark - SMOOTHED < step <= mark]
        if steps and max(by_step) >= mark:
            found[mark] = fmean(by_step[step] for step in steps)
    return found


def _rounds(node: NodeProcess) -> list[dict[str, Any]]:
    return [one for one in node.get("/api/rounds")["rounds"] if one["abandoned_for"] is None]


def round_rows(rounds: Sequence[Mapping[str, Any]]) -> list[Row]:
    """The number of rounds, and the seconds of their phases."""
    if not rounds:
        return [Row("rounds", "0", "> 0", met=False)]
    phases = [one["phases"] for one in rounds]
    names = ("gather", "exchange", "vote")
    seconds = ", ".join(f"{name} {fmean(phase[name] for phase in phases):.2f} s" for name in names)
    return [Row("rounds; mean seconds of their phases", f"{len(rounds)}; {seconds}", "report", None)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=NODES)
    parser.add_argument("--inner-steps", type=int)
    given = parser.parse_args()
    wanted = [] if given.inner_steps is None else ["--inner-steps", str(given.inner_steps)]
    reached, records = losses(given.nodes, wanted)
    for index, each in enumerate(reached):
        print(f"node {index + 1}: {', '.join(f'step {mark}: {loss:.3f}' for mark, loss in each.items())}")
    for row in round_rows(records) if given.nodes > 1 else ():
        print(f"{row.item}: {row.figure}")
    for record in records:
        print(record["outer_step"], record["phases"], len(record["members"]), record["ended_at"])
