"""A model in stages on ordinary processes: each answers prompts, and after a stop they go on from disk in any order."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks.node_process import NodeProcess
from neuroshard.state.checkpoint_catalogue import choose, saved_stages
from neuroshard.state.checkpoint_store import search_stage_folders
from tests.worlds.processes import LONGEST_SECONDS, all_train_on, made, neuroshard, nodes_of

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

STAGES = 2
STAGED = f"""
num_stages = {STAGES}
batch_size = 1
sequences_per_step = 2
architecture = {{ depth = {STAGES}, sequence_length = 64 }}
"""


def test_nodes_of_a_pipeline_answer_prompts_and_go_on_from_disk_in_any_order(
    small_genesis: Path, quick: list[str], tmp_path: Path
) -> None:
    run = made(STAGED, small_genesis, tmp_path)
    with nodes_of(run, [*quick, "--max-stages", "1"], tmp_path) as start:
        nodes = {0: start(0)}
        nodes[1] = start(1, address_of(nodes[0]))
        for node in nodes.values():
            node.wait_for_steps(3, LONGEST_SECONDS)
        before = {number: stage_of(node) for number, node in nodes.items()}
        assert sorted(before.values()) == [0, 1]
        for node in nodes.values():
            assert_answers(node)

        for node in nodes.values():
            node.process.terminate()
        assert [node.process.wait(LONGEST_SECONDS) for node in nodes.values()] == [0, 0]
        stages = choose(saved_stages(search_stage_folders(tmp_path))).require_whole()
        saved = [stage.generation.step for stage in stages]
        assert min(saved) >= 3
        exported = neuroshard("checkpoint", "export", "--from", tmp_path, "--out", tmp_path / "model")
        assert exported.code == 0, exported.err
        assert (tmp_path / "model" / "model.safetensors").is_file()

        nodes = {1: start(1)}  # the other one first this time
        nodes[0] = start(0, address_of(nodes[1]))
        for number, node in nodes.items():
            state = node.wait_for(
                "its old stage", lambda status: bool(status["checkpoints"]["restored"]), LONGEST_SECONDS
            )
            assert state["layers"]["start"] == before[number]
            assert state["checkpoints"]["restored"] == f"Restored step {saved[before[number]]}."
        all_train_on(list(nodes.values()))


def address_of(node: NodeProcess) -> str:
    status = node.wait_for("address", lambda status: bool(status["network"]["addresses"]), LONGEST_SECONDS)
    return str(status["network"]["addresses"][0])


def stage_of(node: NodeProcess) -> int:
    """The number of its stage, each of which is a layer; -1 while it has none."""
    layers: Mapping[str, Any] | None = node.get("/api/status")["layers"]
    return -1 if layers is None else int(layers["start"])


def assert_answers(node: NodeProcess) -> None:
    asked = {"model": "neuroshard", "prompt": "The list", "max_tokens": 5, "temperature": 0}
    answer = node.post("/v1/completions", asked)
    assert answer["usage"]["completion_tokens"] == 5 or answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["finish_reason"] in ("length", "stop")
