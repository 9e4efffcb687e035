"""Start, stop, kill and start again, with real processes and signals."""

from __future__ import annotations

import signal
import socket
from collections.abc import Mapping
from pathlib import Path

import pytest

from benchmarks.node_process import running_node
from neuroshard.state.checkpoint_manifest import CheckpointMeta
from neuroshard.state.checkpoint_store import CheckpointStore, find_stage_folders

pytestmark = pytest.mark.process


def test_a_restart_goes_on_where_it_was_and_a_stop_saves_the_last_step(trained: Path, quick: list[str]) -> None:
    saved = newest_state(trained)
    with running_node(trained, [*quick, "--no-training"]) as node:
        status = node.wait_for("pause", lambda status: status["state"] == "paused")
        assert status["training"]["steps"] == saved.step
        assert status["training"]["tokens"] == saved.tokens
        assert status["diloco"]["inner_step"] == saved.inner_step
        assert saved.data_position is not None
        position = (saved.data_position.shard, saved.data_position.window)
        assert (status["data"]["shard"], status["data"]["shard_windows_done"]) == position
        assert f"Restored step {saved.step}." in status["checkpoints"]["restored"]
        assert "resume to train" in status["state_reason"]
        assert node.post("/api/training/resume")["state"] == "training"
        seen = node.wait_for("new steps", lambda status: status["training"]["steps"] > saved.step + 3)
        assert node.stop() == 0
    log = (trained / "logs" / "node.log").read_text().splitlines()
    assert "SIGTERM received" in log[-1]
    final = newest_state(trained).step
    assert final >= seen["training"]["steps"]
    assert f"checkpoint of step {final} was saved" in log[-2]


def test_a_kill_loses_no_more_than_the_status_said(
    trained: Path, quick: list[str], saving_often: Mapping[str, str]
) -> None:
    before = newest_state(trained).step
    with running_node(trained, quick, variables=saving_often) as node:
        status = node.wait_for("checkpoint", lambda status: (status["checkpoints"]["last_saved_step"] or 0) > before)
        node.kill()
    saved = newest_state(trained).step
    assert saved > before
    assert status["training"]["steps"] - saved <= status["checkpoints"]["could_lose_steps"]
    with running_node(trained, [*quick, "--no-training"]) as node:
        again = node.wait_for("pause", lambda status: status["state"] == "paused")
        assert again["training"]["steps"] == saved
        assert again["warnings"] == status["warnings"]


def test_a_second_signal_ends_at_once(tmp_path: Path, quick: list[str]) -> None:
    with running_node(tmp_path / "node", quick) as node:
        node.first_answer_seconds()
        node.process.send_signal(signal.SIGINT)
        node.process.send_signal(signal.SIGTERM)
        assert node.process.wait(5) == 128 + signal.SIGTERM


def test_a_node_that_waits_for_data_stops_well(tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound, not listening: connections are refused
        address = f"http://127.0.0.1:{closed.getsockname()[1]}"
        with running_node(tmp_path / "node", ["--genesis", address, "--memory", "500"]) as node:
            node.wait_for("wait", lambda status: status["state"] == "waiting_for_data")
            assert node.stop() == 0


def newest_state(data_dir: Path) -> CheckpointMeta:
    """What the newest checkpoint on disk says."""
    (folder,) = find_stage_folders(data_dir)
    store = CheckpointStore(folder)
    return store.read_manifest(Path(store.generations()[0].path)).meta
