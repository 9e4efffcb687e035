"""A node over libp2p and the pool in a process of its own: `bulk_program.py NUMBER PORT`.

It says its address, answers "echo", says "asked" when it is asked to "hold", and ends when its standard input does.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

import anyio
import trio
from libp2p_nodes import LOOPBACK, address_of, echo, nodes

from neuroshard.messages import Frame, FrameLimits
from neuroshard.types import NodeId

MIB = 1024 * 1024
LIMITS = FrameLimits(max_body_bytes=32 * MIB)
SLOW = 24 * MIB  # bytes a second: slow enough to die in the middle


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


async def _hold(_: NodeId, __: Frame) -> Frame:
    _say("asked")
    await anyio.sleep_forever()
    raise AssertionError


async def _live(arguments: Sequence[str]) -> None:
    number, port = map(int, arguments)
    async with nodes(1, replace(LOOPBACK, port=port, upload_bytes_per_second=SLOW), first=number) as (here,):
        here.transport.serve("echo", echo, LIMITS)
        here.transport.serve("hold", _hold, LIMITS)
        _say(address_of(here))
        await anyio.to_thread.run_sync(sys.stdin.read, abandon_on_cancel=True)


if __name__ == "__main__":
    trio.run(_live, sys.argv[1:])
