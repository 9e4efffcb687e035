"""A node of the pool in a process of its own, so that it can die like one. It ends when its standard input does.

pool_program.py NUMBER PORT                        says where it listens, and answers
pool_program.py NUMBER PORT ASKED KIND MEBIBYTES   asks node 1, which listens at port ASKED, and says the answer
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

import anyio
import trio
from pool_nodes import LIMITS, LOOPBACK, MIB, Node, frame_of, identity_of, node

from neuroshard.messages import Frame
from neuroshard.network.limits import UploadPacer
from neuroshard.types import NodeId

SLOW = 24 * MIB  # bytes a second: slow enough to die in the middle


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
