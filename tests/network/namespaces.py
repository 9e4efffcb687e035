"""Two computers on one local network without a way out: network namespaces that are gone after the test."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import Queue
from threading import Thread
from types import TracebackType
from typing import Self

import pytest

NEAR, FAR = "10.77.0.1", "10.77.0.2"  # the two computers' addresses


def why_not() -> str:
    """Why namespaces cannot be made here; empty when they can."""
    if not sys.platform.startswith("linux") or shutil.which("ip") is None:
        return "network namespaces need Linux and its `ip` command"
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    name = f"neuro-try-{os.getpid()}"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if tried.returncode:
        return f"network namespaces cannot be made here: {tried.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", name], check=True)
    return ""


class Program:
    """A Python program inside a namespace; it ends when its standard input does."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self._lines: Queue[str | None] = Queue()  # None: it ended
        self._reader = Thread(target=self._read)
        self._reader.start()

    def line(self, seconds: float = 40.0) -> str:
        """The next line it prints. Raises Empty when there is none in time, EOFError when it ended."""
        line = self._lines.get(timeout=seconds)
        if line is None:
            raise EOFError(f"ended with code {self.process.wait(10)}")
        return line

    def end(self, seconds: float = 20.0) -> list[str]:
        """End it well; the lines that it had still to say."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert self.process.wait(seconds) == 0
        return list(iter(self._lines.get, None))

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line.strip())
        self._lines.put(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.returncode is None:
            self.process.kill()
        self.process.wait()
        self._reader.join()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()


@dataclass(frozen=True)
class Computer:
    """A namespace."""

    name: str

    def run(self, *command: str) -> str:
        """Run a command inside; what it printed."""
        return subprocess.run(
            ["ip", "netns", "exec", self.name, *command], check=True, capture_output=True, text=True
        ).stdout

    def start(self, program: Path, *arguments: object) -> Program:
        """Start a Python program inside. It sees no settings of NeuroShard."""
        environment = {key: value for key, value in os.environ.items() if not key.startswith("NEUROSHARD_")}
        environment["PYTHONPATH"] = os.pathsep.join((str(program.parents[2]), str(program.parent)))
        environment["PYTHONUNBUFFERED"] = "1"
        return Program(
            subprocess.Popen(
                ["ip", "netns", "exec", self.name, sys.executable, str(program), *map(str, arguments)],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )

    def packets_sent(self) -> int:
        """How many packets ever left through its only interface."""
        return int(self.run("cat", "/sys/class/net/lan/statistics/tx_packets"))


@contextmanager
def local_network() -> Iterator[tuple[Computer, Computer]]:
    """Computers with the addresses NEAR and FAR, joined by a cable. Skips the test where none can be made."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    computers = (Computer(f"neuro-near-{os.getpid()}"), Computer(f"neuro-far-{os.getpid()}"))
    made: list[Computer] = []
    try:
        for computer in computers:
            _ip("netns", "add", computer.name)
            made.append(computer)
            computer.run("sysctl", "-qw", "net.ipv6.conf.all.disable_ipv6=1", "net.ipv6.conf.default.disable_ipv6=1")
        one, other = computers
        _ip("link", "add", "lan", "netns", one.name, "type", "veth", "peer", "name", "lan", "netns", other.name)
        for computer, host in ((one, NEAR), (other, FAR)):
            computer.run("ip", "address", "add", f"{host}/24", "dev", "lan")
            for interface in ("lo", "lan"):
                computer.run("ip", "link", "set", interface, "up")
        yield computers
    finally:
        for computer in made:
            _ip("netns", "delete", computer.name)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
