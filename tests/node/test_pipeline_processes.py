"""A model in stages on ordinary processes: none of them holds it, and it is trained on when one is killed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from swarm_of_processes import LONGEST_SECONDS, all_train_on, made, nodes_of, until

from benchmarks.node_process import NodeProcess

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

STAGES = 3
STAGED = f"""
num_stages = {STAGES}
batch_size = 1
sequences_per_step = 4
architecture = {{ depth = {STAGES}, sequence_length = 64 }}
"""


def test_nodes_train_a_model_that_none_of_them_holds_and_a_kill_does_not_stop_them(
    small_genesis: Path, quick: list[str], tmp_path: Path
) -> None:
    run = made(STAGED, small_genesis, tmp_path)
    with nodes_of(run, [*quick, "--max-stages", "1"], tmp_path) as start:
        first = start(0)
        address = first.wait_for("address", lambda status: bool(status["network"]["addresses"]), LONGEST_SECONDS)
        there = address["network"]["addresses"][0]
        alone = first.wait_for(
            "missing layers", lambda status: status["state"] == "waiting_for_stages", LONGEST_SECONDS
        )
        assert "missing" in alone["state_reason"]
        assert alone["training"]["steps"] == 0
        nodes = [first, *(start(number, there) for number in range(1, STAGES + 1))]
        for node in nodes:
            node.first_answer_seconds()
        until("steps in every stage", lambda: all(steps > 0 for steps in steps_by_stage(nodes).values()))
        assert sorted(steps_by_stage(nodes)) == list(range(STAGES))
        all_train_on(nodes)
        doubled = Counter(map(stage_of, nodes)).most_common(1)[0][0]
        victim = next(node for node in nodes if stage_of(node) == doubled)
        left = [node for node in nodes if node is not victim]
        victim.kill()
        all_train_on(left)
        drivers = [node for node in left if stage_of(node) == 0]
        assert drivers
        assert all(node.get("/api/status")["training"]["held_out"] for node in drivers)


def stage_of(node: NodeProcess) -> int:
    layers: dict[str, Any] | None = node.get("/api/status")["layers"]
    return -1 if layers is None else int(layers["start"])


def steps_by_stage(nodes: Sequence[NodeProcess]) -> dict[int, int]:
    """The most steps that a node of each stage has made."""
    steps: dict[int, int] = {}
    for node in nodes:
        status = node.get("/api/status")
        stage = -1 if status["layers"] is None else int(status["layers"]["start"])
        steps[stage] = max(steps.get(stage, 0), int(status["training"]["steps"]))
    return steps
