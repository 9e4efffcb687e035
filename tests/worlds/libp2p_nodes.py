"""Nodes over libp2p on loopback, and the two ends of a multiplexed connection in memory.

Real: the nodes, their sockets and keys; of the pair in memory only the multiplexer. Simulated: the line between the two
ends in memory, and how long a round trip over it takes.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import anyio
import trio
from libp2p.connection_types import ConnectionType
from libp2p.io.exceptions import ConnectionClosedError

from neuroshard.messages import Frame
from neuroshard.network import Network
from neuroshard.network.libp2p import NetworkOptions, NetworkParts, libp2p_network
from neuroshard.network.libp2p.muxer import BoundedMuxer, MuxerOptions
from neuroshard.network.libp2p.streams import RoundTrips
from neuroshard.types import NodeId
from tests.worlds.claims import identity_of

LOOPBACK = NetworkOptions(host="127.0.0.1")
TEST_SECONDS = 280  # just before the limit of pytest: how long a scenario takes says nothing on a busy machine


def run(scenario: Callable[..., Awaitable[Any]], *arguments: Any, clock: trio.abc.Clock | None = None) -> None:
    """Run a scenario in trio, with logs as a node has them."""
    if not logging.getLogger().handlers:
        logging.getLogger().addHandler(logging.NullHandler())

    async def limited() -> None:
        with trio.fail_after(TEST_SECONDS if clock is None else 100_000):
            await scenario(*arguments)

    trio.run(limited, clock=clock)


@asynccontextmanager
async def nodes(
    count: int,
    options: NetworkOptions = LOOPBACK,
    parts: Callable[[int], NetworkParts] = lambda _: NetworkParts(),
    first: int = 1,
) -> AsyncIterator[tuple[Network, ...]]:
    """Networks of `count` nodes that do not know each other yet."""
    async with AsyncExitStack() as stack:
        opened = [
            await stack.enter_async_context(libp2p_network(identity_of(first + i), replace(options), parts=parts(i)))
            for i in range(count)
        ]
        yield tuple(opened)


def address_of(network: Network) -> str:
    """Where a node on loopback is reached."""
    return network.transport.addresses()[0]


def port_of(network: Network) -> int:
    """Its TCP port."""
    return int(address_of(network).split("/")[4])


async def echo(_: NodeId, frame: Frame) -> Frame:
    """Answers with the question."""
    return frame


async def lives(asker: Network, asked: Network) -> None:
    """The node that was attacked still answers."""
    await asker.transport.connect(address_of(asked))
    reply = await asker.transport.request(asked.transport.local_id, Frame("echo", {"alive": True}), timeout_seconds=10)
    assert reply.header == {"alive": True}


class SlowLine(RoundTrips):
    """Round trips of always this length, whatever is measured in memory."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        super().add(seconds)

    def add(self, seconds: float) -> None:
        """Nothing."""


class Pipe:
    """One end of a secured connection in memory; up to 64 messages wait for the other end."""

    def __init__(self, is_initiator: bool, send: Any, receive: Any) -> None:
        self.is_initiator = is_initiator
        self._send, self._receive = send, receive
        self.is_cut = False

    async def read(self, n: int | None = None) -> bytes:
        try:
            data: bytes = await self._receive.receive()
        except (trio.EndOfChannel, trio.ClosedResourceError):
            raise ConnectionClosedError("closed") from None
        return data

    async def write(self, data: bytes) -> None:
        if self.is_cut:
            return
        try:
            await self._send.send(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            raise ConnectionClosedError("closed") from None

    async def close(self) -> None:
        self._send.close()
        self._receive.close()

    def get_remote_address(self) -> tuple[str, int] | None:
        return None

    def get_connection_type(self) -> ConnectionType:
        return ConnectionType.DIRECT


def pipes() -> tuple[Pipe, Pipe]:
    there = trio.open_memory_channel[bytes](64)
    back = trio.open_memory_channel[bytes](64)
    return Pipe(True, there[0], back[1]), Pipe(False, back[0], there[1])


@asynccontextmanager
async def connected(options: MuxerOptions | None = None) -> AsyncIterator[tuple[BoundedMuxer, BoundedMuxer]]:
    first, second = pipes()
    muxers = BoundedMuxer(first, "b", options), BoundedMuxer(second, "a", options)
    async with anyio.create_task_group() as tasks:
        for muxer in muxers:
            tasks.start_soon(muxer.start)
        for muxer in muxers:
            await muxer.event_started.wait()
        yield muxers
        for muxer in muxers:
            await muxer.close()
