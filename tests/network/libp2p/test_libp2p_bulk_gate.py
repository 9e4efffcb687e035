"""A node whose owner lets nothing large pass tells others so before they have sent it, by the pool and by libp2p."""

from __future__ import annotations

from dataclasses import replace

import anyio
import pytest

from neuroshard.messages import Frame, FrameLimits, TensorPart, TensorSpec
from neuroshard.network import PeerRefusedError, RequestRefusedError
from neuroshard.network.libp2p import NetworkOptions, NetworkParts
from neuroshard.network.limits import frame_budget
from neuroshard.network.pool.transfers import BLOCK_BYTES, EAGER_BLOCKS
from neuroshard.network.transfer_policy import BULK_BYTES, PolicyTransport, TransferPolicy, TransfersStoppedError
from neuroshard.types import NodeId
from tests.worlds.clock import until
from tests.worlds.network_nodes import LOOPBACK, address_of, nodes, run

PART_BYTES = 4 << 20
TRIES = 5


def part(size: int) -> Frame:
    return Frame("part", {}, (TensorPart(TensorSpec("x", "uint8", (size,)), bytes(size)),))


@pytest.mark.parametrize(
    ("options", "most_bytes"),
    [(LOOPBACK, EAGER_BLOCKS * BLOCK_BYTES), (replace(LOOPBACK, body_connections=False), 256 << 10)],
    ids=["pool", "libp2p"],
)
def test_what_is_large_is_refused_before_it_comes_and_what_is_small_goes_on(
    options: NetworkOptions, most_bytes: int
) -> None:
    """Only what its sender does not wait with has come by then."""

    async def scenario() -> None:
        async with nodes(2, options) as (a, b):
            gate, come, admitted = TransferPolicy(), list[int](), list[int]()
            gated = PolicyTransport(a.transport, gate)

            async def take(_: NodeId, request: Frame) -> Frame:
                await anyio.lowlevel.checkpoint()
                come.append(len(request.tensors[0].data))
                return Frame("part")

            gated.serve("part", take, FrameLimits(max_body_bytes=PART_BYTES), admit=admitted.append)
            await b.transport.connect(address_of(a))
            await a.transport.connect(address_of(b))

            async def send(size: int) -> None:
                await b.transport.request(gated.local_id, part(size), timeout_seconds=20)

            gate.close("The month's 50 GB are used up.")
            for _ in range(TRIES):
                with pytest.raises(PeerRefusedError, match="used up"):
                    await send(PART_BYTES)
            (connection,) = a.transport.connections()
            assert connection.bytes_received < TRIES * (most_bytes + (64 << 10))
            assert come == admitted == []
            await send(BULK_BYTES)
            gate.open()
            await send(PART_BYTES)
            assert come == admitted == [BULK_BYTES, PART_BYTES]

    run(scenario)


@pytest.mark.parametrize("body_connections", [True, False], ids=["pool", "libp2p"])
def test_a_line_that_becomes_metered_stops_a_transfer_and_works_again_when_it_is_not(body_connections: bool) -> None:
    """The sender stops in the middle, and the receiver frees the memory."""

    async def scenario() -> None:
        options = replace(LOOPBACK, body_connections=body_connections, upload_bytes_per_second=2 << 20)
        budget = frame_budget()
        async with nodes(1, options) as (a,), nodes(1, options, lambda _: NetworkParts(budget=budget), 2) as (b,):
            gate, come = TransferPolicy(), list[int]()
            gated = PolicyTransport(a.transport, gate)

            async def take(_: NodeId, request: Frame) -> Frame:
                await anyio.lowlevel.checkpoint()
                come.append(len(request.tensors[0].data))
                return Frame("part")

            b.transport.serve("part", take, FrameLimits(max_body_bytes=2 * PART_BYTES))
            peer = await a.transport.connect(address_of(b))

            async def meter() -> None:
                await until(lambda: a.transport.connections()[0].bytes_sent > 1 << 20)
                gate.close("The connection is metered.")

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(meter)
                with pytest.raises(TransfersStoppedError, match="metered"):
                    await gated.request(peer, part(2 * PART_BYTES), timeout_seconds=60)
            await until(lambda: budget.used == 0)
            assert a.transport.connections()[0].bytes_sent < PART_BYTES
            await gated.request(peer, part(BULK_BYTES), timeout_seconds=60)
            gate.open()
            await gated.request(peer, part(PART_BYTES), timeout_seconds=60)
            assert come == [BULK_BYTES, PART_BYTES]

    run(scenario)


def test_an_admission_of_its_own_is_asked_too() -> None:
    async def scenario() -> None:
        async with nodes(2) as (a, b):

            def admit(size: int) -> None:
                raise RequestRefusedError(f"{size} bytes are too many.")

            async def take(_: NodeId, request: Frame) -> Frame:
                raise AssertionError(request)

            PolicyTransport(a.transport, TransferPolicy()).serve(
                "part", take, FrameLimits(max_body_bytes=10), admit=admit
            )
            await b.transport.connect(address_of(a))
            with pytest.raises(PeerRefusedError, match="8 bytes are too many"):
                await b.transport.request(a.transport.local_id, part(8), timeout_seconds=20)

    run(scenario)
