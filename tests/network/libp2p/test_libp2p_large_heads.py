from __future__ import annotations

from typing import Any

import anyio
import trio

from neuroshard.messages import Frame, FrameLimits
from neuroshard.network.libp2p.transport import SMALL_HEAD_BYTES, RequestStreams
from neuroshard.network.limits import ByteBudget, frame_budget
from neuroshard.network.pool.exchange import encoded
from neuroshard.network.serving import RequestServer
from neuroshard.types import NodeId
from tests.worlds.network_nodes import connected, run

STREAMS = 4
ROOM = 100_000


async def length(_sender: NodeId, request: Frame) -> Frame:
    await anyio.lowlevel.checkpoint()
    return Frame("length", {"length": len(str(request.header["text"]))})


def test_large_heads_wait_for_their_memory_and_small_ones_pass_by() -> None:
    async def scenario() -> None:
        heads, server = ByteBudget(ROOM, ROOM), RequestServer()
        server.serve("length", length, FrameLimits(), 16)
        exchange = RequestStreams(server, frame_budget(), lambda *_: None, heads)
        large = (await encoded(Frame("length", {"text": "x" * 60_000}))).head
        small = (await encoded(Frame("length", {"text": "x" * 100}))).head
        async with connected() as (first, second), anyio.create_task_group() as tasks:

            async def opened(number: int, data: bytes) -> Any:
                stream = await first.open_stream()
                await stream.write(data)
                accepted: Any = await second.accept_stream()
                tasks.start_soon(exchange.answer, accepted, NodeId(f"peer {number}"))
                return stream

            held = [await opened(number, large[:1000]) for number in range(STREAMS)]
            await trio.testing.wait_all_tasks_blocked()
            assert 60_000 < heads.used <= ROOM
            assert heads.waiting == STREAMS - 1
            passing = await opened(STREAMS, small)
            assert len(small) < SMALL_HEAD_BYTES
            assert b"length" in await passing.read()
            for left, stream in reversed(list(enumerate(held))):
                await stream.write(large[1000:], is_last=True)
                assert heads.used <= ROOM
                if left == 0:
                    for each in held:
                        assert b"length" in await each.read()
            passing.abandon()
            await trio.testing.wait_all_tasks_blocked()
            assert (heads.used, heads.waiting) == (0, 0)
            tasks.cancel_scope.cancel()

    run(scenario)
