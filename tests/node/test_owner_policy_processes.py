"""A real node that gives way to its owner, over the API and a restart."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import httpx
import pytest

from benchmarks.node_process import NodeProcess, running_node

pytestmark = pytest.mark.process


def test_a_pause_survives_a_kill_and_rules_hold_at_once(trained_folder: Path, quick: list[str], tmp_path: Path) -> None:
    folder = shutil.copytree(trained_folder, tmp_path / "node")
    with running_node(folder, quick) as node:
        node.wait_for("training", lambda status: status["state"] == "training")
        assert node.post("/api/training/pause", {"duration_seconds": 7200})["state"] == "paused"
        until = node.get("/api/status")["paused_until"]
        node.kill()
    with running_node(folder, quick) as node:
        paused = node.wait_for("pause", lambda status: status["state"] == "paused")
        assert paused["state_reason"] == "Paused by the user."
        assert abs(paused["paused_until"] - until) < 60
        assert paused["owner_policy"]["decision"]["rule"] == "user"
        change(node, {"training_schedule": [span_without_now()]})
        told = node.wait_for("rule", lambda _: "your rules" in node.post("/api/training/resume")["message"])
        assert told["state"] == "paused"
        held = node.wait_for(
            "its words", lambda status: status["owner_policy"]["decision"]["rule"] == "training_schedule"
        )
        assert "outside the training schedule" in held["state_reason"]
        assert held["paused_until"] == held["owner_policy"]["decision"]["until"] > time.time()
        metrics = httpx.get(f"{node.url}/metrics", headers=node.authorised(), trust_env=False).text
        assert 'neuroshard_training_allowed{action="pause"} 1.0' in metrics
        change(node, {"training_schedule": None, "cpu_percent": 50})
        slow = node.wait_for("throttled training", lambda status: status["state"] == "training")
        node.wait_for_steps(slow["training"]["steps"] + 3)
        throttled = node.wait_for("share", lambda status: status["owner_policy"]["decision"]["action"] == "throttle")
        assert throttled["owner_policy"]["decision"]["share"] == 0.5
        node.kill()
    assert not (folder / "pause.json").exists()


def change(node: NodeProcess, changes: dict[str, object]) -> None:
    secret = (node.data_dir / "api-secret").read_text(encoding="ascii").strip()
    headers = {"Authorization": f"Bearer {secret}"}
    answer = httpx.patch(f"{node.url}/api/config", json=changes, headers=headers, timeout=20, trust_env=False)
    assert set(answer.json()["details"]["at_once"]) == set(changes)


def span_without_now() -> str:
    """A minute at the other end of the week."""
    far = time.localtime(time.time() + 3.5 * 86_400)
    day = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")[far.tm_wday]
    return f"{day} {far.tm_hour:02d}:00-{far.tm_hour:02d}:01"
