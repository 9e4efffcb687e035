"""Limits of the computer: memory that may not be exceeded, a disk that is full."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any

import pytest

from benchmarks.node_process import NodeProcess, running_node

pytestmark = pytest.mark.process


# Other limits every day; a failure says which day it was, and NEUROSHARD_TEST_SEED repeats it.
SEED = int(os.environ.get("NEUROSHARD_TEST_SEED") or datetime.now(UTC).toordinal())


@pytest.mark.parametrize(("least_mb", "most_mb"), [(500, 900), pytest.param(900, 2500, marks=pytest.mark.long)])
def test_memory_stays_below_the_limit(tmp_path: Path, small_genesis: Path, least_mb: int, most_mb: int) -> None:
    """Through inner steps, an outer step, a checkpoint and a completion: the peak that the kernel saw."""
    limit_mb = Random(SEED + least_mb).randint(least_mb, most_mb)
    sys.stdout.write(f"NEUROSHARD_TEST_SEED={SEED}: a limit of {limit_mb} MB\n")
    if not Path("/proc/self/status").exists():
        pytest.skip("this system does not keep the peak in /proc")
    flags = ["--genesis", str(small_genesis), "--inner-steps", "3", "--memory", str(limit_mb)]
    with running_node(tmp_path / "node", flags, fresh=True) as node:
        status = node.wait_for("outer step", lambda status: status["diloco"]["outer_steps"] >= 1)
        assert "saved" in node.post("/api/checkpoints")["message"]
        answer = node.post("/v1/completions", {"prompt": "The", "max_tokens": 16})
        if answer["choices"][0]["finish_reason"] != "stop":  # a model of a few steps may well draw the end of a text
            assert answer["usage"]["completion_tokens"] == 16
        steps = status["training"]["steps"] + 2
        status = node.wait_for("steps", lambda status: status["training"]["steps"] >= steps)
        peak = peak_bytes(node)
        assert peak <= limit_mb * 1_000_000
        assert (status["memory"]["limit_mb"], status["memory"]["limit_source"]) == (limit_mb, "--memory")
        assert status["memory"]["peak_mb"] <= peak / 1_000_000 <= status["memory"]["limit_mb"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of its own, a little larger than what a node always leaves free; needs the right to mount."""
    if sys.platform != "linux":
        pytest.skip("only Linux has a file system in memory that can be mounted for a test")
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=240m,mode=700", "tmpfs", str(place)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no disk of its own can be mounted here: {error}")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def test_a_full_disk_stops_checkpoints_but_not_training(
    small_disk: Path, quick: list[str], saving_often: Mapping[str, str]
) -> None:
    with running_node(small_disk / "node", quick, variables=saving_often) as node:
        node.wait_for("checkpoint and all shards", has_all_it_needs)
        filler = fill(small_disk)
        full = node.wait_for("alarm", lambda status: status["checkpoints"]["alarm"] is not None)
        alarm = full["checkpoints"]["alarm"]
        assert "training continues, and older checkpoints are kept" in alarm
        assert str(small_disk) in alarm
        assert full["checkpoints"]["generations"]
        later = node.wait_for("steps", lambda status: status["training"]["steps"] > full["training"]["steps"] + 20)
        assert later["state"] == "training"
        assert later["checkpoints"]["last_saved_step"] == full["checkpoints"]["last_saved_step"]
        assert later["checkpoints"]["could_lose_steps"] >= later["training"]["steps"] - full["training"]["steps"]
        assert node.get("/health")["status"] == "ok"
        filler.unlink()
        well = node.wait_for("end of the alarm", lambda status: status["checkpoints"]["alarm"] is None)
        assert well["checkpoints"]["last_saved_step"] > later["checkpoints"]["last_saved_step"]
        fill(small_disk)
        assert node.stop() == 5  # the final checkpoint is not there, so a script must not believe that all is well


def has_all_it_needs(status: dict[str, Any]) -> bool:
    """Whether there is a checkpoint, and nothing left to fetch."""
    data = status["data"]
    has_shards = data is not None and data["cached_shards"] == data["total_shards"]
    return has_shards and status["checkpoints"]["last_saved_step"] is not None


def fill(disk: Path) -> Path:
    """A file that takes all the space there is."""
    filler = disk / "filler"
    with filler.open("wb") as file:
        for _ in range(100):
            free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
            size = os.fstat(file.fileno()).st_size
            with suppress(OSError):  # the node may have taken some of it meanwhile
                os.posix_fallocate(file.fileno(), size, max(free // 2, 1))
    return filler


def peak_bytes(node: NodeProcess) -> int:
    """Highest resident memory of the process so far, as the kernel counts it."""
    lines = Path(f"/proc/{node.process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
