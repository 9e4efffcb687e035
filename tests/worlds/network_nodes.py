"""Nodes over libp2p and nodes of the bulk pool on loopback, lines that break on demand, and hostile peers.

Real: the nodes, the pool, their sockets, keys and encryption; of the pair in memory only the multiplexer. Simulated:
the damage to a line, the hostile peer, which speaks the protocol by hand, and the line between the ends in memory.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from typing import Any, TypeAlias

import anyio
import trio
from libp2p.connection_types import ConnectionType
from libp2p.io.exceptions import ConnectionClosedError
from libp2p.network.connection.raw_connection import RawConnection

from neuroshard.identity import NodeIdentity
from neuroshard.messages import DType, Frame, FrameLimits, TensorPart, TensorSpec
from neuroshard.network import Network
from neuroshard.network.libp2p import NetworkOptions, NetworkParts, libp2p_network
from neuroshard.network.libp2p.bodies import BodyStream, dialled, upgraded_for_bodies
from neuroshard.network.libp2p.muxer import BoundedMuxer, MuxerOptions
from neuroshard.network.libp2p.peer_limits import StreamAdmission, contain_errors
from neuroshard.network.libp2p.places import ConnectionAdmission
from neuroshard.network.libp2p.sockets import BoundListener, SocketBytes
from neuroshard.network.libp2p.streams import RoundTrips
from neuroshard.network.libp2p.tls import TlsConnection
from neuroshard.network.libp2p.upgrading import NodeUpgrader, key_pair_of
from neuroshard.network.limits import ByteBudget, UploadPacer
from neuroshard.network.pool import BulkPool, PoolOptions, bulk_pool
from neuroshard.network.pool.greeting import greet_as_dialler, receive_bytes
from neuroshard.network.pool.options import ConnectionLostError
from neuroshard.network.pool.transfers import HEADER_BYTES, PacketHeader, PacketKind, packet, parse_header
from neuroshard.network.reputation import Reputation
from neuroshard.network.serving import RequestServer
from neuroshard.types import NodeId
from tests.worlds.claims import identity_of

LOOPBACK = NetworkOptions(host="127.0.0.1")
TEST_SECONDS = 280  # just before the limit of pytest: how long a scenario takes says nothing on a busy machine


def run(scenario: Callable[..., Awaitable[Any]], *arguments: Any, clock: trio.abc.Clock | None = None) -> None:
    """Run a scenario in trio, with logs as a node has them.

    With a virtual clock only pytest limits the time: while a worker thread loads libp2p and nothing else waits, the
    clock would jump to any other limit.
    """
    if not logging.getLogger().handlers:
        logging.getLogger().addHandler(logging.NullHandler())

    async def limited() -> None:
        with trio.fail_after(TEST_SECONDS if clock is None else inf):
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


MIB = 1024 * 1024
LIMITS = FrameLimits(max_body_bytes=256 * MIB)
POOL_LOOPBACK = PoolOptions()
Endpoint: TypeAlias = tuple[str, int]


def upgrader_of(identity: NodeIdentity) -> NodeUpgrader:
    return NodeUpgrader(
        key_pair_of(identity.key),
        ConnectionAdmission(),
        MuxerOptions(StreamAdmission(), now=time.time),
        lambda _: True,
    )


class Door:
    """Connections of a pool come and go here, with real sockets and upgrades, but without any for streams."""

    def __init__(self, identity: NodeIdentity, listener: BoundListener) -> None:
        self._upgrader = upgrader_of(identity)
        self._listener = listener
        self.endpoints: dict[NodeId, Endpoint] = {}
        self.pool: BulkPool | None = None

    def endpoint(self) -> Endpoint:
        return "127.0.0.1", self._listener.port

    async def open_to(self, peer: NodeId) -> BodyStream:
        if peer not in self.endpoints:
            raise ConnectionLostError("nobody knows where it listens")
        return await upgraded_for_bodies(self._upgrader, peer, await dialled(self.endpoints[peer]))

    async def run(self) -> None:
        try:
            await self._listener.serve(self.accept)
        finally:
            with anyio.CancelScope(shield=True):
                await self._listener.close()

    async def accept(self, stream: trio.SocketStream) -> None:
        await contain_errors(self._serve(SocketBytes(stream)), "A connection")

    async def _serve(self, raw: SocketBytes) -> None:
        try:
            with anyio.fail_after(10):
                conn = await self._upgrader.upgrade_accepted(RawConnection(raw, initiator=False))
            assert isinstance(conn, TlsConnection)
            assert self.pool is not None
            await self.pool.welcome(NodeId(str(conn.get_remote_peer())), BodyStream(conn, raw))
        finally:
            raw.cut()


def tensor(data: bytes, dtype: DType = "uint8", name: str = "x") -> TensorPart:
    return TensorPart(TensorSpec(name, dtype, (len(data),)), data)


def frame_of(data: bytes, kind: str = "echo") -> Frame:
    return Frame(kind, {"n": 1}, (tensor(data),))


@dataclass
class Node:
    identity: NodeIdentity
    server: RequestServer
    pool: BulkPool
    door: Door
    budget: ByteBudget
    reputation: Reputation
    heard: list[Frame] = field(default_factory=list)

    @property
    def id(self) -> NodeId:
        return self.identity.node_id

    async def ask(
        self, peer: Node, frame: Frame, reply: FrameLimits = LIMITS, *, via: Endpoint | None = None, timeout: float = 50
    ) -> Frame:
        self.door.endpoints[peer.id] = via or peer.door.endpoint()
        return await self.pool.request(peer.id, frame, reply, timeout_seconds=timeout)

    async def ask_at(self, peer: NodeId, endpoint: Endpoint, frame: Frame) -> Frame:
        self.door.endpoints[peer] = endpoint
        return await self.pool.request(peer, frame, LIMITS, timeout_seconds=50)

    def received_from(self, peer: NodeId) -> int:
        return self.pool.traffic()[peer].bytes_received


@asynccontextmanager
async def node(
    number: int,
    options: PoolOptions = POOL_LOOPBACK,
    *,
    budget: ByteBudget | None = None,
    pacer: UploadPacer | None = None,
    port: int = 0,
) -> AsyncGenerator[Node]:
    """A node that answers "echo" with the same tensors and "swallow" with none."""
    identity, server = identity_of(number), RequestServer()
    budget, reputation = budget or ByteBudget(512 * MIB, 256 * MIB), Reputation(anyio.current_time)
    door = Door(identity, await BoundListener.open("127.0.0.1", port))
    async with (
        bulk_pool(
            identity.node_id, server, door.open_to, options, budget=budget, pacer=pacer, reputation=reputation
        ) as pool,
        anyio.create_task_group() as tasks,
    ):
        door.pool = pool
        tasks.start_soon(door.run)
        made = Node(identity, server, pool, door, budget, reputation)

        async def echo(_: NodeId, request: Frame) -> Frame:
            made.heard.append(Frame(request.kind, request.header))
            return Frame("answer", request.header, request.tensors)

        async def swallow(_: NodeId, request: Frame) -> Frame:
            made.heard.append(Frame(request.kind, request.header))
            return Frame("answer")

        server.serve("echo", echo, LIMITS, 16)
        server.serve("swallow", swallow, LIMITS, 16)
        try:
            yield made
        finally:
            tasks.cancel_scope.cancel()


@asynccontextmanager
async def two_nodes(
    options: PoolOptions = POOL_LOOPBACK, listener_options: PoolOptions | None = None
) -> AsyncGenerator[tuple[Node, Node]]:
    async with node(1, options) as asker, node(2, listener_options or options) as answerer:
        yield asker, answerer


class Line:
    """Passes connections on, counts bytes, and can be cut."""

    def __init__(self, target: Endpoint) -> None:
        self.target = target
        self.endpoint: Endpoint = ("127.0.0.1", 0)
        self.bytes_there = 0
        self.bytes_back = 0
        self.connections = 0
        self.is_down = False
        self.is_silent = False
        self.stalled: set[int] = set()  # connections that are open and carry nothing
        self._open: list[trio.SocketStream] = []

    async def run(self, *, task_status: trio.TaskStatus[None]) -> None:
        async with trio.open_nursery() as nursery:
            listeners = await nursery.start(partial(trio.serve_tcp, self._pass_on, 0, host="127.0.0.1"))
            self.endpoint = ("127.0.0.1", listeners[0].socket.getsockname()[1])
            task_status.started()

    def cut(self, which: int | None = None) -> None:
        """Reset all connections, or one of them."""
        for stream in tuple(self._open) if which is None else self._open[2 * which : 2 * which + 2]:
            # a reset, so that nothing that is on its way still arrives
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            stream.socket.close()

    async def _pass_on(self, near: trio.SocketStream) -> None:
        if self.is_down:
            near.socket.close()
            return
        number = self.connections
        self.connections += 1
        try:
            far = await trio.open_tcp_stream(*self.target)
        except OSError:
            near.socket.close()
            return
        self._open += [near, far]
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._copy, near, far, nursery.cancel_scope, number, True)
                nursery.start_soon(self._copy, far, near, nursery.cancel_scope, number, False)
        finally:
            self._open = [stream for stream in self._open if stream not in {near, far}]
            near.socket.close()
            far.socket.close()

    async def _copy(
        self, source: trio.SocketStream, target: trio.SocketStream, both: trio.CancelScope, number: int, there: bool
    ) -> None:
        try:
            while data := await source.receive_some(256 * 1024):
                while self.is_silent or number in self.stalled:
                    await trio.sleep(0.005)
                if there:
                    self.bytes_there += len(data)
                else:
                    self.bytes_back += len(data)
                await target.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return
        finally:
            both.cancel()


@asynccontextmanager
async def line_to(target: Endpoint) -> AsyncGenerator[Line]:
    async with trio.open_nursery() as nursery:
        line = Line(target)
        await nursery.start(line.run)
        yield line
        nursery.cancel_scope.cancel()


class Stranger:
    """A peer that speaks the protocol by hand, so that it can break it."""

    def __init__(self, stream: BodyStream) -> None:
        self.stream = stream

    async def send(
        self, kind: PacketKind, transfer: int, payload: bytes = b"", extra: int = 0, serial: int = 0
    ) -> None:
        await self.stream.send_all(packet(kind, transfer, payload, extra=extra, serial=serial))

    async def receive(self) -> tuple[PacketHeader, bytes]:
        """The next packet."""
        header = parse_header(await receive_bytes(self.stream, HEADER_BYTES))
        return header, await receive_bytes(self.stream, header.length)


async def before_greeting(peer: Node, number: int = 9) -> BodyStream:
    """An authenticated connection of an identity, before any greeting."""
    return await upgraded_for_bodies(upgrader_of(identity_of(number)), peer.id, await dialled(peer.door.endpoint()))


@asynccontextmanager
async def stranger(peer: Node, number: int = 9, session: int = 0) -> AsyncGenerator[Stranger]:
    """A welcome connection of an identity that misbehaves."""
    stream = await before_greeting(peer, number)
    try:
        await greet_as_dialler(stream, session)
        yield Stranger(stream)
    finally:
        stream.close()
