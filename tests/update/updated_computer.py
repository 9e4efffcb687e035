"""A computer with an installation and a publisher within reach, as the tests of updates use it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from neuroshard.config.instance_lock import read_lock_owner
from neuroshard.update.checking import platform_name
from neuroshard.update.installation import Installation
from tests.update.made_releases import DAY, ReleasePlace, archive_of, program

HERE = platform_name()
UPDATE_PROGRAM = Path(__file__).with_name("update_program.py")


@dataclass
class Computer:
    """One with an installation, a data folder, and a publisher within reach."""

    home: Path
    place: ReleasePlace
    installation: Installation

    @property
    def data(self) -> Path:
        return self.home / "data"

    def update(self, *arguments: str, dies_after: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
        """Run the command as the version that is installed, to its end."""
        process = self.begin_update(*arguments, dies_after=dies_after, **variables)
        out, err = process.communicate(timeout=100)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def begin_update(self, *arguments: str, dies_after: str = "", **variables: str) -> subprocess.Popen[str]:
        """Begin the command as the version that is installed."""
        version = self.installation.current()
        command = [sys.executable, str(UPDATE_PROGRAM), dies_after or "-", version, str(self.installation.root)]
        kept = {key: value for key, value in os.environ.items() if not key.startswith("NEUROSHARD_")}
        signal.signal(signal.SIGINT, signal.default_int_handler)  # else a shell's background jobs pass "ignored" on
        return subprocess.Popen(
            [*command, *arguments, "--data-dir", str(self.data)],
            env={**kept, **self.place.variables(), "HOME": str(self.home), **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            stdin=subprocess.DEVNULL,
        )

    def starts(self) -> list[str]:
        """What ran on the data folder so far."""
        return (self.data / "starts").read_text().splitlines()

    def working_version(self) -> str:
        """What a start gives now. The version must say so itself."""
        pointed = self.installation.program(self.installation.current())
        told = subprocess.run([str(pointed), "--version"], capture_output=True, text=True, check=True).stdout
        assert told.split()[1] == self.installation.current()
        return told.split()[1]

    @contextmanager
    def node(self, **variables: str) -> Iterator[None]:
        """A node of the current version; whatever runs on the folder afterwards is ended too."""
        start = [str(self.installation.program(self.installation.current())), "run", "--data-dir", str(self.data)]
        process = subprocess.Popen(start, env={**os.environ, "MARK": "kept", **variables})
        try:
            until(lambda: (owner := read_lock_owner(self.data)) is not None and owner.port is not None)
            yield
        finally:
            self.end_node()
            process.kill()
            process.wait()

    def end_node(self) -> None:
        owner = read_lock_owner(self.data) if self.data.exists() else None
        if owner is not None and owner.pid is not None:
            os.kill(owner.pid, 9)
            until(lambda: read_lock_owner(self.data) is None)


def until(holds: Callable[[], object], seconds: float = 30) -> None:
    """Wait until it holds; fail when it never does."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def publish(computer: Computer, version: str, content: bytes | None = None, **changes: object) -> None:
    """Put a version of the stand-in, or of another program, where the computer looks."""
    archive = archive_of({"neuroshard": content or program(version)}, padding=200_000)
    now = time.time()
    times = {"issued_at": now, "expires_at": now + DAY}
    computer.place.publish(version, archive, **{**times, **changes})  # type: ignore[arg-type]
