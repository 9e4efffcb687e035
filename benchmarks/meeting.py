"""How soon nodes meet, and what a node costs that only knows others: real networks on loopback, without training."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import IO, Any, cast

import anyio
import anyio.to_thread

from benchmarks.hivemind_process import hivemind_facts
from benchmarks.peer_network_process import NAMESPACE, OFFER, peer_network, status
from benchmarks.record import Report, Row, load_average
from benchmarks.sizes import size
from neuroshard.membership.claim_intake import signed_announcement
from neuroshard.node.peer_network import own_announcement

CROWD = size(10, 2)  # nodes that shall see a new one
NEWCOMERS = size(5, 1)
RECORDS = 20  # of hivemind's DHT
NEIGHBOURS = size(50, 2)  # of the idle node
SETTLED_SECONDS = size((45.0, 180.0), (0.0,))  # once all know all: while they still look round often, and after that
IDLE_SECONDS = size(60.0, 0.5)
WAIT_SECONDS = size(240.0, 800.0)  # 50 nodes on two cores, each of which verifies what all others say
LOOK_SECONDS = 0.05


@dataclass(frozen=True)
class CrowdProcess:
    """Nodes in another process."""

    questions: IO[str]
    answers: IO[str]
    address: str
    cpu_at_start: float

    def ask(self, question: str) -> dict[str, Any]:
        """Its answer to one line."""
        self.questions.write(question + "\n")
        self.questions.flush()
        return cast("dict[str, Any]", json.loads(self.answers.readline()))

    def wait_until_seen(self, count: int) -> None:
        """Until each node knows so many. Raises TimeoutError."""
        ends = time.monotonic() + WAIT_SECONDS
        while int(self.ask("seen")["count"]) < count:
            if time.monotonic() > ends:
                raise TimeoutError(f"the nodes do not all know {count} others after {WAIT_SECONDS:.0f} s")
            time.sleep(LOOK_SECONDS)


@contextmanager
def crowd(first: int, nodes: int, peers: Sequence[str] = ()) -> Generator[CrowdProcess]:
    """Nodes in a process of their own; gone when the block ends."""
    options = [part for peer in peers for part in ("--peer", peer)]
    command = [sys.executable, "-m", "benchmarks.peer_network_process", "--first", str(first), "--nodes", str(nodes)]
    with subprocess.Popen([*command, *options], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        hello = json.loads(process.stdout.readline())
        yield CrowdProcess(process.stdin, process.stdout, str(hello["address"]), float(hello["cpu"]))
        process.stdin.close()


@dataclass(frozen=True)
class Arrival:
    """Seconds from the start of a node's network."""

    up: float
    announced: float
    seen_by_all: float
    put: float
    got: float


def measure() -> Report:
    """Arrivals into a crowd, then a node that idles beside many."""
    load = load_average()
    with crowd(1, CROWD) as others:
        others.wait_until_seen(CROWD - 1)
        arrivals = [anyio.run(_arrive, others, 100 + number, backend="trio") for number in range(NEWCOMERS)]
    other = hivemind_facts("benchmarks.hivemind_directory", CROWD + 1, RECORDS)
    converged, idles = _idle()
    up, announced = median(a.up for a in arrivals), max(a.announced for a in arrivals)
    seen = max(a.seen_by_all for a in arrivals)
    put, got = median(a.put for a in arrivals), median(a.got for a in arrivals)
    return Report(
        "meeting",
        "Nodes that meet",
        (
            Row("network up after its start, median", f"{up:.2f} s", "report", None),
            Row(f"record announced, worst of {NEWCOMERS}", f"{announced:.2f} s", "< 2 s", announced < 2),
            Row(f"seen by {CROWD} others, worst of {NEWCOMERS}", f"{seen:.2f} s", "< 3 s", seen < 3),
            Row("directory, put and get from another node, median", _milliseconds(put, got), "report", None),
            *_hivemind_rows(other),
            *(row for idle in idles for row in idle.rows()),
        ),
        (
            "All nodes of the crowd share one process; libp2p is imported before the clock starts.",
            f"The {NEIGHBOURS} others share two processes; all knew all {converged:.0f} s after the last start.",
            f"Load average of the machine before the start: {load}.",
            other
            if isinstance(other, str)
            else "hivemind's peers have a process each; its get asks for the newest value.",
        ),
    )


def _hivemind_rows(facts: dict[str, Any] | str) -> tuple[Row, ...]:
    if isinstance(facts, str):
        return ()
    name = f"hivemind {facts['version']}, {facts['peers']} peers: store and get from another peer, median"
    return (Row(name, _milliseconds(facts["put"], facts["got"]), "report", None),)


def _milliseconds(put: float, got: float) -> str:
    return f"{put * 1e3:.1f} and {got * 1e3:.1f} ms"


async def _arrive(others: CrowdProcess, number: int) -> Arrival:
    """One newcomer's way into the crowd."""
    # once per process: no part of a start
    import neuroshard.network.libp2p.network  # noqa: F401  # pyright: ignore[reportUnusedImport]

    with tempfile.TemporaryDirectory() as folder:
        newcomer = peer_network(Path(folder), number, [others.address])
        node_id = newcomer.identity.node_id
        started = time.perf_counter()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(newcomer.networking.run)
            network = await newcomer.networking.up()
            up = time.perf_counter() - started
            announced = await _until(others, f"found {node_id}", 1) - started
            seen = await _until(others, f"knows {node_id}", CROWD) - started
            words = own_announcement(
                status(), OFFER.run_id, parameters_version=1, addresses=network.transport.addresses()
            )
            begun = time.perf_counter()
            await network.directory.announce(NAMESPACE, signed_announcement(newcomer.identity, words, time.time()))
            put = time.perf_counter() - begun
            begun = time.perf_counter()
            await network.directory.find(NAMESPACE)
            got = time.perf_counter() - begun
            tasks.cancel_scope.cancel()
    return Arrival(up, announced, seen, put, got)


async def _until(others: CrowdProcess, question: str, count: int) -> float:
    """The moment at which the crowd counts so many. Raises TimeoutError."""
    with anyio.fail_after(WAIT_SECONDS):
        while int((await anyio.to_thread.run_sync(others.ask, question))["count"]) < count:
            await anyio.sleep(LOOK_SECONDS)
    return time.perf_counter()


@dataclass(frozen=True)
class Idle:
    """A node that knows many others and does nothing else."""

    settled: float  # seconds from then on, when all knew all, to the minute that was measured
    cores: float
    sent: float  # bits a second
    received: float

    def rows(self) -> tuple[Row, ...]:
        """For the table."""
        name, moved = f"idle with {NEIGHBOURS} others, after {self.settled:.0f} s", self.sent + self.received
        figure = f"{moved / 1e3:.0f} kbit/s ({self.sent / 1e3:.0f} sent, {self.received / 1e3:.0f} received)"
        return (
            Row(f"{name}: share of a core", f"{self.cores:.2%}", "< 1 %", self.cores < 0.01),
            Row(f"{name}: sent and received together", figure, "< 50", moved < 50_000),
        )


def _idle() -> tuple[float, list[Idle]]:
    """Seconds until all knew all, and a minute each of the idle node."""
    half = NEIGHBOURS // 2
    with (
        crowd(1, half) as some,
        crowd(1 + half, NEIGHBOURS - half, [some.address]) as others,
        crowd(200, 1, [some.address]) as node,
    ):
        began = time.perf_counter()
        for each in (some, others, node):
            each.wait_until_seen(NEIGHBOURS)
        known_at = time.perf_counter()
        return known_at - began, [_minute(node, settled, known_at) for settled in SETTLED_SECONDS]


def _minute(node: CrowdProcess, settled: float, known_at: float) -> Idle:
    time.sleep(max(0.0, known_at + settled - time.perf_counter()))
    before, started = node.ask("use"), time.perf_counter()
    time.sleep(IDLE_SECONDS)
    after = node.ask("use")
    seconds = time.perf_counter() - started
    cores, sent, received = ((after[name] - before[name]) / seconds for name in ("cpu", "sent", "received"))
    return Idle(settled, cores, 8 * sent, 8 * received)
