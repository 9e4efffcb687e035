"""How long a user waits: --help, the first HTTP answer, the first training step of a first and a second demo."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from benchmarks.node_process import running_node
from benchmarks.record import Report, Row
from benchmarks.sizes import size

HELP_RUNS = size(9, 1)


def measure() -> Report:
    """Start-up times, each from the moment the process is made."""
    help_seconds = median(_help_seconds() for _ in range(HELP_RUNS))
    with tempfile.TemporaryDirectory() as folder:
        with running_node(Path(folder), [], demo=True, fresh=True) as node:
            first_answer = node.first_answer_seconds()
            first_step = node.wait_for_steps(1)
            node.post("/api/shutdown")
            node.process.wait(60)
        with running_node(Path(folder), [], demo=True, fresh=True) as node:
            second_answer = node.first_answer_seconds()
            done = node.get("/api/status")["training"]["steps"]
            second_step = node.wait_for_steps(done + 1)
            asked = time.perf_counter()
            code = node.stop()
            stop_seconds = time.perf_counter() - asked
    return Report(
        "start",
        "Start-up",
        (
            Row(f"`neuroshard --help`, median of {HELP_RUNS}", f"{help_seconds:.2f} s", "< 0.4 s", help_seconds < 0.4),
            Row("first HTTP answer, first demo", f"{first_answer:.2f} s", "< 1.5 s", first_answer < 1.5),
            Row("first HTTP answer, second demo", f"{second_answer:.2f} s", "< 1.5 s", second_answer < 1.5),
            Row("first training step, first demo", f"{first_step:.1f} s", "< 45 s", first_step < 45),
            Row("first training step, second demo", f"{second_step:.1f} s", "< 10 s", second_step < 10),
            Row(f"clean stop with final checkpoint (exit code {code})", f"{stop_seconds:.2f} s", "report", None),
        ),
    )


def _help_seconds() -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-m", "neuroshard", "--help"], check=True, capture_output=True)
    return time.perf_counter() - start
