"""A data source that is not there, comes, goes and comes back, while a real node trains on it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.node_process import free_port, running_node
from neuroshard.dataset import GenesisServer

pytestmark = pytest.mark.process
SMALL = ["--memory", "500", "--cpu-threads", "1"]
WINDOWS_A_SHARD = 10  # of 512 tokens, in a shard of the small Genesis folder; one window is one step here


def test_an_unreachable_source_is_told_and_tried_again_until_it_answers(small_genesis: Path, tmp_path: Path) -> None:
    port = free_port()
    source = ["--genesis", f"http://127.0.0.1:{port}"]
    with running_node(tmp_path / "node", [*source, *SMALL]) as node:
        status = node.wait_for("wait", lambda status: status["state"] == "waiting_for_data")
        assert f"127.0.0.1:{port}" in status["state_reason"]
        assert "cannot be reached" in status["state_reason"]
        (download,) = status["data"]["downloads"]
        assert download["name"] == "manifest.json"
        assert -5 < download["retry_at"] - time.time() < 90
        assert node.get("/health")["status"] == "ok"
        log = (tmp_path / "node" / "logs" / "node.log").read_text()
        assert "WARNING neuroshard.data.fetcher: manifest.json: 127.0.0.1 cannot be reached" in log
        with GenesisServer(small_genesis, port=port):
            node.wait_for_steps(1)


def test_training_lives_on_what_was_fetched(small_genesis: Path, tmp_path: Path) -> None:
    """The source goes after the first shards, comes back until everything was fetched, and is needed no more."""
    server = GenesisServer(small_genesis)
    url = server.start()
    port = int(url.rsplit(":", 1)[1])
    with running_node(tmp_path / "node", ["--genesis", url, *SMALL]) as node:
        try:
            node.wait_for_steps(1)
        finally:
            server.stop()
        status = node.wait_for("wait", lambda status: status["state"] == "waiting_for_data")
        cached = status["data"]["cached_shards"]
        assert 2 <= cached < status["data"]["total_shards"]  # one of them is held out
        assert status["training"]["steps"] == (cached - 1) * WINDOWS_A_SHARD
        assert "Waiting for shard_" in status["data"]["explanation"]
        assert not status["training"]["skipped_steps"]
        with GenesisServer(small_genesis, port=port):
            node.wait_for("all shards", has_everything)
        seen = node.get("/api/status")["training"]["steps"]
        node.wait_for_steps(seen + 20)
        assert node.stop() == 0
    with running_node(tmp_path / "node", ["--genesis", url, *SMALL]) as node:
        restored = node.wait_for("restored step", lambda status: status["training"]["steps"] > 0)
        node.wait_for_steps(restored["training"]["steps"] + 20)
        assert node.get("/api/data")["data"]["verified"]


def has_everything(status: dict[str, Any]) -> bool:
    """Whether every shard of the source is in the cache."""
    return status["data"] is not None and status["data"]["cached_shards"] == status["data"]["total_shards"]
