"""Starts a Python module as on a computer whose clock is wrong and whose connections pass `LoopbackLines`.

`odd_computer.py NUMBER PORT CLOCK python -m MODULE ...`: its number, where the lines are, and the file with its clock.
Only this process's wall clock is another one; what measures durations goes right.
"""

from __future__ import annotations

import json
import runpy
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

CONNECTED, REFUSED = b"+", b"-"
CLOCK_SECONDS = 0.5  # after which somebody may have set the clock


class WallClock:
    """The true time and as many seconds as the file says."""

    def __init__(self, file: Path, true: Callable[[], float] = time.time) -> None:
        self._file = file
        self._true = true
        self._ahead = 0.0
        self._looks_at = 0.0

    def __call__(self) -> float:
        if time.monotonic() >= self._looks_at:
            self._looks_at = time.monotonic() + CLOCK_SECONDS
            self._ahead = float(self._file.read_text())
        return self._true() + self._ahead


def set_clock(file: Path, ahead: float) -> None:
    """From now on a process that has its clock there is so many seconds ahead."""
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_suffix(".new")
    new.write_text(str(ahead))
    new.replace(file)


def use_lines(number: int, port: int) -> None:
    """From now on connections of this process are made by the lines, which also hear where it listens."""
    connect, listen = socket.socket.connect, socket.socket.listen

    def ask(sock: socket.socket, host: str | None, place: int) -> bytes:
        connect(sock, ("127.0.0.1", port))
        sock.sendall(json.dumps([number, host, place]).encode() + b"\n")
        return sock.recv(1)

    def connect_by_lines(sock: socket.socket, address: Any) -> None:
        if sock.type != socket.SOCK_STREAM or sock.family != socket.AF_INET:
            connect(sock, address)
            return
        timeout = sock.gettimeout()
        sock.settimeout(None)  # this computer answers at once
        try:
            answer = ask(sock, str(address[0]), int(address[1]))
        finally:
            sock.settimeout(timeout)
        if answer != CONNECTED:
            raise ConnectionRefusedError(f"nobody listens at {address}")

    def listen_and_tell(sock: socket.socket, *backlog: int) -> None:
        listen(sock, *backlog)
        with socket.socket() as call:
            ask(call, None, sock.getsockname()[1])

    socket.socket.connect = connect_by_lines
    socket.socket.listen = listen_and_tell


def start(number: int, port: int, clock: Path, command: Sequence[str]) -> None:
    """Run `python -m MODULE ...` in this process."""
    wall_clock = time.time = WallClock(clock)
    time.time_ns = lambda: int(wall_clock() * 1e9)
    use_lines(number, port)
    sys.path[0] = ""  # as for a module that is run
    _python, _m, module, *arguments = command
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    start(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
