"""A process that is killed, in every phase of a request: it is told in time, and leaves nothing behind at the other."""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import anyio
import psutil
import pytest
import trio
import trio.testing

from neuroshard.messages import Frame
from neuroshard.network import PeerUnreachableError, RequestTimeoutError
from neuroshard.network.limits import UploadPacer
from neuroshard.network.pool import NotDeliveredError
from neuroshard.types import NodeId
from tests.worlds import processes
from tests.worlds.claims import identity_of
from tests.worlds.clock import until
from tests.worlds.network_nodes import LIMITS, MIB, POOL_LOOPBACK, Node, frame_of, node, run
from tests.worlds.processes import Program

SLOW = 24 * MIB  # bytes a second: slow enough to die in the middle


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


async def _live(arguments: Sequence[str]) -> None:
    number, port, *question = arguments
    async with (
        node(int(number), pacer=UploadPacer(SLOW), port=int(port)) as here,
        anyio.create_task_group() as tasks,
    ):

        async def hold(_: NodeId, __: Frame) -> Frame:
            _say("asked")
            await anyio.sleep_forever()
            raise AssertionError

        here.server.serve("hold", hold, LIMITS, 16)
        _say(str(here.door.endpoint()[1]))
        if question:
            tasks.start_soon(_ask, here, *question)
        await anyio.to_thread.run_sync(sys.stdin.read, abandon_on_cancel=True)
        tasks.cancel_scope.cancel()


async def _ask(here: Node, port: str, kind: str, mebibytes: str) -> None:
    frame = frame_of(bytes(int(mebibytes) * MIB), kind)
    answer = await here.ask_at(identity_of(1).node_id, ("127.0.0.1", int(port)), frame)
    _say(answer.kind)


OTHER = identity_of(2).node_id
DATA = Random(4).randbytes(24 * MIB)
PART = 8 * MIB
TOLD_SECONDS = 3.0
CLEAN_SECONDS = 2.0  # until nothing is left of a peer that is known to be gone


def program(*arguments: object) -> AbstractAsyncContextManager[Program]:
    return processes.program(Path(__file__), *arguments)


@asynccontextmanager
async def leaving_nothing(here: Node, seconds: float) -> AsyncGenerator[None]:
    """So many seconds after the block, this node has as many sockets, tasks, connections and bytes as before."""
    await trio.testing.wait_all_tasks_blocked()  # whatever begins with a pool has begun
    before = _held(here)
    yield
    with anyio.move_on_after(seconds):
        await until(lambda: _held(here) == before)
        return
    assert _held(here) == before


def _held(here: Node) -> tuple[int, int, int, int]:
    sockets, tasks = len(psutil.Process().net_connections()), trio.lowlevel.current_statistics().tasks_living
    return sockets, tasks, here.pool.connection_count, here.budget.used


@dataclass
class Death:
    phase: str
    at: float = 0.0

    async def come(self, here: Node, victim: Program) -> None:
        """Kill the peer that this node asks, as soon as the phase has come."""
        match self.phase:
            case "before":
                victim.kill()
                await until(lambda: here.pool.connection_count == 0)
            case "in the moment of asking":
                victim.kill()
            case "while asking":
                await until(lambda: here.pool.traffic()[OTHER].bytes_sent > PART)
            case "while handling":
                assert await victim.line() == "asked"
            case _:
                await until(lambda: here.pool.traffic()[OTHER].bytes_received > PART)
        self.at = anyio.current_time()
        victim.kill()


async def ask(here: Node, port: int, data: bytes, kind: str = "echo") -> Frame:
    return await here.ask_at(OTHER, ("127.0.0.1", port), frame_of(data, kind))


@pytest.mark.parametrize(
    ("phase", "may_be_handled"),
    [
        pytest.param("before", False, marks=pytest.mark.long),
        pytest.param("in the moment of asking", False, marks=pytest.mark.long),
        ("while asking", False),
        pytest.param("while handling", True, marks=pytest.mark.long),
        pytest.param("while answering", True, marks=pytest.mark.long),
    ],
)
def test_a_peer_that_is_killed_is_unreachable_within_3_seconds(phase: str, may_be_handled: bool) -> None:
    async def scenario() -> None:
        async with node(1, pacer=UploadPacer(SLOW)) as a, anyio.create_task_group() as tasks:
            async with leaving_nothing(a, CLEAN_SECONDS):
                async with program(2, 0) as victim:
                    port = int(await victim.line())
                    assert (await ask(a, port, b"x")).kind == "answer"
                    death = Death(phase)
                    if phase.startswith("while"):
                        tasks.start_soon(death.come, a, victim)
                    else:
                        await death.come(a, victim)
                    with pytest.raises(PeerUnreachableError) as raised:
                        await ask(a, port, DATA, "hold" if phase == "while handling" else "echo")
                    assert anyio.current_time() - death.at < TOLD_SECONDS
                    assert not isinstance(raised.value, RequestTimeoutError)
                    assert isinstance(raised.value, NotDeliveredError) is not may_be_handled
                started = anyio.current_time()
                with pytest.raises(NotDeliveredError):
                    await ask(a, port, b"x")
                assert anyio.current_time() - started < 10
            async with program(2, port) as restarted:
                assert int(await restarted.line()) == port
                assert (await ask(a, port, DATA)).tensors[0].data == DATA

    run(scenario)


@pytest.mark.parametrize("comes_back", [pytest.param(False, marks=pytest.mark.long), True])
@pytest.mark.parametrize(
    "phase",
    ["while asking", *(pytest.param(f"while {what}", marks=pytest.mark.long) for what in ("handling", "answering"))],
)
def test_an_asker_that_is_killed_leaves_nothing_behind(phase: str, comes_back: bool) -> None:
    """What is kept for it goes after `resume_seconds`, or as soon as the process that was started again calls."""

    async def scenario() -> None:
        options = replace(POOL_LOOPBACK, resume_seconds=30.0 if comes_back else 1.0)
        handling, ended = anyio.Event(), anyio.Event()

        async def hold(_: NodeId, __: Frame) -> Frame:
            handling.set()
            try:
                await anyio.sleep_forever()
            finally:
                ended.set()
            raise AssertionError

        async def phase_has_come(b: Node) -> None:
            await until(lambda: OTHER in b.pool.traffic())
            match phase:
                case "while asking":
                    await until(lambda: b.pool.traffic()[OTHER].bytes_received > PART)
                    assert b.budget.used == len(DATA)
                case "while handling":
                    await handling.wait()
                case _:
                    await until(lambda: b.pool.traffic()[OTHER].bytes_sent > PART)

        async with node(1, options, pacer=UploadPacer(SLOW)) as b:
            b.server.serve("hold", hold, LIMITS, 4)
            kind, port = "hold" if phase == "while handling" else "echo", b.door.endpoint()[1]
            async with leaving_nothing(b, options.resume_seconds + CLEAN_SECONDS if not comes_back else CLEAN_SECONDS):
                async with program(2, 0, port, kind, len(DATA) // MIB) as victim:
                    await victim.line()
                    await phase_has_come(b)
                    victim.kill()
                    await until(lambda: b.pool.connection_count == 0)
                    assert not ended.is_set()
                if comes_back:
                    async with program(2, 0, port, "swallow", 1) as restarted:
                        await restarted.line()
                        assert await restarted.line() == "answer"
                        await until(lambda: not b.pool._links[OTHER].is_busy)  # it took the answer
            assert ended.is_set() is (phase == "while handling")
            async with program(2, 0, port, "echo", 4) as restarted:
                await restarted.line()
                assert await restarted.line() == "answer"

    run(scenario)


if __name__ == "__main__":
    trio.run(_live, sys.argv[1:])
