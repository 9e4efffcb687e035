"""Network namespaces joined by emulated lines: rate, delay, loss. Needs root, `ip`, gcc and /dev/net/tun."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

DEFAULT_SOURCE = Path(__file__).resolve().parents[2] / "shared" / "tools" / "link_emulator.c"
NEAR_ADDRESS, FAR_ADDRESS = "10.77.0.1", "10.77.0.2"
PUBLIC_ADDRESS = "203.0.113.1"
ROUTERS = "203.0.113.0/24"
FORWARD = "echo 1 > /proc/sys/net/ipv4/ip_forward"
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
        program = _compiled(stack, emulator_source())
        line = Line(*(_namespace(stack, name) for name in ("near", "far")))
        _emulate(stack, program, (line.near, line.far), (mbit, mbit, rtt_ms / 2, loss))
        for name, address in ((line.near, NEAR_ADDRESS), (line.far, FAR_ADDRESS)):
            _configure(name, "emu0", address)
        yield line


@dataclass(frozen=True)
class Home:
    """A namespace behind a line of its own, which reaches the other homes at their addresses."""

    name: str
    address: str

    @property
    def prefix(self) -> list[str]:
        """What to put before a command to run it at this home."""
        return ["ip", "netns", "exec", self.name]


@contextmanager
def home_lines(count: int, up_mbit: float, down_mbit: float, one_way_ms: float) -> Generator[Sequence[Home]]:
    """Homes that reach each other through their own lines and one namespace that forwards. Raises NoLineError.

    A packet crosses two lines: the rate is that of the sender's uplink, the delay twice that of one line.
    """
    with ExitStack() as stack:
        stack.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, _end))
        program = _compiled(stack, emulator_source())
        hub = _namespace(stack, "hub")
        _run("ip", "netns", "exec", hub, "sh", "-c", FORWARD)
        homes = [Home(_namespace(stack, f"home{place}-"), f"10.77.{place}.2") for place in range(1, count + 1)]
        for place, home in enumerate(homes, 1):
            _emulate(stack, program, (home.name, hub), (up_mbit, down_mbit, one_way_ms, 0.0))
            _run("ip", "-n", hub, "link", "set", "emu0", "name", f"line{place}")  # the next line makes another emu0
            _configure(hub, f"line{place}", f"10.77.{place}.1")
            _configure(home.name, "emu0", home.address)
            _run("ip", "-n", home.name, "route", "add", "default", "dev", "emu0")
        yield homes


@contextmanager
def homes_behind_routers(mbit: float, rtt_ms: float, loss: float) -> Generator[Sequence[Home]]:
    """A public place and two homes, each behind a router that filters by address and port. Raises NoLineError.

    Every pair of them has a line of its own, with this rate in both directions.
    """
    with ExitStack() as stack:
        stack.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, _end))
        program = _compiled(stack, emulator_source().with_name("nat_lines.c"))
        places = ("relay", PUBLIC_ADDRESS), ("left", "10.0.1.2"), ("right", "10.0.2.2")
        homes = [Home(_namespace(stack, name), address) for name, address in places]
        _started(stack, program, (*(home.name for home in homes), mbit, rtt_ms / 2, loss, QUEUE_MS))
        for home in homes:
            _configure(home.name, "wan", home.address)
            _run("ip", "-n", home.name, "route", "add", "default", "dev", "wan")
        yield homes


def separate(*homes: Home) -> None:
    """Let homes behind routers reach the public place only, as if each router chose its ports anew for each peer.

    Raises NoLineError.
    """
    for home in homes:
        _run("ip", "-n", home.name, "route", "add", PUBLIC_ADDRESS, "dev", "wan")
        _run("ip", "-n", home.name, "route", "add", "unreachable", ROUTERS)


def _end(number: int, _frame: object) -> None:
    """End this program so that nothing of the lines stays behind."""
    raise SystemExit(128 + number)


def _namespace(stack: ExitStack, name: str) -> str:
    """A namespace of this process, which is deleted with the stack."""
    name += str(os.getpid())
    _run("ip", "netns", "add", name)
    stack.callback(_run, "ip", "netns", "delete", name)
    return name


def _emulate(stack: ExitStack, program: Path, ends: tuple[str, str], line: tuple[float, float, float, float]) -> None:
    """Join two namespaces until the stack ends. `line`: Mbit/s from the first and to it, ms one way, and loss."""
    _started(stack, program, (*ends, *line, QUEUE_MS))


def _started(stack: ExitStack, program: Path, arguments: Sequence[object]) -> None:
    emulator = subprocess.Popen([str(program), *map(str, arguments)], stdout=subprocess.PIPE, text=True)
    stack.callback(_stop, emulator)
    assert emulator.stdout is not None
    if emulator.stdout.readline().strip() != "READY":
        raise NoLineError("the link emulator did not start")


def _configure(namespace: str, device: str, address: str) -> None:
    _run("ip", "-n", namespace, "address", "add", f"{address}/24", "dev", device)
    _run("ip", "-n", namespace, "link", "set", device, "mtu", "1500", "up")
    _run("ip", "-n", namespace, "link", "set", "lo", "up")


def _compiled(stack: ExitStack, source: Path) -> Path:
    """The emulator's program, which is deleted with the stack."""
    if os.name != "posix" or os.geteuid() != 0:
        raise NoLineError("network namespaces need root")
    if not source.is_file():
        raise NoLineError(f"the link emulator {source} is not there (set BENCHMARK_LINK_EMULATOR)")
    for tool in ("ip", "gcc"):
        if shutil.which(tool) is None:
            raise NoLineError(f"the program {tool} is not installed")
    if not Path("/dev/net/tun").exists():
        raise NoLineError("there is no /dev/net/tun")
    program = Path(stack.enter_context(tempfile.TemporaryDirectory()), "link_emulator")
    _run("gcc", "-O2", "-o", str(program), str(source))
    return program


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoLineError(f"{' '.join(command)}: {done.stderr.strip()}")


def _stop(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=READY_SECONDS)
