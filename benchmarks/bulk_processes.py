"""Starts the two processes of bulk_peer.py for one way of sending, and tells them what to do."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from benchmarks.bulk_peer import TENSOR_BYTES

STOP_SECONDS = 20


@dataclass(frozen=True)
class Sent:
    """What one order achieved."""

    byte_count: int
    seconds: float
    connections: int

    @property
    def mib_per_second(self) -> float:
        """2**20 bytes a second."""
        return self.byte_count / 2**20 / self.seconds

    @property
    def mbit_per_second(self) -> float:
        """10**6 bits a second."""
        return self.byte_count * 8e-6 / self.seconds


class BulkPair:
    """One process that serves and one that asks."""

    def __init__(self, server: subprocess.Popen[str], asker: subprocess.Popen[str], facts: dict[str, Any]) -> None:
        self._server = server
        self._asker = asker
        self.congestion_control = str(facts["congestion_control"])

    def send(self, byte_count: int) -> Sent:
        """So many bytes in one go."""
        return self._sent({"bytes": byte_count})

    def send_for(self, seconds: float) -> Sent:
        """As much as goes in this time."""
        return self._sent({"seconds": seconds})

    def round_trips(self, count: int) -> Sent:
        """A tensor of TENSOR_BYTES there and back, so many times."""
        sent = self._sent({"round_trips": count})
        assert sent.byte_count == 2 * count * TENSOR_BYTES
        return sent

    def cpu_seconds(self) -> float:
        """Of both processes so far."""
        return sum(float(_told(process, {"cpu": True})["cpu"]) for process in (self._server, self._asker))

    def _sent(self, order: dict[str, Any]) -> Sent:
        facts = _told(self._asker, order)
        return Sent(facts["bytes"], facts["seconds"], facts.get("connections", 1))


@contextmanager
def bulk_pair(
    way: str,
    options: Sequence[str] = (),
    host: str = "127.0.0.1",
    *,
    serve_in: Sequence[str] = (),
    ask_in: Sequence[str] = (),
) -> Generator[BulkPair]:
    """Two processes; `serve_in` and `ask_in` are put before their commands, to run them in network namespaces."""
    with _running([*serve_in, *_command("serve", way), "--host", host, *options]) as server:
        port = _line(server)["port"]
        with _running([*ask_in, *_command("ask", way), "--host", host, "--port", str(port), *options]) as asker:
            yield BulkPair(server, asker, _line(asker))


def _command(role: str, way: str) -> list[str]:
    return [sys.executable, "-m", "benchmarks.bulk_peer", role, way]


@contextmanager
def _running(command: list[str]) -> Generator[subprocess.Popen[str]]:
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        try:
            process.communicate(timeout=STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def _told(process: subprocess.Popen[str], order: dict[str, Any]) -> dict[str, Any]:
    assert process.stdin is not None
    process.stdin.write(json.dumps(order) + "\n")
    process.stdin.flush()
    return _line(process)


def _line(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"a process of the benchmark ended with {process.wait()}")
    return dict(json.loads(line))
