"""A real node in its own process, as a user would start it, driven over its API."""

from __future__ import annotations

import os
import random
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import httpx

from benchmarks import preloaded
from benchmarks.sizes import IS_TINY, size
from benchmarks.texts import write_topics

START_SECONDS = size(120.0, 800.0)  # the tiny size runs on machines that do other work
PORTS = (15_000, 30_000)
NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # nothing is asked over TLS: without it every question reads all roots
TOKEN = "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff"


@dataclass(eq=False)
class NodeProcess:
    """A started node; two objects are two nodes."""

    process: subprocess.Popen[bytes] | preloaded.ForkedProcess
    port: int
    data_dir: Path
    started: float  # time.perf_counter() just before the process was made
    _secret: dict[str, str] | None = None  # the header of requests, once it is known

    @property
    def url(self) -> str:
        """Base address of its API."""
        return f"http://127.0.0.1:{self.port}"

    def get(self, path: str) -> dict[str, Any]:
        """JSON of an authorised GET."""
        response = httpx.get(self.url + path, headers=self.authorised(), timeout=20, trust_env=False, verify=NO_TLS)
        return cast("dict[str, Any]", response.raise_for_status().json())

    def authorised(self) -> dict[str, str]:
        """The header with the node's API secret. Raises httpx.ConnectError before the node has made it.

        The options of a demo can move its folder below `data_dir`, and its further nodes are below that folder.
        """
        if self._secret is not None:  # the folder may have been moved since
            return self._secret
        files = [self.data_dir / "api-secret"]
        is_own = files[0].exists()
        if not is_own:
            files = sorted(self.data_dir.rglob("api-secret"), key=lambda file: len(file.parts))
        if not files:
            raise httpx.ConnectError(f"there is no API secret in {self.data_dir}")
        header = {"Authorization": f"Bearer {files[0].read_text(encoding='ascii').strip()}"}
        self._secret = header if is_own else None
        return header

    def post(self, path: str, body: Mapping[str, object] | None = None) -> dict[str, Any]:
        """JSON of an authorised POST."""
        response = httpx.post(
            self.url + path,
            json=body or {},
            headers=self.authorised(),
            timeout=60,
            trust_env=False,
            verify=NO_TLS,
        )
        return cast("dict[str, Any]", response.raise_for_status().json())

    def first_answer_seconds(self) -> float:
        """Seconds from process start to the first answer of /health."""
        while True:
            try:
                httpx.get(f"{self.url}/health", timeout=5, trust_env=False).raise_for_status()
            except httpx.TransportError:
                self._must_live()
                time.sleep(0.01)
            else:
                return time.perf_counter() - self.started

    def wait_for_steps(self, steps: int, seconds: float = START_SECONDS) -> float:
        """Wait until the node has made this many steps; seconds since process start."""
        self.wait_for(f"step {steps}", lambda status: status["training"]["steps"] >= steps, seconds)
        return time.perf_counter() - self.started

    def wait_for(
        self, event: str, holds: Callable[[dict[str, Any]], bool], seconds: float = START_SECONDS
    ) -> dict[str, Any]:
        """The first status of which `holds` is true. Raises TimeoutError that names the event."""
        deadline = time.perf_counter() + seconds
        while time.perf_counter() < deadline:
            self._must_live()
            try:
                status = self.get("/api/status")
                if holds(status):
                    return status
            except httpx.TransportError:
                pass
            time.sleep(0.05)
        raise TimeoutError(f"no {event} within {seconds} s")

    def training_rate(self, seconds: float) -> float:
        """Tokens per second between the first and the last step of the next `seconds`; at least two steps."""
        started = time.time()
        time.sleep(seconds)
        while len(points := self.points_since(started)) < 2:
            self._must_live()
            time.sleep(0.05)
        return float(points[-1]["tokens"] - points[0]["tokens"]) / float(points[-1]["time"] - points[0]["time"])

    def points_since(self, started: float) -> list[dict[str, Any]]:
        """The points of the training curve whose steps ended after `started`, in seconds since the epoch."""
        points = cast("list[dict[str, Any]]", self.get("/api/training/history")["points"])
        return [point for point in points if point["time"] >= started]

    def kill(self) -> None:
        """SIGKILL: the power cut."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """SIGTERM and wait; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)

    def _must_live(self) -> None:
        if self.process.poll() is not None:
            raise RuntimeError(f"the node exited with code {self.process.returncode}")


def free_port() -> int:
    """A port that was free a moment ago.

    None of those that systems give to outgoing connections: another program's could take it before it is used.
    """
    while True:
        port = random.randrange(*PORTS)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def start_node(
    data_dir: Path,
    arguments: Sequence[str],
    *,
    demo: bool = False,
    trainer: bool = False,
    port: int | None = None,
    variables: Mapping[str, str] | None = None,
    place: Sequence[str] = (),
    fresh: bool = False,
) -> NodeProcess:
    """Start `neuroshard` (or its demo, or its trainer) headless, on a free port unless one is given.

    Of the environment it sees nothing of NeuroShard but `variables`, and a token unless it is a demo. It keeps its
    modules compiled for the next start, as an installed program does, wherever the environment says otherwise.
    `place` stands before the command, and replaces itself by it. At the tiny size and in tests a node is a fork that
    has imported everything already, unless it has a place or must be `fresh`: its command line and its memory count.
    """
    port = free_port() if port is None else port
    command = ["demo"] if demo else ["trainer"] if trainer else []
    home = data_dir / "demo" if demo else data_dir
    if demo and IS_TINY:
        text = data_dir / "text"
        options, home = _tiny_demo(data_dir, text if text.exists() else write_topics(text))
        arguments = [*options, *arguments]
    command += ["--headless", "--port", str(port), "--data-dir", str(data_dir), *arguments]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("NEUROSHARD_")}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    environment["NEUROSHARD_P2P_HOST"] = "127.0.0.1"  # nothing leaves this computer
    if not demo:
        environment["NEUROSHARD_TOKEN"] = TOKEN
    environment |= variables or {}
    started = time.perf_counter()
    process: subprocess.Popen[bytes] | preloaded.ForkedProcess
    if preloaded.is_wanted() and not (place or fresh):
        process = preloaded.forker().start(command, environment)
    else:
        command = [*place, sys.executable, "-m", "neuroshard", *command]
        process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return NodeProcess(process, port, home, started)


def _tiny_demo(data_dir: Path, text: Path) -> tuple[list[str], Path]:
    """Return the options of a demo with a small model, whose text is soon tokenised, and its data folder."""
    from neuroshard.node.demo import DemoOptions, demo_folder

    return ["--memory", "1000", "--text", str(text)], demo_folder(data_dir, DemoOptions(text_folder=text))


@contextmanager
def running_node(
    data_dir: Path,
    arguments: Sequence[str],
    *,
    demo: bool = False,
    trainer: bool = False,
    port: int | None = None,
    variables: Mapping[str, str] | None = None,
    place: Sequence[str] = (),
    fresh: bool = False,
) -> Iterator[NodeProcess]:
    """A node that is gone when the block ends, however it ends. Arguments as for `start_node`."""
    node = start_node(
        data_dir, arguments, demo=demo, trainer=trainer, port=port, variables=variables, place=place, fresh=fresh
    )
    try:
        yield node
    finally:
        if node.process.poll() is None:
            node.process.terminate()
            try:
                node.process.wait(30)
            except subprocess.TimeoutExpired:
                node.kill()
