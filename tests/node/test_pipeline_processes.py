"""A model in stages on ordinary processes: none holds it, and it is trained on when one falls silent or is killed."""

from __future__ import annotations

import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.node_process import NodeProcess
from neuroshard.pipeline.stage_client import StageClientOptions
from tests.worlds.processes import LONGEST_SECONDS, all_train_on, made, nodes_of, peers_of, steps_of, until

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

STAGES = 3
SILENT_SECONDS = 12.0  # longer than the time between two reports
RESUMED_SECONDS = StageClientOptions().timeout_seconds + 10  # after a line was cut without a word
STAGED = f"""
num_stages = {STAGES}
batch_size = 1
sequences_per_step = 4
inner_steps = 50
architecture = {{ depth = {STAGES}, sequence_length = 64 }}
"""


@pytest.mark.long
def test_nodes_train_a_model_that_none_of_them_holds_and_neither_silence_nor_a_kill_stops_them(
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
        drivers = [node for node in left if stage_of(node) == 0]
        assert drivers
        if sys.platform != "win32":  # processes cannot be stopped and continued there
            falls_silent_for_a_while(victim, drivers)
            all_train_on(nodes)
        victim.kill()
        all_train_on(left)
        assert all(node.get("/api/status")["training"]["held_out"] for node in drivers)


def falls_silent_for_a_while(victim: NodeProcess, drivers: Sequence[NodeProcess]) -> None:
    """Its system confirms all that is sent to it, and nothing comes back; the drivers that live do without it.

    Then it is heard again, and connected.
    """
    name, driver = victim.get("/api/status")["node_id"], drivers[0]
    victim.process.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    try:
        under_way = [steps_of(driver) + 1 for driver in drivers]
        until(
            "steps without the silent node",
            lambda: all(steps_of(one) > steps + 1 for one, steps in zip(drivers, under_way, strict=True)),
            RESUMED_SECONDS,
        )
        until("a silence longer than the time between two reports", lambda: time.monotonic() > began + SILENT_SECONDS)
        assert driver.get("/health")["status"] == "ok"
        assert driver.get("/api/status")["state"] == "training"
    finally:
        back = time.time()
        victim.process.send_signal(signal.SIGCONT)
    until("its report", lambda: peers_of(driver).get(name, {"last_seen": 0})["last_seen"] > back)
    until("its connection", lambda: peers_of(driver)[name]["connection"] is not None)
    until("its view", lambda: bool(peers_of(victim)))


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
