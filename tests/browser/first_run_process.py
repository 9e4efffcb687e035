"""`neuroshard` without a token at a desktop: the browser that it opens is a script that writes the address down."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from benchmarks.node_process import free_port

PATIENCE_SECONDS = 60.0


@dataclass
class FirstRun:
    """A desktop with a home folder of its own, on which the program is started."""

    home: Path
    port: int = field(default_factory=free_port)
    variables: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def data_dir(self) -> Path:
        """Where starts look first."""
        return self.home / ".local" / "share" / "neuroshard"

    @property
    def opened(self) -> Path:
        """The addresses that were opened, one a line."""
        return self.home / "opened"

    def environment(self) -> dict[str, str]:
        """What the process sees."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("NEUROSHARD_", "XDG_"))}
        return (
            kept
            | {
                "HOME": str(self.home),
                "DISPLAY": ":99",
                "BROWSER": str(self._browser()),
                "NEUROSHARD_P2P_HOST": "127.0.0.1",
                "NEUROSHARD_PORT": str(self.port),
            }
            | self.variables
        )

    def start(self, *arguments: object) -> subprocess.Popen[str]:
        """Start it as a click on its icon does."""
        return subprocess.Popen(
            [sys.executable, "-m", "neuroshard", *map(str, arguments)],
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def addresses(self) -> list[str]:
        """What was opened so far."""
        return self.opened.read_text(encoding="utf-8").splitlines() if self.opened.exists() else []

    def wait_for_page(self, count: int = 1) -> str:
        """The newest address once so many were opened, as a browser without a desktop's names reaches it."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while len(self.addresses()) < count:
            assert time.monotonic() < deadline, "no page was opened"
            time.sleep(0.02)
        parts = urlsplit(self.addresses()[-1])
        return parts._replace(netloc=f"127.0.0.1:{parts.port}").geturl()

    def health(self) -> str:
        """What answers at the port: `setup`, `ok`, or nothing."""
        try:
            return str(httpx.get(f"http://127.0.0.1:{self.port}/health", timeout=30, trust_env=False).json()["status"])
        except httpx.ConnectError:
            return ""

    def _browser(self) -> Path:
        script = self.home / "browser"
        if not script.exists():
            self.home.mkdir(parents=True, exist_ok=True)
            script.write_text(f'#!/bin/sh\nprintf "%s\\n" "$1" >> "{self.opened}"\n', encoding="utf-8")
            script.chmod(0o755)
        return script


@contextmanager
def started(desktop: FirstRun, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """A start that is gone when the block ends."""
    process = desktop.start(*arguments)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if process.stdout is not None:
            process.stdout.close()


def listing(folder: Path) -> Mapping[str, str]:
    """Every file below a folder with its mode."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {path.relative_to(folder).as_posix(): oct(path.stat().st_mode & 0o777) for path in files}
