"""Settings of a running node: where they come from, how they change, what a restart makes of them."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.dashboards import Crowd, serving_and_training_cores
from benchmarks.node_process import TOKEN, NodeProcess, free_port, running_node

pytestmark = pytest.mark.process
ALLOWED_CORES = 1  # of a quick node


def test_flags_win_over_variables_and_those_over_the_file(tmp_path: Path, small_genesis: Path) -> None:
    """And a start without a port flag serves where NEUROSHARD_PORT says."""
    port = free_port()
    data_dir = tmp_path / "node"
    data_dir.mkdir()
    (data_dir / "config.toml").write_text("port = 1\nmemory = 1500\ninner_steps = 9\nmax_storage = 77\n")
    variables = {"NEUROSHARD_TOKEN": TOKEN, "NEUROSHARD_PORT": str(port), "NEUROSHARD_MEMORY": "1000"}
    variables["NEUROSHARD_P2P_HOST"] = "127.0.0.1"  # nothing leaves this computer
    kept = {key: value for key, value in os.environ.items() if not key.startswith("NEUROSHARD_")}
    command = [sys.executable, "-m", "neuroshard", "--headless", "--data-dir", str(data_dir), "--memory", "500"]
    process = subprocess.Popen(
        [*command, "--no-training", "--genesis", str(small_genesis)],
        env=kept | variables,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    node = NodeProcess(process, port, data_dir, time.perf_counter())
    try:
        node.first_answer_seconds()
        config = node.get("/api/config")
        assert settings(config, "port", "memory", "inner_steps", "max_storage", "training", "device") == {
            "port": (port, "environment"),
            "memory": (500, "flag"),
            "inner_steps": (9, "config.toml"),
            "max_storage": (77, "config.toml"),
            "training": (False, "flag"),
            "device": ("auto", "default"),
        }
        assert settings(config, "token") == {"token": ("(secret)", "environment")}
    finally:
        node.kill()


@pytest.fixture(scope="module")
def node(trained_folder: Path, quick: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    """A node that was started without training, for the tests below."""
    folder = shutil.copytree(trained_folder, tmp_path_factory.mktemp("resting") / "node")
    with running_node(folder, [*quick, "--no-training"]) as node:
        node.wait_for("pause", lambda status: status["state"] == "paused")
        yield node


def test_pause_and_resume_over_the_api(node: NodeProcess) -> None:
    before = node.get("/api/status")["training"]["steps"]
    assert node.post("/api/training/resume")["state"] == "training"
    node.wait_for_steps(before + 3)
    assert node.post("/api/training/pause", {"duration_seconds": 3600})["state"] == "paused"
    paused = node.wait_for("pause", lambda status: status["state"] == "paused")
    assert 3500 < paused["paused_until"] - time.time() < 3700
    saved = node.post("/api/checkpoints")
    assert saved["state"] == "paused"
    assert f"step {paused['training']['steps']} saved" in saved["message"]
    status = node.get("/api/status")
    assert (status["state"], status["training"]["steps"]) == ("paused", paused["training"]["steps"])
    assert node.post("/api/training/resume")["state"] == "training"
    node.wait_for("end of the pause", lambda status: status["paused_until"] is None)


def test_silent_connections_and_a_huge_body_stop_neither_training_nor_the_api(node: NodeProcess) -> None:
    assert node.post("/api/training/resume")["state"] == "training"
    secret = (node.data_dir / "api-secret").read_text(encoding="ascii").strip()
    head = f"POST /api/shutdown HTTP/1.1\r\nHost: localhost:{node.port}\r\nAuthorization: Bearer {secret}\r\n"
    with ExitStack() as stack:
        for number in range(500):
            link = stack.enter_context(socket.create_connection(("127.0.0.1", node.port), timeout=20))
            if number % 3 == 0:
                link.sendall(b"GET /health HT")  # and never the rest
        huge = stack.enter_context(socket.create_connection(("127.0.0.1", node.port), timeout=20))
        huge.sendall(head.encode() + b"Content-Type: application/json\r\nContent-Length: 104857600\r\n\r\n{")
        assert huge.recv(65_536).startswith(b"HTTP/1.1 413")
        before = node.get("/api/status")["training"]["steps"]
        node.wait_for_steps(before + 20, seconds=30)
        health = node.get("/health")
        assert (health["status"], health["state"]) == ("ok", "training")


def test_twenty_dashboards_and_twenty_requests_a_second_cost_little_beside_training(node: NodeProcess) -> None:
    """The benchmark `dashboards` measures a few per cent; a snapshot that is written out for each client costs more."""
    assert node.post("/api/training/resume")["state"] == "training"
    with Crowd(node) as crowd:
        serving, training = serving_and_training_cores(node, 3)
    assert len(crowd.latencies) > 10
    assert 0 < serving < 0.2 * max(training, ALLOWED_CORES)


def test_changed_settings_hold_now_or_after_a_restart(node: NodeProcess, quick: list[str]) -> None:
    """Last of this module: the node is stopped over the API and another one started in its folder."""
    answer = patch(node, {"max_storage": 55, "verbose": True, "memory": 900})
    assert answer.status_code == 202
    result = answer.json()
    assert result["details"]["at_once"] == ["max_storage"]
    assert result["details"]["after_restart"] == ["verbose", "memory"]
    assert result["details"]["overridden"] == {"memory": "flag"}
    assert "memory: stored, but the flag takes precedence." in result["message"]
    assert settings(node.get("/api/config"), "max_storage", "verbose", "memory") == {
        "max_storage": (55, "config.toml"),
        "verbose": (False, "default"),
        "memory": (500, "flag"),
    }
    node.wait_for("new limit", lambda status: status["data"]["cache_limit_bytes"] == 55_000_000)
    refused = patch(node, {"max_storage": 66, "prot": 1})
    assert refused.status_code == 422
    assert "prot" in refused.json()["detail"]
    assert "max_storage = 55" in (node.data_dir / "config.toml").read_text()
    assert node.post("/api/shutdown")["state"] == "stopping"
    assert node.process.wait(20) == 0
    with running_node(node.data_dir, [*quick, "--no-training"]) as again:
        again.first_answer_seconds()
        assert settings(again.get("/api/config"), "max_storage", "verbose") == {
            "max_storage": (55, "config.toml"),
            "verbose": (True, "config.toml"),
        }
        again.kill()


def settings(config: dict[str, Any], *keys: str) -> dict[str, tuple[Any, str]]:
    """Value and source of some settings."""
    return {key: (config[key]["value"], config[key]["source"]) for key in keys}


def patch(node: NodeProcess, changes: dict[str, object]) -> httpx.Response:
    """PATCH /api/config with the node's secret."""
    secret = (node.data_dir / "api-secret").read_text(encoding="ascii").strip()
    headers = {"Authorization": f"Bearer {secret}"}
    return httpx.patch(f"{node.url}/api/config", json=changes, headers=headers, timeout=20, trust_env=False)
