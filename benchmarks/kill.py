"""SIGKILL at a random moment, twenty times: what is lost, and had the status said so?"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import httpx

from benchmarks.node_process import NodeProcess, running_node, start_node
from benchmarks.record import Report, Row
from benchmarks.sizes import size

KILLS = size(20, 2)
SEED = 7
START_UP_SECONDS, LONGEST_SECONDS = size((10.0, 55.0), (1.0, 5.0))  # of a life, from the start of its process
START_UP_EVERY = 3  # so many lives end in their start-up: while data are built, a state is restored, a first step made


def measure() -> Report:
    """One demo data folder, killed and started again and again; checkpoints at their default pace."""
    random = Random(SEED)
    losses: list[_Loss] = []
    last: _Life | None = None
    deaths_before_training = 0
    with tempfile.TemporaryDirectory() as folder:
        for number in range(KILLS):
            longest = START_UP_SECONDS if number % START_UP_EVERY == 0 else LONGEST_SECONDS
            life = _live_and_die(start_node(Path(folder), [], demo=True), random.uniform(0, longest))
            if life is None:
                deaths_before_training += 1
                continue
            losses += [_Loss(last, _resumed_step(life.status))] if last is not None else []
            last = life
        with running_node(Path(folder), [], demo=True) as node:
            node.wait_for_steps(1)
            end_step = _resumed_step(node.get("/api/status"))
        losses += [_Loss(last, end_step)] if last is not None else []
    unreadable = sum(loss.is_unreadable for loss in losses)
    broken_promises = sum(loss.steps > loss.before.status["checkpoints"]["could_lose_steps"] for loss in losses)
    longest_loss = max((loss.seconds for loss in losses), default=0.0)
    too_much = sum(loss.seconds > loss.allowed_seconds for loss in losses)
    return Report(
        "kill",
        "SIGKILL at a random moment",
        (
            Row(f"starts after {KILLS} kills that found no readable state", str(unreadable), "0", unreadable == 0),
            Row("kills before the first step of a process", f"{deaths_before_training} of {KILLS}", "report", None),
            Row("most steps lost", str(max((loss.steps for loss in losses), default=0)), "report", None),
            Row(
                "most training time lost",
                f"{longest_loss:.1f} s",
                "report",
                None,
            ),
            Row("losses of more than 30 s, 10 steps and a write", str(too_much), "0", too_much == 0),
            Row("losses of more steps than the status had said", str(broken_promises), "0", broken_promises == 0),
            Row("step reached in the end, from one folder", str(end_step), "report", None),
        ),
    )


@dataclass(frozen=True)
class _Life:
    """What a process that trained said just before it was killed."""

    status: dict[str, Any]
    points: list[dict[str, Any]]  # of its curve, oldest first


@dataclass(frozen=True)
class _Loss:
    """A killed process, and the step that the next one which trained went on from."""

    before: _Life
    resumed_step: int | None

    @property
    def is_unreadable(self) -> bool:
        """Whether nothing was found where something had been saved."""
        return self.resumed_step is None and self.before.status["checkpoints"]["last_saved_step"] is not None

    @property
    def steps(self) -> int:
        """Steps that have to be made again."""
        return max(0, int(self.before.status["training"]["steps"]) - (self.resumed_step or 0))

    @property
    def seconds(self) -> float:
        """What they took, by the times at which they were made."""
        lost = [point["time"] for point in self.before.points if point["step"] > (self.resumed_step or 0)]
        return lost[-1] - lost[0] + self._step_seconds if lost else 0.0

    @property
    def allowed_seconds(self) -> float:
        """30 s, 10 steps and one write."""
        return 30 + 10 * self._step_seconds + float(self.before.status["checkpoints"]["last_write_seconds"] or 0.0)

    @property
    def _step_seconds(self) -> float:
        return float(self.before.status["training"]["step_seconds"] or 0.0)  # null before the second step


def _live_and_die(node: NodeProcess, seconds: float) -> _Life | None:
    """Let a process live, ask it how it is, kill it; None when it had not made a step."""
    time.sleep(seconds)
    try:
        points, status = node.get("/api/training/history")["points"], node.get("/api/status")
    except httpx.HTTPError:  # it does not answer yet
        points, status = [], None
    node.kill()
    has_trained = status is not None and status["training"]["steps"] > (_resumed_step(status) or 0)
    return _Life(status, points) if status is not None and has_trained else None


def _resumed_step(status: dict[str, Any]) -> int | None:
    """The step that the start went on from; None when it found nothing readable."""
    restored = status["checkpoints"]["restored"]
    words = [] if restored is None else restored.replace(".", " ").split()
    return next((int(b) for a, b in pairwise(words) if a == "step" and b.isdigit()), None)
