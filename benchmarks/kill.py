"""SIGKILL at a random moment, twenty times: what is lost, and had the status said so?"""

from __future__ import annotations

import tempfile
import time
from itertools import pairwise
from pathlib import Path
from random import Random

from benchmarks.node_process import NodeProcess, running_node, start_node
from benchmarks.record import Report, Row

KILLS = 20
SEED = 7
LIVE_SECONDS = (3.0, 20.0)  # after training has begun


def measure() -> Report:
    """One demo data folder, killed and started again and again; checkpoints at their default pace."""
    random = Random(SEED)
    lost_steps: list[int] = []
    lost_seconds: list[float] = []
    broken_promises = 0
    unreadable = 0
    with tempfile.TemporaryDirectory() as folder:
        node = start_node(Path(folder), [], demo=True)
        node.wait_for_steps(1)
        for _ in range(KILLS):
            steps, promised_steps, promised_seconds, trained = _live_and_die(node, random.uniform(*LIVE_SECONDS))
            node = start_node(Path(folder), [], demo=True)
            node.wait_for_steps(1)
            resumed = _resumed_step(node)
            unreadable += resumed is None
            lost = max(0, steps - (resumed or 0))
            lost_steps.append(lost)
            lost_seconds.append(min(trained, lost * _step_seconds(node)))
            broken_promises += lost > promised_steps or lost_seconds[-1] > promised_seconds + 1
        node.stop()
        with running_node(Path(folder), [], demo=True) as last:
            last.wait_for_steps(1)
            end_step = _resumed_step(last)
    return Report(
        "kill",
        "SIGKILL at a random moment",
        (
            Row(f"starts after {KILLS} kills that found no readable state", str(unreadable), "0", unreadable == 0),
            Row("most steps lost", str(max(lost_steps)), "report", None),
            Row("most training time lost", f"{max(lost_seconds):.1f} s", "<= 30 s + 10 steps + a write", None),
            Row("losses beyond what the status had said", str(broken_promises), "0", broken_promises == 0),
            Row("step reached in the end, from one folder", str(end_step), "report", None),
        ),
    )


def _live_and_die(node: NodeProcess, seconds: float) -> tuple[int, int, float, float]:
    """Train on, look at the status, kill: last seen step, what it said could be lost, and time trained."""
    started = time.monotonic()
    status = node.get("/api/status")
    while time.monotonic() - started < seconds:
        status = node.get("/api/status")
        time.sleep(0.2)
    node.kill()
    checkpoints = status["checkpoints"]
    trained = time.monotonic() - started
    steps = int(status["training"]["steps"])
    return steps, int(checkpoints["could_lose_steps"]), float(checkpoints["could_lose_seconds"]), trained


def _resumed_step(node: NodeProcess) -> int | None:
    """The step that the start went on from; None when it found nothing readable."""
    restored = node.get("/api/status")["checkpoints"]["restored"]
    words = [] if restored is None else restored.replace(".", " ").split()
    return next((int(b) for a, b in pairwise(words) if a == "step" and b.isdigit()), None)


def _step_seconds(node: NodeProcess) -> float:
    return float(node.get("/api/status")["training"]["step_seconds"])
