"""A data folder that cannot be written any more while the node runs: read-only, or moved away; and then mended."""

from __future__ import annotations

import os
import shutil
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.node_process import NodeProcess, running_node

pytestmark = pytest.mark.process
# Rights of files hold for root as well without these two privileges.
WITHOUT_PRIVILEGES = ("setpriv", "--bounding-set", "-dac_override,-dac_read_search")
CONTINUES = "training continues, and older checkpoints are kept"


@contextmanager
def read_only(folder: Path) -> Generator[None]:
    """Nothing below a folder can be made, written or removed."""
    rights = {path: path.stat().st_mode for path in (folder, *folder.rglob("*"))}
    for path, mode in rights.items():
        path.chmod(mode & ~0o222)
    try:
        yield
    finally:
        for path, mode in rights.items():
            path.chmod(mode)


@contextmanager
def moved(folder: Path) -> Generator[None]:
    """A folder lies elsewhere meanwhile."""
    elsewhere = folder.with_name("elsewhere")
    folder.rename(elsewhere)
    try:
        yield
        assert not folder.exists()  # or the other one could not come back
    finally:
        elsewhere.rename(folder)


def has_begun(status: dict[str, Any]) -> bool:
    """Whether there is a checkpoint, and nothing left to fetch."""
    data = status["data"]
    has_shards = data is not None and data["cached_shards"] == data["total_shards"]
    return has_shards and status["checkpoints"]["last_saved_step"] is not None


def alarmed(node: NodeProcess, words: str) -> dict[str, Any]:
    """The status that says first what is wrong."""
    told = node.wait_for("alarm", lambda status: status["checkpoints"]["alarm"] is not None)
    assert words in told["checkpoints"]["alarm"]
    assert CONTINUES in told["checkpoints"]["alarm"]
    return told


def goes_on_with_an_alarm(node: NodeProcess, words: str) -> None:
    """It says what is wrong and trains on. No outer step completes meanwhile: a vote must be on the disk first."""
    told = alarmed(node, words)
    later = node.wait_for("steps", lambda status: status["training"]["steps"] > told["training"]["steps"] + 20)
    assert later["state"] == "training"
    assert later["checkpoints"]["last_saved_step"] == told["checkpoints"]["last_saved_step"]
    assert later["checkpoints"]["could_lose_steps"] >= 20


def saves_again(node: NodeProcess, before: dict[str, Any]) -> None:
    """The alarm is over, and what was trained meanwhile is on disk."""
    well = node.wait_for("end of the alarm", lambda status: status["checkpoints"]["alarm"] is None)
    assert well["checkpoints"]["last_saved_step"] >= before["training"]["steps"]


def check_restart(folder: Path, quick: list[str], least_steps: int) -> None:
    """A new start goes on with what was there last."""
    with running_node(folder, [*quick, "--no-training"]) as node:
        status = node.wait_for("pause", lambda status: status["state"] == "paused")
        assert status["training"]["steps"] >= least_steps
        assert status["warnings"] == []


def test_a_folder_that_becomes_read_only(tmp_path: Path, quick: list[str], saving_often: Mapping[str, str]) -> None:
    is_root = hasattr(os, "geteuid") and os.geteuid() == 0
    if os.name != "posix" or (is_root and shutil.which("setpriv") is None):
        pytest.skip("rights of files hold for nobody here")
    folder = tmp_path / "node"
    place = WITHOUT_PRIVILEGES if is_root else ()
    with running_node(folder, quick, variables=saving_often, place=place) as node:
        node.wait_for("checkpoint and all shards", has_begun)
        with read_only(folder):
            goes_on_with_an_alarm(node, "cannot be written: Permission denied")
            paused = node.post("/api/training/pause")
            assert paused["state"] == "paused"
            assert "Permission denied" in paused["message"]  # the next start would not know of it
            assert node.post("/api/training/resume")["state"] == "training"
            last = node.get("/api/status")
        saves_again(node, last)
        assert node.stop() == 0
    check_restart(folder, quick, last["training"]["steps"])


def test_a_folder_that_is_moved_away(tmp_path: Path, quick: list[str], saving_often: Mapping[str, str]) -> None:
    folder = tmp_path / "node"
    with running_node(folder, quick, variables=saving_often) as node:
        node.wait_for("checkpoint and all shards", has_begun)
        with moved(folder):
            alarmed(node, "no longer exists: restore it, or start the node with its new path")
            last = node.wait_for("wait", lambda status: status["state"] == "waiting_for_data")
            assert "no longer exists" in last["state_reason"]
        saves_again(node, last)
        with moved(folder):
            assert node.stop() == 5  # the final checkpoint is not there
    check_restart(folder, quick, last["training"]["steps"])
