"""Who holds memory here must send, and soon when others wait for that memory."""

from __future__ import annotations

import tracemalloc
from typing import cast

import anyio
import trio
from trio.testing import MockClock

from neuroshard.messages import CHUNK_BYTES, Frame, FrameDecoder, FrameHead, FrameLimits, TensorPart, TensorSpec, encode
from neuroshard.network import Reputation
from neuroshard.network.limits import ByteBudget, UploadPacer
from neuroshard.network.pool.connection import PoolConnection
from neuroshard.network.pool.options import PoolOptions
from neuroshard.network.pool.receiving import Receiver, ReceivingHooks, Resources
from neuroshard.network.pool.transfers import BLOCK_BYTES, PacketHeader, PacketKind
from neuroshard.network.serving import RequestServer
from neuroshard.types import NodeId
from tests.worlds.network_nodes import MIB, frame_of, run, two_nodes

LARGE_BYTES = 96 * MIB
SLOW, OTHER, THIRD = NodeId("slow"), NodeId("other"), NodeId("third")


class Silent:
    """A connection that nobody looks at."""

    number = 1

    def answer(self, packet: bytes) -> None:
        pass


def head_of(size: int) -> FrameHead:
    limits = FrameLimits(max_body_bytes=size)
    decoder = FrameDecoder(lambda _: limits)
    decoder.feed(encode(Frame("x", {}, (TensorPart(TensorSpec("x", "uint8", (size,)), bytes(size)),))).head)
    assert decoder.head is not None
    return decoder.head


def test_a_block_now_and_then_holds_memory_only_until_others_want_it() -> None:
    size = 8 * CHUNK_BYTES

    async def main() -> None:
        budget = ByteBudget(size, size)
        async with anyio.create_task_group() as tasks:
            pacer, reputation = UploadPacer(), Reputation(anyio.current_time)
            shared = Resources(RequestServer(), budget, pacer, reputation, PoolOptions(), tasks)
            hooks = ReceivingHooks(
                limits_of=lambda _, __: FrameLimits(max_body_bytes=size),
                has_room=lambda: True,
                is_answering=lambda _: False,
                complete=lambda *_: None,
                failed=lambda _, __: None,
                report=lambda _: None,
                cut=lambda _: None,
            )
            receiver, connection = Receiver(SLOW, shared, hooks), cast("PoolConnection", Silent())
            receiver.offered(connection, PacketHeader(PacketKind.OFFER, 1), head_of(size))
            for block in range(4):
                await anyio.sleep(100)
                piece = PacketHeader(PacketKind.PIECE, 1, BLOCK_BYTES, block * BLOCK_BYTES)
                memory = receiver.place(connection, piece)
                assert memory is not None
                receiver.filled(connection, piece)
                assert not receiver.is_overdue(anyio.current_time())
            tasks.start_soon(budget.reserve, OTHER, 1)
            await trio.testing.wait_all_tasks_blocked()
            assert receiver.is_overdue(anyio.current_time())
            receiver.drop_all()
            await trio.testing.wait_all_tasks_blocked()
            assert budget.used_by(OTHER) == 1

            receiver.offered(connection, PacketHeader(PacketKind.OFFER, 2), head_of(CHUNK_BYTES))
            assert receiver.request_count == 1
            tasks.start_soon(budget.reserve, THIRD, size)
            await anyio.sleep(25)
            assert not receiver.is_overdue(anyio.current_time())  # a MiB may take 26 s even so
            await anyio.sleep(2)
            assert receiver.is_overdue(anyio.current_time())
            tasks.cancel_scope.cancel()

    trio.run(main, clock=MockClock(autojump_threshold=0))


def test_a_large_tensor_is_in_memory_once_at_either_end() -> None:
    """Both ends are in this process: while it travels, there is the sender's copy and one more."""

    async def scenario() -> None:
        frame = frame_of(bytes(LARGE_BYTES), "swallow")
        async with two_nodes() as (a, b):
            await a.ask(b, frame_of(b"first"))
            tracemalloc.start()
            try:
                await a.ask(b, frame)
                _, peak = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
            assert LARGE_BYTES <= peak < 1.1 * LARGE_BYTES

    run(scenario)
