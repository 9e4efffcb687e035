"""What a power cut may find: a version counts only when all of it is on the disk."""

from __future__ import annotations

import os
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest

from neuroshard.update.applying import StoppableNode, apply_update
from neuroshard.update.fetching import flush_to_disk
from neuroshard.update.installation import Installation
from neuroshard.update.release import Artefact, AvailableUpdate
from tests.worlds.file_servers import HostileServer
from tests.worlds.releases import archive_of, installed, program


class NoNode:
    """A computer on which no node runs, and every program comes up."""

    def running(self) -> StoppableNode | None:
        return None

    def stop(self, node: StoppableNode) -> None:
        raise AssertionError

    def start(self, program: Path, version: str, node: StoppableNode) -> None:
        raise AssertionError

    def prove(self, program: Path, version: str) -> None:
        pass

    def settle(self, program: Path, version: str, node: StoppableNode) -> str:
        raise AssertionError


@pytest.fixture
def update() -> Iterator[AvailableUpdate]:
    """Version 0.2.0, on a server."""
    archive = archive_of({"neuroshard": program("0.2.0"), "library/part": b"x" * 5000})
    with HostileServer({"n.tar.gz": archive}) as server:
        artefact = Artefact(f"{server.url}/n.tar.gz", len(archive), 10_000_000, sha256(archive).hexdigest())
        yield AvailableUpdate("0.2.0", "", artefact)


@pytest.mark.skipif(not hasattr(os, "sync"), reason="this system flushes file by file")
def test_all_files_are_on_the_disk_before_the_version_counts(
    update: AvailableUpdate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installation: Installation = installed(tmp_path / "program")
    folder = installation.folder("0.2.0")
    found: list[tuple[bool, bool]] = []
    monkeypatch.setattr(
        os, "sync", lambda: found.append(((folder / "library/part").exists(), installation.is_complete("0.2.0")))
    )
    apply_update(update, installation, NoNode())
    assert found == [(True, False)]
    assert installation.current() == "0.2.0"


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="nothing tells which file is flushed")
def test_where_the_system_flushes_no_disk_every_file_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sync")
    flushed: set[Path] = set()
    monkeypatch.setattr(os, "fsync", lambda number: flushed.add(Path(f"/proc/self/fd/{number}").readlink()))
    files = {tmp_path / "neuroshard", tmp_path / "library/part"}
    for file in files:
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(b"content")
    flush_to_disk(tmp_path)
    assert flushed == files
    assert all(file.read_bytes() == b"content" for file in files)
