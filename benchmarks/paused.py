"""What a node costs its computer while it is paused."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from benchmarks.node_process import NodeProcess, running_node
from benchmarks.record import Report, Row
from benchmarks.sizes import size

SETTLING_SECONDS = size(40.0, 0.5)  # of a pause, until its memory has been given back, within what may be written a day
SECONDS = size(60.0, 0.5)
PAUSES, WARM_UP_STEPS = size((5, 20), (1, 1))
MEGABYTE = 1e6
GOAL_MEGABYTES, GOAL_SHARE, GOAL_SECONDS = 80, 0.003, 1.0
# Everything that a node has imported when it trains, and nothing else.
IMPORTS = """
import sys, json, importlib
for name in json.load(open(sys.argv[1])):
    importlib.import_module(name)
print("done", flush=True)
sys.stdin.read()
"""
PACKAGES = (
    "neuroshard.cli.main",
    "neuroshard.cli.start",
    "neuroshard.node.launch",
    "neuroshard.node.application",
    "neuroshard.node.assembly",
    "neuroshard.api.server",
    "neuroshard.membership.network_opening",
)


def measure() -> Report:
    """Pause and resume some times, then look at the paused node for a while."""
    with tempfile.TemporaryDirectory() as folder, running_node(Path(folder), [], demo=True) as node:
        node.wait_for_steps(WARM_UP_STEPS)
        seconds = [pause_seconds(node) for _ in range(PAUSES)]
        node.post("/api/training/pause")
        time.sleep(SETTLING_SECONDS)
        process = psutil.Process(node.process.pid)
        before, woken = cpu_seconds(process), wake_ups(process.pid)
        time.sleep(SECONDS)
        share = (cpu_seconds(process) - before) / SECONDS
        wakes = added(woken, wake_ups(process.pid)) / SECONDS
        paused, code = resident(process), file_backed(process)
        parameters = node.get("/api/status")["model"]["parameter_count"]
        alone, alone_code = resident_of_imports(Path(folder))
    above = paused - alone
    kept, alone_kept = paused - code, alone - alone_code
    rows = (
        Row(
            "memory above the imports alone",
            f"{above:,.0f} MB ({paused:,.0f} MB resident, {alone:,.0f} MB of them imports)",
            f"<= {GOAL_MEGABYTES} MB",
            above <= GOAL_MEGABYTES,
        ),
        Row(
            "the same without pages of files, which the system can drop by itself",
            f"{kept - alone_kept:,.0f} MB ({kept:,.0f} MB resident, {alone_kept:,.0f} MB of them imports)",
            f"<= {GOAL_MEGABYTES} MB",
            kept - alone_kept <= GOAL_MEGABYTES,
        ),
        Row("CPU", f"{share:.2%} of a core", f"<= {GOAL_SHARE:.1%} of a core", share <= GOAL_SHARE),
        Row("wake-ups of all threads", f"{wakes:.1f} per second", "report", None),
        Row(
            "from POST /api/training/pause to its answer, when it is paused",
            f"median {statistics.median(seconds):.2f} s, worst {max(seconds):.2f} s of {PAUSES}",
            f"< {GOAL_SECONDS:.0f} s",
            max(seconds) < GOAL_SECONDS,
        ),
    )
    note = (
        f"`neuroshard demo` ({parameters / 1e6:,.1f}M parameters) on the CPU; memory and CPU {SETTLING_SECONDS:.0f} s "
        f"after the pause began, CPU over {SECONDS:.0f} s without a dashboard. The imports alone: a process that "
        "imports what a node imports, and does nothing."
    )
    return Report("paused", "A paused node", rows, (note,))


def pause_seconds(node: NodeProcess) -> float:
    """Of one pause in the middle of training."""
    node.post("/api/training/resume")
    node.wait_for_steps(node.get("/api/status")["training"]["steps"] + 3)
    began = time.perf_counter()
    assert node.post("/api/training/pause")["state"] == "paused"
    return time.perf_counter() - began


def cpu_seconds(process: psutil.Process) -> float:
    """Used since its start."""
    times = process.cpu_times()
    return times.user + times.system


def wake_ups(pid: int) -> dict[str, int]:
    """Number of times that each thread of a process gave up a core to wait, by thread, since it started. Linux only."""
    counts = dict[str, int]()
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        with suppress(OSError):  # the thread has ended
            (line,) = (line for line in status.read_text().splitlines() if line.startswith("voluntary_ctxt_switches"))
            counts[status.parent.name] = int(line.split()[1])
    return counts


def added(before: Mapping[str, int], after: Mapping[str, int]) -> int:
    """Sum of what the counts of threads have grown by. A thread that ended meanwhile is not counted."""
    return sum(count - before.get(thread, 0) for thread, count in after.items())


def resident(process: psutil.Process) -> float:
    """MB of 10**6 bytes."""
    return process.memory_info().rss / MEGABYTE


def file_backed(process: psutil.Process) -> float:
    """MB of 10**6 bytes of the resident memory that are pages of files. Linux only."""
    return process.memory_info().shared / MEGABYTE


def resident_of_imports(folder: Path) -> tuple[float, float]:
    """MB of a process that has only imported what a node imports, and how much of it are pages of files."""
    names = folder / "imports.json"
    names.write_text(json.dumps(PACKAGES))
    command = [sys.executable, "-c", IMPORTS, str(names)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        imports = psutil.Process(process.pid)
        megabytes = resident(imports), file_backed(imports)
        process.communicate()
    return megabytes
