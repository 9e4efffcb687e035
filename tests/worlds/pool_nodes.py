"""Nodes of the bulk pool on loopback, lines between them that break on demand, and hostile peers.

Real: the pool, its sockets and its encryption. Simulated: the damage to a line, and the hostile peer, which speaks the
protocol by hand.
"""

from __future__ import annotations

import socket
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

import anyio
import trio

from neuroshard.identity import NodeIdentity
from neuroshard.messages import DType, Frame, FrameLimits, TensorPart, TensorSpec
from neuroshard.network.limits import ByteBudget, UploadPacer
from neuroshard.network.pool import BulkPool, Endpoint, PoolOptions, bulk_pool, tcp
from neuroshard.network.pool.secure_stream import (
    GreetingVerdict,
    SecureStream,
    certificate_digest,
    dialler_context,
    greet_as_dialler,
)
from neuroshard.network.pool.transfers import HEADER_BYTES, PacketHeader, PacketKind, packet, parse_header
from neuroshard.network.reputation import Reputation
from neuroshard.network.serving import RequestServer
from neuroshard.types import NodeId
from tests.worlds.claims import identity_of

MIB = 1024 * 1024
LIMITS = FrameLimits(max_body_bytes=256 * MIB)
DEADLINE_SECONDS = 280.0  # just before the limit of pytest: how long a scenario takes says nothing on a busy machine
LOOPBACK = PoolOptions(host="127.0.0.1")


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def within_time() -> None:
        with anyio.fail_after(DEADLINE_SECONDS):
            await scenario()

    trio.run(within_time)


def tensor(data: bytes, dtype: DType = "uint8", name: str = "x") -> TensorPart:
    return TensorPart(TensorSpec(name, dtype, (len(data),)), data)


def frame_of(data: bytes, kind: str = "echo") -> Frame:
    return Frame(kind, {"n": 1}, (tensor(data),))


@dataclass
class Node:
    identity: NodeIdentity
    server: RequestServer
    pool: BulkPool
    budget: ByteBudget
    reputation: Reputation
    heard: list[Frame] = field(default_factory=list)

    @property
    def id(self) -> NodeId:
        return self.identity.node_id

    async def ask(
        self, peer: Node, frame: Frame, reply: FrameLimits = LIMITS, *, via: Endpoint | None = None, timeout: float = 50
    ) -> Frame:
        endpoint = via or peer.pool.endpoint()
        return await self.pool.request(peer.id, endpoint, frame, reply, timeout_seconds=timeout)

    def received_from(self, peer: NodeId) -> int:
        return self.pool.traffic()[peer].bytes_received


@asynccontextmanager
async def node(
    number: int,
    options: PoolOptions = LOOPBACK,
    *,
    budget: ByteBudget | None = None,
    pacer: UploadPacer | None = None,
) -> AsyncGenerator[Node]:
    """A node that answers "echo" with the same tensors and "swallow" with none."""
    identity, server = identity_of(number), RequestServer()
    budget, reputation = budget or ByteBudget(512 * MIB, 256 * MIB), Reputation(anyio.current_time)
    async with bulk_pool(identity, server, options, budget=budget, pacer=pacer, reputation=reputation) as pool:
        made = Node(identity, server, pool, budget, reputation)

        async def echo(_: NodeId, request: Frame) -> Frame:
            made.heard.append(Frame(request.kind, request.header))
            return Frame("answer", request.header, request.tensors)

        async def swallow(_: NodeId, request: Frame) -> Frame:
            made.heard.append(Frame(request.kind, request.header))
            return Frame("answer")

        server.serve("echo", echo, LIMITS, 16)
        server.serve("swallow", swallow, LIMITS, 16)
        yield made


@asynccontextmanager
async def two_nodes(
    options: PoolOptions = LOOPBACK, listener_options: PoolOptions | None = None
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
        self.connections += 1
        try:
            far = await trio.open_tcp_stream(*self.target)
        except OSError:
            near.socket.close()
            return
        self._open += [near, far]
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._copy, near, far, nursery.cancel_scope, True)
                nursery.start_soon(self._copy, far, near, nursery.cancel_scope, False)
        finally:
            self._open = [stream for stream in self._open if stream not in {near, far}]
            near.socket.close()
            far.socket.close()

    async def _copy(
        self, source: trio.SocketStream, target: trio.SocketStream, both: trio.CancelScope, there: bool
    ) -> None:
        try:
            while data := await source.receive_some(256 * 1024):
                while self.is_silent:
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

    def __init__(self, stream: SecureStream) -> None:
        self.stream = stream

    async def send(
        self, kind: PacketKind, transfer: int, payload: bytes = b"", extra: int = 0, serial: int = 0
    ) -> None:
        await self.stream.send_all(packet(kind, transfer, payload, extra=extra, serial=serial))

    async def receive(self) -> tuple[PacketHeader, bytes]:
        """Return the next packet. Requests for more connections are ignored."""
        while True:
            header = parse_header(await self.stream.receive_bytes(HEADER_BYTES))
            payload = await self.stream.receive_bytes(header.length)
            if header.kind is not PacketKind.WANT:
                return header, payload


async def secured(target: Endpoint) -> SecureStream:
    """A TLS connection before any greeting."""
    raw = await tcp.dial(target, None)
    stream = SecureStream(dialler_context().wrap_socket(raw, do_handshake_on_connect=False))
    await stream.handshake()
    return stream


def digest_of(stream: SecureStream) -> bytes:
    return certificate_digest(stream.socket.getpeercert(binary_form=True) or b"")


@asynccontextmanager
async def stranger(peer: Node, number: int = 9, session: int = 0) -> AsyncGenerator[Stranger]:
    """A welcome connection of an identity that misbehaves."""
    async with AsyncExitStack() as stack:
        stream = await secured(peer.pool.endpoint())
        stack.callback(stream.close)
        reception = await greet_as_dialler(stream, identity_of(number).key, peer.id, digest_of(stream), session)
        assert reception.verdict is GreetingVerdict.WELCOME
        yield Stranger(stream)
