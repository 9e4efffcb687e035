"""A node of the pool in a process of its own, so that it can die like one. It ends when its standard input does.

pool_program.py NUMBER PORT                        listens and answers
pool_program.py NUMBER PORT ASKED KIND MEBIBYTES   asks node 1, which listens at port ASKED, and tells the answer
"""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from subprocess import PIPE

import anyio
import trio
from pool_nodes import LIMITS, LOOPBACK, MIB, Node, frame_of, identity_of, node

from neuroshard.network.pacing import UploadPacer
from neuroshard.types import NodeId
from neuroshard.wire import Frame

SLOW = 24 * MIB  # bytes a second: slow enough to die in the middle


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
        line, _, rest = self._said.partition(b"\n")
        self._said = rest
        return line.decode()

    def kill(self) -> None:
        """At once, without a chance to say anything."""
        self._process.kill()


@asynccontextmanager
async def program(*arguments: object) -> AsyncGenerator[Program]:
    """Runs within the block at most."""
    command = [sys.executable, str(Path(__file__)), *map(str, arguments)]
    root = str(Path(__file__).parents[3])
    process = await trio.lowlevel.open_process(command, stdin=PIPE, stdout=PIPE, cwd=root)
    try:
        yield Program(process)
    finally:
        process.kill()
        with trio.CancelScope(shield=True):
            await process.wait()
            for stream in (process.stdin, process.stdout):
                assert stream is not None
                await stream.aclose()


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


async def _live(arguments: Sequence[str]) -> None:
    number, port, *question = arguments
    async with (
        node(int(number), replace(LOOPBACK, port=int(port)), pacer=UploadPacer(SLOW)) as here,
        anyio.create_task_group() as tasks,
    ):

        async def hold(_: NodeId, __: Frame) -> Frame:
            _say("asked")
            await anyio.sleep_forever()
            raise AssertionError

        here.server.serve("hold", hold, LIMITS, 16)
        _say(str(here.pool.endpoint()[1]))
        if question:
            tasks.start_soon(_ask, here, *question)
        await anyio.to_thread.run_sync(sys.stdin.read, abandon_on_cancel=True)
        tasks.cancel_scope.cancel()


async def _ask(here: Node, port: str, kind: str, mebibytes: str) -> None:
    frame = frame_of(bytes(int(mebibytes) * MIB), kind)
    answer = await here.pool.request(
        identity_of(1).node_id, ("127.0.0.1", int(port)), frame, LIMITS, timeout_seconds=60
    )
    _say(answer.kind)


if __name__ == "__main__":
    trio.run(_live, sys.argv[1:])
