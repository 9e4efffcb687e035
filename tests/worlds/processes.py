"""Processes that tests start, ask and kill: Python programs, a seed, and the nodes of one run on loopback.

Everything is real, apart from the network, which is one computer's loopback.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector
from signal import SIGTERM, Signals
from subprocess import PIPE
from typing import Any

import httpx
import trio

from benchmarks.node_process import TOKEN, NodeProcess, running_node

LONGEST_SECONDS = 150.0  # this machine may be busy
START_SECONDS = 60.0
# as `neuroshard`, and at the end it tells on standard error whether PyTorch was loaded
_PROGRAM = """
import atexit, sys
atexit.register(lambda: sys.stderr.write(f"torch: {'torch' in sys.modules}\\n"))
from neuroshard.cli.main import main
main()
"""


class Program:
    """Seen from the process that started it."""

    def __init__(self, process: trio.Process) -> None:
        self._process = process
        self._said = bytearray()

    async def line(self) -> str:
        """The next line it prints. Raises EOFError when it ended."""
        assert self._process.stdout is not None
        while b"\n" not in self._said:
            data = await self._process.stdout.receive_some()
            if not data:
                raise EOFError(f"ended with code {await self._process.wait()}")
            self._said += data
        line, _, self._said = self._said.partition(b"\n")
        return line.decode()

    def kill(self) -> None:
        """At once, without a chance to say anything."""
        self._process.kill()


@asynccontextmanager
async def program(script: Path, *arguments: object) -> AsyncGenerator[Program]:
    """Runs within the block at most; it should end when its standard input does."""
    command = [sys.executable, str(script), *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    process = await trio.lowlevel.open_process(command, stdin=PIPE, stdout=PIPE, env=environment)
    try:
        yield Program(process)
    finally:
        process.kill()
        with trio.CancelScope(shield=True):
            await process.wait()
            for stream in (process.stdin, process.stdout):
                assert stream is not None
                await stream.aclose()


@dataclass(frozen=True)
class Run:
    """A run that `neuroshard run create` made, in its owner's data folder."""

    run_id: str
    data_dir: Path


def neuroshard(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, with the owner's token."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("NEUROSHARD_")}
    environment |= {"NEUROSHARD_TOKEN": TOKEN, "NEUROSHARD_P2P_HOST": "127.0.0.1"}
    command = [sys.executable, "-m", "neuroshard", *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


def made(config: str, genesis: Path, folder: Path) -> Run:
    file, data_dir = folder / "run.toml", folder / "owner"
    file.write_text(f'name = "friends"\n{config}')
    where = ("--genesis", genesis, "--data-dir", data_dir, "--out", folder / "signed.json", "--json")
    created = neuroshard("run", "create", "--config", file, *where)
    assert created.returncode == 0, created.stderr
    return Run(json.loads(created.stdout)["run_id"], data_dir)


@contextmanager
def nodes_of(
    run: Run, quick: Sequence[str], folder: Path, variables: Mapping[str, str] | None = None
) -> Iterator[Callable[..., NodeProcess]]:
    """Starts nodes of a run, each with a folder and a wallet of its own; all are gone when the block ends."""
    started: list[tuple[NodeProcess, Any]] = []

    def start(number: int, *peers: str, run_id: str = run.run_id, place: Sequence[str] = ()) -> NodeProcess:
        data_dir = run.data_dir if number == 0 else folder / f"node-{number}"
        given = [part for peer in peers for part in ("--peer", peer)]
        token = {} if number == 0 else {"NEUROSHARD_TOKEN": f"{number:02x}" * 32}
        told = {**token, **(variables or {})}
        context = running_node(data_dir, [*quick, "--run", run_id, *given], variables=told, place=place)
        node = context.__enter__()
        started.append((node, context))
        return node

    try:
        yield start
    finally:
        for node, context in started:
            node.kill()  # nobody waits for checkpoints here
            context.__exit__(None, None, None)


def peers_of(node: NodeProcess) -> dict[str, dict[str, Any]]:
    """What a node says about each other node; nothing while it does not answer."""
    try:
        return {peer["node_id"]: peer for peer in node.get("/api/peers")["peers"]}
    except httpx.HTTPError:
        return {}


def until(event: str, holds: Callable[[], bool], seconds: float = LONGEST_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not within {seconds} s: {event}"
        time.sleep(0.2)


def steps_of(node: NodeProcess) -> int:
    return int(node.get("/api/status")["training"]["steps"])


def all_train_on(nodes: Sequence[NodeProcess]) -> None:
    before = [steps_of(node) for node in nodes]
    until("new steps everywhere", lambda: all(steps_of(node) > was for node, was in zip(nodes, before, strict=True)))


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
