"""What a CPU-bound program keeps of its speed while a node trains beside it."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from benchmarks.node_process import NodeProcess, running_node
from benchmarks.paused import cpu_seconds
from benchmarks.record import Report, Row, mean_with_interval
from benchmarks.sizes import size

SECONDS = size(4.0, 0.1)
ROUNDS = size(6, 1)
GOAL = 0.95
HALF = 50
# Counts how often it multiplies two small matrices by hand until its time is over: nothing but the processor is used.
PROGRAM = """
import sys, time
def work(size=24):
    left = [[i * j % 7 for j in range(size)] for i in range(size)]
    return [[sum(a * b for a, b in zip(row, column)) for column in zip(*left)] for row in left]
print("ready", flush=True)
sys.stdin.readline()
began = time.process_time()
done, end = 0, time.perf_counter() + float(sys.argv[1])
while time.perf_counter() < end:
    work()
    done += 1
print(done, time.process_time() - began)
"""


@dataclass(frozen=True, eq=False)
class Beside:
    """One way to train beside a program."""

    name: str
    goal: float | None
    settings: Mapping[str, object]


WAYS = (
    Beside("as it is by default", GOAL, {"cpu_percent": 100}),
    Beside(f"cpu_percent = {HALF}", GOAL, {"cpu_percent": HALF}),
    Beside("cpu_percent = 10", GOAL, {"cpu_percent": 10}),
)


def measure() -> Report:
    """For one program, and for one on each core: work done beside the node over work done alone, in turns."""
    cores = len(os.sched_getaffinity(0))
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder, running_node(Path(folder), [], demo=True) as node:
        node.wait_for_steps(1)
        for programs in sorted({1, cores}):
            shares = {way: list[float]() for way in WAYS}
            times = {way: list[float]() for way in WAYS}
            for _ in range(ROUNDS):
                with stopped(node):
                    alone = work_done(programs, node)
                for way in WAYS:
                    change(node, way.settings)
                    work = work_done(programs, node)
                    shares[way].append(work.done / alone.done)
                    times[way].append(work.kept_of(alone))
            rows += [row(programs, way, shares[way]) for way in WAYS]
            if programs == cores:
                rows += [row(programs, way, times[way], ", by processor time") for way in WAYS]
        threads = node.get("/api/status")["resources"]["cpu_threads_limit"]
    note = (
        f"A pure Python program, alone (the node stopped) and beside `neuroshard demo` with {threads} threads "
        f"on {cores} cores, {ROUNDS} times {SECONDS:.0f} s each, in turns; also {cores} such programs at once. "
        "By processor time: the programs' part of the time that they and the node computed, times what they did in a "
        "second of it, compared with the programs alone. Other programs of the computer change it less."
    )
    return Report("foreground", "A foreground program beside training", tuple(rows), (note,))


def row(programs: int, way: Beside, shares: list[float], measure: str = "") -> Row:
    """The mean share of its speed that the program keeps."""
    mean, width = mean_with_interval(shares)
    item = f"{'one program' if programs == 1 else f'{programs} programs, one a core'}, training {way.name}{measure}"
    figure = f"{mean:.1%} ± {width:.1%} of its speed alone (median {statistics.median(shares):.1%})"
    return Row(
        item,
        figure,
        "report" if way.goal is None else f">= {way.goal:.0%}",
        None if way.goal is None else mean >= way.goal,
    )


@dataclass(frozen=True)
class Work:
    """What programs did, the processor time that they took, and that of the node meanwhile, in seconds."""

    done: int
    seconds: float
    node_seconds: float

    def kept_of(self, alone: Work) -> float:
        """The part of their speed alone that the programs keep if they and the node are all that computes."""
        part = self.seconds / (self.seconds + self.node_seconds)
        return part * (self.done / self.seconds) / (alone.done / alone.seconds)


def work_done(programs: int, node: NodeProcess) -> Work:
    """By programs that run at the same time beside a node."""
    command, process = [sys.executable, "-c", PROGRAM, str(SECONDS)], psutil.Process(node.process.pid)
    pipe = subprocess.PIPE
    running = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for _ in range(programs)]
    for program in running:
        assert program.stdout is not None
        program.stdout.readline()
    before = cpu_seconds(process)
    for program in running:
        assert program.stdin is not None
        program.stdin.write("\n")
        program.stdin.flush()
    done = [program.stdout.readline().split() for program in running if program.stdout is not None]
    node_seconds = cpu_seconds(process) - before
    for program in running:
        program.communicate()
    return Work(sum(int(count) for count, _ in done), sum(float(seconds) for _, seconds in done), node_seconds)


@contextmanager
def stopped(node: NodeProcess) -> Iterator[None]:
    """The node gets no processor time within the block."""
    node.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        node.process.send_signal(signal.SIGCONT)


def change(node: NodeProcess, settings: Mapping[str, object]) -> None:
    """Let settings hold, and wait until they do."""
    secret = (node.data_dir / "api-secret").read_text(encoding="ascii").strip()
    headers = {"Authorization": f"Bearer {secret}"}
    httpx.patch(f"{node.url}/api/config", json=settings, headers=headers, trust_env=False).raise_for_status()
    share = float(str(settings["cpu_percent"])) / 100
    node.wait_for("share", lambda status: status["owner_policy"]["decision"]["share"] == share)
