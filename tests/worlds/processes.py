"""Processes that tests start, ask and kill: Python programs, a seed, and the nodes of one run on loopback.

Everything is real, apart from the network, which is one computer's loopback. In a churn of processes some die, start,
sleep, have slow lines or wrong clocks, as one seed decides. There the clocks and the speed of the lines are simulated:
`odd_computer.py` starts each process, sets its clock and sends its connections through `LoopbackLines`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from selectors import EVENT_READ, DefaultSelector
from signal import SIGTERM, Signals
from subprocess import PIPE
from typing import Any

import anyio
import httpx
import trio
from anyio.abc import ByteReceiveStream, ByteSendStream, SocketAttribute, SocketStream, TaskStatus
from anyio.from_thread import start_blocking_portal
from anyio.streams.buffered import BufferedByteReceiveStream
from anyio.streams.memory import MemoryObjectReceiveStream

from benchmarks.friends import invitation_code
from benchmarks.node_process import TOKEN, NodeProcess, running_node
from neuroshard.identity import Wallet, parse_token
from neuroshard.identity.claims import MAX_CLOCK_SKEW_SECONDS
from neuroshard.types import RunId
from tests.worlds import odd_computer
from tests.worlds.churn import Coming, RoundPlan, Sleep, right_clock
from tests.worlds.commands import Outcome, outcome_of
from tests.worlds.odd_computer import CONNECTED, REFUSED

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

    @property
    def invitation(self) -> str:
        """A code with which any number of wallets can join."""
        return invitation_code(RunId(self.run_id), Wallet.from_secret(parse_token(TOKEN)))


def neuroshard(*arguments: object) -> Outcome:
    """Run a command to its end, with the owner's token."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("NEUROSHARD_")}
    environment |= {"NEUROSHARD_TOKEN": TOKEN, "NEUROSHARD_P2P_HOST": "127.0.0.1"}
    return outcome_of([*map(str, arguments)], environment)


def made(config: str, genesis: Path, folder: Path) -> Run:
    file, data_dir = folder / "run.toml", folder / "owner"
    file.write_text(f'name = "friends"\n{config}')
    where = ("--genesis", genesis, "--data-dir", data_dir, "--out", folder / "signed.json", "--json")
    created = neuroshard("run", "create", "--config", file, *where)
    assert created.code == 0, created.err
    return Run(created.json()["run_id"], data_dir)


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
        if number != 0 and run_id == run.run_id:
            token["NEUROSHARD_INVITE"] = run.invitation
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


SLOW_SECONDS = 0.15  # on the way over a slow line
PIECES_UNDER_WAY = 8  # of up to 64 KiB: so a slow line also has a rate, of some 30 Mbit/s
QUESTION_BYTES = 200


class LoopbackLines:
    """Carries the connections of programs that `odd_computer.py` started, each with a number."""

    def __init__(self) -> None:
        self.port = 0  # where the programs call
        self.slow = set[int]()  # numbers of those whose lines are slow, from now on
        self.slow_pieces = 0  # that went over slow lines
        self._listeners = dict[int, int]()  # by port

    async def serve(self, *, task_status: TaskStatus[None]) -> None:
        """Carry connections until cancelled."""
        async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener:
            self.port = listener.extra(SocketAttribute.local_port)
            task_status.started()
            await listener.serve(self._answer)

    async def _answer(self, caller: SocketStream) -> None:
        async with caller:
            with suppress(anyio.BrokenResourceError, anyio.IncompleteRead):  # it was killed
                question = await BufferedByteReceiveStream(caller).receive_until(b"\n", QUESTION_BYTES)
                number, host, port = json.loads(question)
                if host is None:
                    self._listeners[port] = number
                else:
                    await self._connect(caller, number, host, port)

    async def _connect(self, caller: SocketStream, number: int, host: str, port: int) -> None:
        try:
            called = await anyio.connect_tcp(host, port)
        except OSError:
            await caller.send(REFUSED)
            return
        ends = {number, self._listeners.get(port, number)}
        async with called, anyio.create_task_group() as tasks:
            await caller.send(CONNECTED)

            async def carry(source: ByteReceiveStream, sink: ByteSendStream) -> None:
                under_way, arriving = anyio.create_memory_object_stream[tuple[float, bytes]](PIECES_UNDER_WAY)
                tasks.start_soon(deliver, arriving, sink)
                with under_way, suppress(anyio.BrokenResourceError, anyio.EndOfStream):
                    while True:
                        piece = await source.receive()
                        is_slow = bool(ends & self.slow)
                        self.slow_pieces += is_slow
                        await under_way.send((anyio.current_time() + is_slow * SLOW_SECONDS, piece))

            async def deliver(arriving: MemoryObjectReceiveStream[tuple[float, bytes]], sink: ByteSendStream) -> None:
                with arriving, suppress(anyio.BrokenResourceError):
                    async for due, piece in arriving:
                        await anyio.sleep_until(due)
                        await sink.send(piece)
                tasks.cancel_scope.cancel()  # one end is gone: so is the connection

            tasks.start_soon(carry, caller, called)
            tasks.start_soon(carry, called, caller)


@contextmanager
def loopback_lines() -> Generator[LoopbackLines]:
    """Lines, carried by a thread of this process; every connection ends with the block."""
    lines = LoopbackLines()
    with start_blocking_portal() as portal:
        serving, _ = portal.start_task(lines.serve)
        try:
            yield lines
        finally:
            serving.cancel()


LONGEST_SLEEP_SECONDS = 6.0
VOTERS = ("accepted", "abstained")  # parts of those of whom a certificate says that they contributed


@dataclass(frozen=True)
class RefusedNode:
    """A node with a clock that is too wrong."""

    warning: str  # what it told its owner
    rounds: list[dict[str, Any]]  # with others, before its clock was right


class ProcessChurn:
    """Carries a plan out.

    Who dies or sleeps is drawn among those without whom a quorum of the voters is alive and awake. A clock that is too
    wrong is set right once its node has asked for that.
    """

    def __init__(self, start: Callable[..., NodeProcess], seed: int, lines: LoopbackLines, clocks: Path) -> None:
        """`start` as `nodes_of` gives it; the nodes' clocks lie in files of the folder `clocks`."""
        self.live: dict[int, NodeProcess] = {}
        self.roots: dict[int, set[str]] = {}  # that anybody has told, by outer step
        self.together: set[int] = set()  # outer steps that several members have completed
        self.events: list[str] = []
        self.refused: list[RefusedNode] = []  # whose clocks were too wrong
        self._start = start
        self._lines = lines
        self._clocks = clocks
        self._random = Random(f"processes {seed}")
        self._began = time.monotonic()
        self._unused = 0
        self._dead: list[int] = []
        self._told: dict[int, dict[str, Any]] = {}  # the newest status of each that lives and is awake
        self._wakes: dict[int, float] = {}  # when those who sleep wake
        self._wrong: set[int] = set()  # whose clocks are too wrong
        self._apart: set[int] = set()  # whose clocks were, and who are not yet where somebody else is

    @property
    def step(self) -> int:
        """The highest outer step of those who live."""
        return max((told["diloco"]["outer_steps"] for told in self._told.values()), default=0)

    @property
    def is_settled(self) -> bool:
        """Whether all who live told the same root of the same outer step."""
        lines = {(told["diloco"]["outer_steps"], told["diloco"]["state_root"]) for told in self._told.values()}
        return len(self._told) == len(self.live) and len(lines) == 1

    def found(self, members: int) -> None:
        """Start a swarm and wait until all of its members have completed a round together."""
        self.come(self._founder())
        self.wait("an address", lambda: bool(self._addresses()))
        for _ in range(members - 1):
            self.come(self._founder())
        self.wait("a round of all", lambda: len(self._voters()) == members)

    def carry_out(self, plan: RoundPlan) -> None:
        """One round: slow a line down, kill at its moments, and have another one come for each."""
        began, step = time.monotonic(), self.step
        self._slow_down(sorted(self.live)[plan.slow % len(self.live)])
        events: list[tuple[float, Coming | Sleep]] = list(zip(plan.deaths, plan.comings, strict=True))
        events += [(sleep.after, sleep) for sleep in plan.sleeps]
        for after, event in sorted(events, key=lambda pair: pair[0]):
            self.wait("a moment", lambda moment=began + after: time.monotonic() >= moment)
            self.wait("somebody who may be gone", lambda: bool(self._dispensable()))
            number = self._random.choice(sorted(self._dispensable()))
            if isinstance(event, Coming):
                self._kill(number)
                self.come(event)
            elif sys.platform != "win32":  # no process can be stopped and continued there
                self._suspend(number, min(event.seconds, LONGEST_SLEEP_SECONDS))
        self.wait("the next outer step", lambda: self.step > step)

    def come(self, coming: Coming) -> None:
        """A node starts: somebody who has died, with what lies on its disk, or a new one."""
        if coming.returns and self._dead:
            number = self._dead.pop(self._random.randrange(len(self._dead)))
        else:
            number, self._unused = self._unused, self._unused + 1
        if abs(coming.clock_ahead) > MAX_CLOCK_SKEW_SECONDS:
            self._wrong.add(number)
        self._apart.discard(number)
        odd_computer.set_clock(self._clock(number), coming.clock_ahead)
        computer = (sys.executable, odd_computer.__file__, number, self._lines.port, self._clock(number))
        self.live[number] = self._start(number, *self._addresses(), place=tuple(map(str, computer)))
        self._note(f"{number} comes, its clock {coming.clock_ahead:+.0f} s ahead")

    def wait(self, event: str, holds: Callable[[], bool]) -> None:
        """Look at all of them until this holds. Raises AssertionError when it takes too long, or a node ends."""

        def look() -> bool:
            self._look()
            return holds()

        until(event, look, LONGEST_SECONDS)

    def _look(self) -> None:
        for number in [number for number, at in self._wakes.items() if time.monotonic() >= at]:
            self._wake(number)
        for number, node in self.live.items():
            if number in self._wakes:
                continue
            assert node.process.poll() is None, f"node {number} ended with code {node.process.returncode}"
            with suppress(httpx.HTTPError):  # it is just starting, or very busy
                status = node.get("/api/status")
                if number not in self._wrong:
                    self._hear(number, status)
                elif told := [warning for warning in status["warnings"] if "clock" in warning]:
                    self._set_clock(number, status["node_id"], told[0])

    def _set_clock(self, number: int, node_id: str, told: str) -> None:
        """Its owner has read what the node tells of the clock."""
        self.refused.append(RefusedNode(told, self._rounds_with(node_id)))
        self._wrong.discard(number)
        self._apart.add(number)
        odd_computer.set_clock(self._clock(number), 0.0)
        self._note(f"{number} tells: {told}")

    def _rounds_with(self, node_id: str) -> list[dict[str, Any]]:
        """That anybody alive and awake knows of, of several members with this one among them."""
        awake = [node for number, node in self.live.items() if number not in self._wakes]
        known = [record for node in awake for record in node.get("/api/rounds")["rounds"] if len(record["members"]) > 1]
        return [record for record in known if any(member["node_id"] == node_id for member in record["members"])]

    def _hear(self, number: int, status: dict[str, Any]) -> None:
        step, root = status["diloco"]["outer_steps"], status["diloco"]["state_root"]
        if not root:
            return
        if number in self._apart and (not step or root not in self.roots.get(step, ())):
            return  # what it does alone
        self._apart.discard(number)
        before = self._told.get(number)
        self._told[number] = status
        self.roots.setdefault(step, set()).add(root)
        if status["diloco"]["members"] > 1:
            self.together.add(step)
        if before is None or before["diloco"]["outer_steps"] != step:
            self._note(f"{number} is at step {step} ({root[:8]}), {status['diloco']['members']} members")

    def _kill(self, number: int) -> None:
        self.live.pop(number).kill()
        self._told.pop(number, None)
        self._dead.append(number)
        self._note(f"{number} dies")

    def _suspend(self, number: int, seconds: float) -> None:
        self.live[number].process.send_signal(signal.SIGSTOP)
        self._wakes[number] = time.monotonic() + seconds
        self._told.pop(number, None)
        self._note(f"{number} sleeps")

    def _wake(self, number: int) -> None:
        del self._wakes[number]
        self.live[number].process.send_signal(signal.SIGCONT)
        self._note(f"{number} wakes")

    def _slow_down(self, number: int) -> None:
        self._lines.slow.add(number)
        self._note(f"the line of {number} is slow")

    def _dispensable(self) -> list[int]:
        """All without the first node, which has the only seat, while more than half of the contributors are there."""
        voters = self._voters()
        alive = {number for number, told in self._told.items() if told["node_id"] in voters and self._is_newest(told)}
        return [number for number in self._told if number and voters and 2 * len(alive - {number}) > len(voters)]

    def _is_newest(self, told: dict[str, Any]) -> bool:
        return bool(told["diloco"]["outer_steps"] == self.step)

    def _voters(self) -> set[str]:
        """Whom the certificate of the newest step names."""
        for number in self._told:
            with suppress(httpx.HTTPError):
                for record in self.live[number].get("/api/rounds")["rounds"]:
                    if record["result"] == "completed" and record["outer_step"] + 1 == self.step:
                        return {member["node_id"] for member in record["members"] if member["part"] in VOTERS}
        return set()

    def _addresses(self) -> list[str]:
        """Of two of those who live: the one that a newcomer is told of may die meanwhile."""
        told = [status["network"]["addresses"] for status in self._told.values()]
        return [addresses[0] for addresses in told if addresses][:2]

    def _founder(self) -> Coming:
        return Coming(returns=False, clock_ahead=right_clock(self._random))

    def _clock(self, number: int) -> Path:
        return self._clocks / f"clock-{number}"

    def _note(self, event: str) -> None:
        self.events.append(f"{time.monotonic() - self._began:.1f} s: {event}")
