"""A real process of `neuroshard organise` on loopback."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector
from signal import SIGTERM, Signals

START_SECONDS = 60.0
# as `neuroshard`, and at the end it prints on standard error whether PyTorch was loaded
_PROGRAM = """
import atexit, sys
atexit.register(lambda: sys.stderr.write(f"torch: {'torch' in sys.modules}\\n"))
from neuroshard.cli.main import main
main()
"""


@dataclass
class OrganiserProcess:
    """A started organiser and its address."""

    process: subprocess.Popen[str]
    url: str = ""

    def end(self, number: Signals = SIGTERM) -> tuple[int, str]:
        """Send a signal and wait: exit code, and everything on standard error."""
        self.process.send_signal(number)
        _, said = self.process.communicate(timeout=30)
        return self.process.returncode, said

    def kill(self) -> None:
        """SIGKILL: the power cut."""
        self.process.kill()
        self.process.communicate()


@contextmanager
def running_organiser(
    data_dir: Path,
    run: Path,
    arguments: Sequence[str] = (),
    *,
    is_monitored: bool = False,
    variables: Mapping[str, str] | None = None,
) -> Iterator[OrganiserProcess]:
    """An organiser that answers; it is gone when the block ends. Without --listen it takes a free port.

    `variables` are added to its environment.
    """
    environment = {key: value for key, value in os.environ.items() if not key.startswith("NEUROSHARD_")}
    environment |= {"NEUROSHARD_P2P_HOST": "127.0.0.1", **(variables or {})}
    monitor = [] if is_monitored else ["--no-monitor"]
    command = [sys.executable, "-c", _PROGRAM, "organise", "--run", str(run), "--data-dir", str(data_dir)]
    listen = [] if "--listen" in arguments else ["--listen", "127.0.0.1:0"]
    process = subprocess.Popen(
        [*command, *listen, *monitor, *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    organiser = OrganiserProcess(process)
    try:
        organiser.url = _address(process)
        yield organiser
    finally:
        if process.returncode is None:
            organiser.kill()


def _address(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    with DefaultSelector() as selector:
        selector.register(process.stdout, EVENT_READ)
        if not selector.select(START_SECONDS):
            raise TimeoutError(f"the organiser printed no address within {START_SECONDS} s")
    line = process.stdout.readline().strip()
    if not line:
        raise RuntimeError(f"the organiser ended with code {process.wait()}: {process.communicate()[1]}")
    return line.rpartition(" ")[2]
