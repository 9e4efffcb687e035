"""One run of `python -m neuroshard`, and what came of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LONGEST_SECONDS = 100.0


@dataclass(frozen=True)
class Outcome:
    """Exit code and everything printed."""

    code: int
    out: str
    err: str

    def json(self) -> Any:
        """What was printed for programs. Only JSON may stand on standard output then."""
        return json.loads(self.out)


@dataclass(frozen=True)
class Command:
    """Runs `neuroshard` with a home folder and variables of its own."""

    home: Path
    variables: dict[str, str] = field(default_factory=dict[str, str])

    def environment(self) -> dict[str, str]:
        """What the process sees; nothing of NeuroShard comes from outside."""
        seen = ("NEUROSHARD_", "XDG_", "DISPLAY", "WAYLAND_DISPLAY", "SSH_")  # no desktop: nobody could answer a page
        kept = {key: value for key, value in os.environ.items() if not key.startswith(seen)}
        fixed = {"HOME": str(self.home), "COLUMNS": "200", "NO_COLOR": "1", "NEUROSHARD_P2P_HOST": "127.0.0.1"}
        return kept | fixed | self.variables

    def arguments(self, *arguments: object) -> list[str]:
        """The command line of the process."""
        return [sys.executable, "-m", "neuroshard", *map(str, arguments)]

    def __call__(self, *arguments: object) -> Outcome:
        """Run to the end."""
        self.home.mkdir(exist_ok=True)
        ran = subprocess.run(
            self.arguments(*arguments),
            env=self.environment(),
            capture_output=True,
            timeout=LONGEST_SECONDS,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        return Outcome(ran.returncode, ran.stdout.decode(), ran.stderr.decode())

    def having(self, **variables: str) -> Command:
        """The same with more environment variables."""
        return Command(self.home, self.variables | variables)
