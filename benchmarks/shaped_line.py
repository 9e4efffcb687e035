"""Two network namespaces joined by an emulated line: rate, delay, loss. Needs root, `ip`, gcc and /dev/net/tun."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

DEFAULT_SOURCE = Path(__file__).resolve().parents[2] / "shared" / "tools" / "link_emulator.c"
NEAR_ADDRESS, FAR_ADDRESS = "10.77.0.1", "10.77.0.2"
QUEUE_MS = 100
READY_SECONDS = 10
NETWORK_NAMESPACE = 0x40000000  # CLONE_NEWNET


class NoLineError(Exception):
    """The line cannot be made here; says why."""


@dataclass(frozen=True)
class Line:
    """Names of the namespaces; what runs in `near` reaches FAR_ADDRESS."""

    near: str
    far: str

    def inside(self, name: str) -> list[str]:
        """What to put before a command to run it in a namespace."""
        return ["ip", "netns", "exec", name]

    def switch(self, *, is_on: bool) -> None:
        """Cut the line, or mend it. Raises NoLineError."""
        _run("ip", "-n", self.near, "link", "set", "emu0", "up" if is_on else "down")


def enter(name: str) -> None:
    """From now on the sockets that this thread opens are in a namespace. Raises OSError."""
    system = ctypes.CDLL(None, use_errno=True)
    with Path("/var/run/netns", name).open("rb") as namespace:
        if system.setns(namespace.fileno(), NETWORK_NAMESPACE):
            raise OSError(ctypes.get_errno(), f"the network namespace {name} cannot be entered")


def emulator_source() -> Path:
    """The emulator's C file: $BENCHMARK_LINK_EMULATOR, or a folder beside the repository."""
    return Path(os.environ.get("BENCHMARK_LINK_EMULATOR", DEFAULT_SOURCE))


@contextmanager
def shaped_line(mbit: float, rtt_ms: float, loss: float) -> Generator[Line]:
    """A line of this rate in both directions, half the round trip each way. Raises NoLineError."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        program = _compiled(folder)
        line = Line(f"near{os.getpid()}", f"far{os.getpid()}")
        for name in (line.near, line.far):
            _run("ip", "netns", "add", name)
            stack.callback(_run, "ip", "netns", "delete", name)
        arguments = (line.near, line.far, mbit, mbit, rtt_ms / 2, loss, QUEUE_MS)
        emulator = subprocess.Popen([str(program), *map(str, arguments)], stdout=subprocess.PIPE, text=True)
        stack.callback(_stop, emulator)
        assert emulator.stdout is not None
        if emulator.stdout.readline().strip() != "READY":
            raise NoLineError("the link emulator did not start")
        for name, address in ((line.near, NEAR_ADDRESS), (line.far, FAR_ADDRESS)):
            _run("ip", "-n", name, "address", "add", f"{address}/24", "dev", "emu0")
            _run("ip", "-n", name, "link", "set", "emu0", "mtu", "1500", "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")
        yield line


def _compiled(folder: Path) -> Path:
    source = emulator_source()
    if os.name != "posix" or os.geteuid() != 0:
        raise NoLineError("network namespaces need root")
    if not source.is_file():
        raise NoLineError(f"the link emulator {source} is not there (set BENCHMARK_LINK_EMULATOR)")
    for tool in ("ip", "gcc"):
        if shutil.which(tool) is None:
            raise NoLineError(f"the program {tool} is not installed")
    if not Path("/dev/net/tun").exists():
        raise NoLineError("there is no /dev/net/tun")
    program = folder / "link_emulator"
    _run("gcc", "-O2", "-o", str(program), str(source))
    return program


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoLineError(f"{' '.join(command)}: {done.stderr.strip()}")


def _stop(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=READY_SECONDS)
