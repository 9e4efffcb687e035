"""A trainer beside nodes that hold the stages, as ordinary processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.node_process import NodeProcess, running_node
from tests.worlds.processes import LONGEST_SECONDS, made, nodes_of, peers_of, until

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

STAGED = """
num_stages = 2
batch_size = 1
sequences_per_step = 4
wire_precision = "bf16"
routing = "balanced"
architecture = { depth = 2, sequence_length = 64 }
"""
TRAINER_TOKEN = {"NEUROSHARD_TOKEN": "77" * 32}


@pytest.mark.long
def test_a_trainer_drives_layers_that_it_does_not_hold_and_sends_nothing_twice(
    small_genesis: Path, quick: list[str], tmp_path: Path
) -> None:
    run = made(STAGED, small_genesis, tmp_path)
    with nodes_of(run, [*quick, "--max-stages", "1"], tmp_path) as start:
        first = start(0)
        address = first.wait_for("address", lambda status: bool(status["network"]["addresses"]), LONGEST_SECONDS)
        there = address["network"]["addresses"][0]
        joining = ["--genesis", str(small_genesis), "--invite", run.invitation, "--peer", there]
        with running_node(tmp_path / "trainer", joining, trainer=True, variables=TRAINER_TOKEN) as trainer:
            waiting = trainer.wait_for("missing layers", is_waiting, LONGEST_SECONDS)
            assert "missing" in waiting["state_reason"]
            second = start(1, there)
            trainer.wait_for_steps(2, LONGEST_SECONDS)
            status = trainer.get("/api/status")
            assert (status["roles"], status["layers"], status["checkpoints"]["generations"]) == (["driver"], None, [])
            me = status["node_id"]
            until("the others see it", lambda: peers_of(second).get(me, {}).get("roles") == ["driver"])
            assert peers_of(second)[me]["layers"] is None
            held_out = trainer.get("/api/training/verify")["held_out_loss"]
            assert held_out is not None
            trainer.kill()
        stored = position(tmp_path / "trainer")
        with running_node(tmp_path / "trainer", joining, trainer=True, variables=TRAINER_TOKEN) as trainer:
            trainer.wait_for_steps(1, LONGEST_SECONDS)
            assert position(tmp_path / "trainer") > stored
            steps = int(trainer.get("/api/status")["training"]["steps"])
            assert trainer.stop() == 0
        record = json.loads(the_file(tmp_path / "trainer", "record.json").read_text())
        assert record["progress"]["steps"] >= steps
        nobody_else_ended(first, second)


def is_waiting(status: dict[str, Any]) -> bool:
    return status["state"] == "waiting_for_stages"


def the_file(data_dir: Path, name: str) -> Path:
    (found,) = data_dir.glob(f"drives/*/*/{name}")
    return found


def position(data_dir: Path) -> tuple[int, int]:
    stored = json.loads(the_file(data_dir, "position.json").read_text())["position"]
    return stored["order"], stored["window"]


def nobody_else_ended(*nodes: NodeProcess) -> None:
    assert [node.process.poll() for node in nodes] == [None] * len(nodes)
