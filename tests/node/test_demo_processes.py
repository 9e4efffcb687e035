"""`neuroshard demo --nodes 3 --stages 3`, as delivered: one of its nodes is killed, and the others do its work too."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.node_process import NodeProcess, running_node
from tests.worlds.processes import LONGEST_SECONDS, until

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

STAGES = 3


@pytest.mark.long
def test_a_demo_in_three_stages_goes_on_when_one_of_its_nodes_is_killed(small_text: Path, tmp_path: Path) -> None:
    command = ["--nodes", "3", "--stages", str(STAGES), "--text", str(small_text), "--cpu-threads", "1"]
    with running_node(tmp_path, command, demo=True) as node:
        node.first_answer_seconds()
        until("a part of the model on every node, and a copy of each", lambda: is_spread(node))
        node.wait_for("training", lambda status: status["training"]["steps"] >= 5, LONGEST_SECONDS)
        assert node.get("/api/status")["network"]["join_line"] == ""  # nobody can join a demo
        further = psutil.Process(node.process.pid).children(recursive=True)
        assert len(further) == 2
        ((own, kept),) = own_steps(node).items()
        further[0].kill()
        until("a stage without holder", lambda: any(stage["is_missing"] for stage in stages_of(node)))
        until("a node that does its work too", lambda: is_whole(node))
        assert sorted(len(nodes) for nodes in holdings(node).values()) == [1, 2]
        assert own_steps(node)[own] >= kept  # of its own stage nothing is lost
        before = own_steps(node)
        until("further steps", lambda: all(own_steps(node)[stage] > steps + 3 for stage, steps in before.items()))
        assert node.stop() == 0
        _, alive = psutil.wait_procs(further, timeout=LONGEST_SECONDS)
        assert not alive


def stages_of(node: NodeProcess) -> Sequence[dict[str, Any]]:
    stages: Sequence[dict[str, Any]] = node.get("/api/pipeline")["stages"]
    return stages or [{"has_copy": False, "is_missing": False, "holders": []}]


def is_spread(node: NodeProcess) -> bool:
    return len(holdings(node)) == STAGES and all(stage["has_copy"] for stage in stages_of(node))


def is_whole(node: NodeProcess) -> bool:
    return not any(stage["is_missing"] for stage in stages_of(node))


def holdings(node: NodeProcess) -> dict[str, list[int]]:
    """The stages of every node."""
    held = dict[str, list[int]]()
    for stage in stages_of(node):
        for holder in stage["holders"]:
            held.setdefault(holder, []).append(stage["stage"])
    return held


def own_steps(node: NodeProcess) -> dict[int, int]:
    return {stage["stage"]: stage["steps"] for stage in node.get("/api/pipeline")["own_stages"]}
