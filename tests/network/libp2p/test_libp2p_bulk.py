from __future__ import annotations

from dataclasses import replace

import anyio
import pytest
import trio
from libp2p_nodes import LOOPBACK, address_of, echo, nodes, run, until

from neuroshard.network import Network, PeerRefusedError, RequestRefusedError
from neuroshard.network.libp2p import NetworkParts
from neuroshard.network.pacing import UploadPacer
from neuroshard.types import NodeId
from neuroshard.wire import Frame, FrameLimits, TensorPart, TensorSpec

MIB = 1024 * 1024
LIMITS = FrameLimits(max_body_bytes=32 * MIB)
WITHOUT_POOL = replace(LOOPBACK, pool_port=None)


def frame_of(size: int) -> Frame:
    return Frame("echo", {}, (TensorPart(TensorSpec("x", "uint8", (size,)), bytes(range(256)) * (size // 256)),))


async def there_and_back(asker: Network, asked: Network, size: int) -> None:
    frame = frame_of(size)
    reply = await asker.transport.request(asked.transport.local_id, frame, reply=LIMITS, timeout_seconds=20)
    assert bytes(reply.tensors[0].data) == bytes(frame.tensors[0].data)


def test_large_tensors_take_direct_connections_and_small_ones_do_not() -> None:
    async def scenario() -> None:
        async with nodes(2) as (a, b):
            a.transport.serve("echo", echo, LIMITS)
            await b.transport.connect(address_of(a))
            await a.transport.connect(address_of(b))
            reply = await b.transport.request(a.transport.local_id, Frame("echo"), timeout_seconds=5)
            assert reply.tensors == ()
            assert b.transport.connections()[0].bulk_connections == 0
            await there_and_back(b, a, 8 * MIB)
            (connection,) = b.transport.connections()
            assert connection.bulk_connections > 0
            assert connection.bytes_sent > 8 * MIB
            assert connection.bytes_received > 8 * MIB

    run(scenario)


def test_refusals_come_through_the_pool_too() -> None:
    async def scenario() -> None:
        async with nodes(2) as (a, b):

            async def refuse(_: NodeId, frame: Frame) -> Frame:
                raise RequestRefusedError("not today")

            a.transport.serve("echo", refuse, LIMITS)
            await b.transport.connect(address_of(a))
            with pytest.raises(PeerRefusedError, match="not today"):
                await there_and_back(b, a, MIB)

    run(scenario)


@pytest.mark.parametrize("who", ["asker", "asked", "both"])
def test_without_a_pool_large_tensors_take_the_connection_there_is(who: str) -> None:
    async def scenario() -> None:
        first = WITHOUT_POOL if who != "asker" else LOOPBACK
        second = WITHOUT_POOL if who != "asked" else LOOPBACK
        async with nodes(1, first) as (a,), nodes(1, second, first=2) as (b,):
            a.transport.serve("echo", echo, LIMITS)
            await b.transport.connect(address_of(a))
            await there_and_back(b, a, 4 * MIB)
            assert b.transport.connections()[0].bulk_connections == 0
            assert b.transport.connections()[0].bytes_sent > 4 * MIB

    run(scenario)


@pytest.mark.parametrize("port", [1, 0, -5, 2**40, "80", None])
def test_a_pool_that_is_not_where_the_peer_says_is_done_without(port: object) -> None:
    async def scenario() -> None:
        async with nodes(1, WITHOUT_POOL) as (a,), nodes(1, first=2) as (b,):

            async def lie(_: NodeId, frame: Frame) -> Frame:
                return Frame("pool/endpoint", {"port": port})

            a.transport.serve("echo", echo, LIMITS)
            a.transport.serve("pool/endpoint", lie)
            await b.transport.connect(address_of(a))
            await there_and_back(b, a, MIB)
            assert b.transport.connections()[0].bulk_connections == 0

    run(scenario)


def test_the_upload_limit_holds_for_everything_that_is_sent() -> None:
    async def scenario() -> None:
        pacer = UploadPacer(4 * MIB)
        async with (
            nodes(1, WITHOUT_POOL) as (a,),
            nodes(1, WITHOUT_POOL, lambda _: NetworkParts(pacer=pacer), 2) as (b,),
        ):
            taken = anyio.Event()

            async def take(_: NodeId, frame: Frame) -> Frame:
                taken.set()
                return Frame("take")

            a.transport.serve("take", take, LIMITS)
            await b.transport.connect(address_of(a))
            began = trio.current_time()
            body = frame_of(6 * MIB).tensors
            await b.transport.request(a.transport.local_id, Frame("take", {}, body), timeout_seconds=20)
            assert 1.0 < trio.current_time() - began < 5
            await until(taken.is_set)

    run(scenario)
