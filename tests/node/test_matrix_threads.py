"""The threads of a real node that compute."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from benchmarks.node_process import running_node

THREADS = 2


def thread_seconds(pid: int) -> dict[int, tuple[float, int]]:
    """CPU seconds and niceness of each thread of a process (proc(5): fields 14, 15 and 19 of its stat)."""
    found: dict[int, tuple[float, int]] = {}
    for thread in Path(f"/proc/{pid}/task").iterdir():
        fields = (thread / "stat").read_text().rpartition(")")[2].split()
        found[int(thread.name)] = ((int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), int(fields[16]))
    return found


@pytest.mark.process
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the times of the threads from /proc")
def test_one_team_of_threads_computes(small_genesis: Path, tmp_path: Path) -> None:
    options = ["--genesis", str(small_genesis), "--memory", "1500", "--cpu-threads", str(THREADS)]
    with running_node(tmp_path / "node", options) as node:
        node.wait_for_steps(5)
        before = thread_seconds(node.process.pid)
        node.wait_for_steps(40)
        after = thread_seconds(node.process.pid)
    used = {thread: seconds - before.get(thread, (0.0, 0))[0] for thread, (seconds, _) in after.items()}
    busiest = sorted(used, key=lambda thread: -used[thread])[:THREADS]
    shares = [used[thread] / sum(used.values()) for thread in busiest]
    assert sum(shares) > 0.75  # a second team would take its part
    assert min(shares) > 0.25  # both compute
    assert len({after[thread][1] for thread in busiest}) == 1  # of one team: the others' niceness differs
