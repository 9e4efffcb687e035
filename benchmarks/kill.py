"""SIGKILL at a random moment, twenty times: what is lost, and had the status said so?"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.node_process import NodeProcess, running_node, start_node
from benchmarks.record import Report, Row

KILLS = 20
SEED = 7
LIVE_SECONDS = (3.0, 45.0)  # after training has begun


def measure() -> Report:
    """One demo data folder, killed and started again and again; checkpoints at their default pace."""
    random = Random(SEED)
    losses: list[_Loss] = []
    with tempfile.TemporaryDirectory() as folder:
        node = start_node(Path(folder), [], demo=True)
        node.wait_for_steps(1)
        for _ in range(KILLS):
            before = _live_and_die(node, random.uniform(*LIVE_SECONDS))
            node = start_node(Path(folder), [], demo=True)
            node.wait_for_steps(1)
            losses.append(_Loss(before, _resumed_step(node)))
        node.stop()
        with running_node(Path(folder), [], demo=True) as last:
            last.wait_for_steps(1)
            end_step = _resumed_step(last)
    unreadable = sum(loss.resumed_step is None for loss in losses)
    broken_promises = sum(loss.steps > loss.before["checkpoints"]["could_lose_steps"] for loss in losses)
    too_much = sum(loss.seconds > loss.allowed_seconds for loss in losses)
    return Report(
        "kill",
        "SIGKILL at a random moment",
        (
            Row(f"starts after {KILLS} kills that found no readable state", str(unreadable), "0", unreadable == 0),
            Row("most steps lost", str(max(loss.steps for loss in losses)), "report", None),
            Row("most training time lost", f"{max(loss.seconds for loss in losses):.1f} s", "report", None),
            Row("losses of more than 30 s, 10 steps and a write", str(too_much), "0", too_much == 0),
            Row("losses of more steps than the status had said", str(broken_promises), "0", broken_promises == 0),
            Row("step reached in the end, from one folder", str(end_step), "report", None),
        ),
    )


@dataclass(frozen=True)
class _Loss:
    """The last status before a kill, and the step that the next start went on from."""

    before: dict[str, Any]
    resumed_step: int | None

    @property
    def steps(self) -> int:
        """Steps that have to be made again."""
        return max(0, int(self.before["training"]["steps"]) - (self.resumed_step or 0))

    @property
    def seconds(self) -> float:
        """What they took."""
        return self.steps * float(self.before["training"]["step_seconds"])

    @property
    def allowed_seconds(self) -> float:
        """30 s, 10 steps and one write."""
        write = float(self.before["checkpoints"]["last_write_seconds"])
        return 30 + 10 * float(self.before["training"]["step_seconds"]) + write


def _live_and_die(node: NodeProcess, seconds: float) -> dict[str, Any]:
    """Train on, look at the status, kill; the last status."""
    started = time.monotonic()
    status = node.get("/api/status")
    while time.monotonic() - started < seconds:
        status = node.get("/api/status")
        time.sleep(0.2)
    node.kill()
    return status


def _resumed_step(node: NodeProcess) -> int | None:
    """The step that the start went on from; None when it found nothing readable."""
    restored = node.get("/api/status")["checkpoints"]["restored"]
    words = [] if restored is None else restored.replace(".", " ").split()
    return next((int(b) for a, b in pairwise(words) if a == "step" and b.isdigit()), None)
