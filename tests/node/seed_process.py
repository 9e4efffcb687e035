"""A real `neuroshard seed` in its own process, on loopback."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector
from signal import SIGTERM, Signals

START_SECONDS = 60.0
# as `neuroshard`, and at the end it tells on standard error whether PyTorch was loaded
_PROGRAM = """
import atexit, sys
atexit.register(lambda: sys.stderr.write(f"torch: {'torch' in sys.modules}\\n"))
from neuroshard.cli.main import main
main()
"""


@dataclass
class SeedProcess:
    """A started seed and its first address."""

    process: subprocess.Popen[str]
    address: str = ""

    def end(self, number: Signals = SIGTERM) -> tuple[int, float, str]:
        """Send a signal and wait: exit code, seconds it took, and everything on standard error."""
        started = time.monotonic()
        self.process.send_signal(number)
        _, said = self.process.communicate(timeout=30)
        return self.process.returncode, time.monotonic() - started, said

    def kill(self) -> None:
        """SIGKILL: the power cut."""
        self.process.kill()
        self.process.communicate()


@contextmanager
def running_seed(data_dir: Path, arguments: Sequence[str] = (), *, port: int = 0) -> Iterator[SeedProcess]:
    """A seed that has told its address; it is gone when the block ends."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("NEUROSHARD_")}
    command = [sys.executable, "-c", _PROGRAM, "seed", "--p2p-host", "127.0.0.1", "--p2p-port", str(port)]
    process = subprocess.Popen(
        [*command, "--data-dir", str(data_dir), *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    seed = SeedProcess(process)
    try:
        seed.address = _first_line(process)
        yield seed
    finally:
        if process.returncode is None:
            seed.kill()


def _first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    with DefaultSelector() as selector:
        selector.register(process.stdout, EVENT_READ)
        if not selector.select(START_SECONDS):
            raise TimeoutError(f"the seed told no address within {START_SECONDS} s")
    line = process.stdout.readline().strip()
    if not line:
        raise RuntimeError(f"the seed ended with code {process.wait()}: {process.communicate()[1]}")
    return line
