"""The archive for Linux around a made program, its scripts run in a made home folder, and a node of it."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from neuroshard.config.instance_lock import read_lock_owner

BUILD = Path(__file__).parents[2] / "installers/build_tarball.py"


def unpacked_archive(place: Path, content: bytes) -> Path:
    """What a user unpacks, below the new folder `place`; `content` is the whole program."""
    folder = place / "neuroshard"
    folder.mkdir(parents=True)
    (folder / "neuroshard").write_bytes(content)
    (folder / "neuroshard").chmod(0o755)
    command = [sys.executable, str(BUILD), "--program", str(folder), "--out", str(place)]
    archives = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    with tarfile.open(archives[0]) as archive:
        # the archive is our own; the filter, which later versions ask for, came with Python 3.11.4
        archive.extractall(place / "unpacked", **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    with tarfile.open(archives[1]) as update:
        assert update.getnames() == ["neuroshard"]
    return next((place / "unpacked").iterdir())


@contextmanager
def running(launcher: Path, data: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A node that answers."""
    with subprocess.Popen([str(launcher), "run", "--data-dir", str(data)]) as node:
        try:
            until(lambda: data.exists() and (owner := read_lock_owner(data)) is not None and owner.port is not None)
            yield node
        finally:
            node.kill()


def script(path: Path, home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a script of the installers as the owner of a home folder, with nobody to answer its questions."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("NEUROSHARD_", "XDG_", "SUDO_"))}
    return subprocess.run(
        ["sh", str(path), *arguments],
        env={**kept, "HOME": str(home)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )


def until(holds: Callable[[], bool], seconds: float = 30) -> None:
    """Wait until it holds; fail when it never does."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)
