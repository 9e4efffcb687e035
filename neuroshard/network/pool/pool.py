"""The pool: listens for peers, dials them, and asks them over as many connections as the line needs."""

from __future__ import annotations

import ssl
from collections import Counter
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from socket import socket
from typing import TypeVar

import anyio

from neuroshard.identity import NodeIdentity
from neuroshard.messages import Frame, FrameLimits
from neuroshard.network.limits import ByteBudget, UploadPacer
from neuroshard.network.pool import tcp
from neuroshard.network.pool.exchange import encoded
from neuroshard.network.pool.link import PeerLink
from neuroshard.network.pool.options import (
    ConnectionLostError,
    Endpoint,
    GreetingError,
    NotDeliveredError,
    PeerFullError,
    PeerTraffic,
    PoolOptions,
)
from neuroshard.network.pool.receiving import Resources
from neuroshard.network.pool.secure_stream import (
    GreetingVerdict,
    ListenerTls,
    Reception,
    SecureStream,
    Sessions,
    certificate_digest,
    dialler_context,
    greet_as_dialler,
    greet_as_listener,
)
from neuroshard.network.reputation import Reputation
from neuroshard.network.serving import RequestServer
from neuroshard.network.transport import RequestTimeoutError, TransportClosedError
from neuroshard.types import NodeId

_Key = TypeVar("_Key", bound=str)
BUSY_TICK_SECONDS = 0.25
IDLE_TICK_SECONDS = 1.0
MAX_HANDSHAKES = 64
MAX_HANDSHAKES_PER_ADDRESS = 16
MAX_LINKS = 512  # what was learned about lines is forgotten beyond that
NO_ROOM_PAUSE_SECONDS = 0.1  # when the system has no room for another socket
DEFAULT_BUDGET_BYTES = 512 * 1024 * 1024
DEFAULT_PEER_BUDGET_BYTES = 256 * 1024 * 1024


@asynccontextmanager
async def bulk_pool(
    identity: NodeIdentity,
    server: RequestServer,
    options: PoolOptions | None = None,
    *,
    budget: ByteBudget | None = None,
    pacer: UploadPacer | None = None,
    reputation: Reputation | None = None,
) -> AsyncGenerator[BulkPool]:
    """A pool that listens within the block; all its tasks and sockets end with it. Raises NetworkRefusedError."""
    async with anyio.create_task_group() as tasks:
        shared = Resources(
            server,
            budget or ByteBudget(DEFAULT_BUDGET_BYTES, DEFAULT_PEER_BUDGET_BYTES),
            pacer or UploadPacer(),
            reputation or Reputation(anyio.current_time),
            options or PoolOptions(),
            tasks,
        )
        pool = BulkPool(identity, shared)
        try:
            yield pool
        finally:
            pool.close()
            tasks.cancel_scope.cancel()


class BulkPool:
    """Made by `bulk_pool`. It reports misconduct of peers; the requesting code scores good answers and timeouts."""

    def __init__(self, identity: NodeIdentity, shared: Resources) -> None:
        self._identity = identity
        self._shared = shared
        self._tls = ListenerTls.create()
        self._dialler_tls = dialler_context()
        self._links: dict[NodeId, PeerLink] = {}
        self._inbound: Counter[NodeId] = Counter()  # admitted, open or about to be
        self._by_address: Counter[str] = Counter()
        self._shaking_hands: Counter[str] = Counter()
        self._turned_away = 0
        self._is_closed = False
        self._listener = tcp.listen((shared.options.host, shared.options.port))
        shared.tasks.start_soon(self._listen)
        shared.tasks.start_soon(self._tend)
        shared.tasks.start_soon(shared.verifier.run)

    def endpoint(self) -> Endpoint:
        """Address and port at which this pool listens."""
        host, port = self._listener.getsockname()[:2]
        return str(host), int(port)

    @property
    def connection_count(self) -> int:
        """Connections that are open, in both directions."""
        return sum(link.connection_count for link in self._links.values())

    @property
    def turned_away(self) -> int:
        """Connections that were closed before they carried anything: too many, too slow, no proof, not welcome."""
        return self._turned_away

    def traffic(self) -> Mapping[NodeId, PeerTraffic]:
        """Traffic of every peer with which there was any."""
        return {peer: link.traffic() for peer, link in self._links.items()}

    async def request(
        self,
        peer: NodeId,
        endpoint: Endpoint | None,
        frame: Frame,
        reply: FrameLimits | None = None,
        *,
        timeout_seconds: float,
    ) -> Frame:
        """Ask a peer and wait for its answer, which must keep the limits of `reply` (None: a header, no tensors).

        `endpoint` is where its pool listens; None when only the peer can dial. The tensors must not change meanwhile.
        The peer handles it at most once, whatever breaks, even if its process is started again meanwhile: while
        connections break and come back, both the request and its answer resume where they stopped. Hope for a peer ends
        1 to 3 s after its last connection when its port, once open, is closed now, so its process is gone; about
        `resume_seconds` after it when nothing answers. While a connection does not end, only time limits the waiting.

        Raises PeerUnreachableError (NotDeliveredError when the peer cannot have handled the request,
        RequestTimeoutError when time ran out), PeerRefusedError, WireError for an answer that breaks the limits, or
        TransportClosedError.
        """
        with anyio.move_on_after(timeout_seconds):
            data = await encoded(frame)
            if self._is_closed:
                raise TransportClosedError("This node's pool of connections is closed.")
            if peer == self._identity.node_id or self._shared.reputation.is_banned(peer):
                raise NotDeliveredError(f"Peer {peer} is this node itself, or banned.")
            return await self._link(peer).request(endpoint, data, reply or FrameLimits())
        raise RequestTimeoutError(f"Peer {peer} did not answer within {timeout_seconds:g} s.")

    def close(self) -> None:
        """Called at the end of the block: all requests raise TransportClosedError."""
        self._is_closed = True
        for link in self._links.values():
            link.close(TransportClosedError("This node's pool of connections was closed."))

    def _link(self, peer: NodeId) -> PeerLink:
        if peer not in self._links:
            if len(self._links) >= MAX_LINKS:
                self._forget_links()
            self._links[peer] = PeerLink(peer, self._shared, self._connect)
        return self._links[peer]

    def _forget_links(self) -> None:
        unused = sorted((link.busy_at, peer) for peer, link in self._links.items() if link.is_unused)
        for _, peer in unused[: MAX_LINKS // 4]:
            del self._links[peer]

    async def _tend(self) -> None:
        while True:
            now = anyio.current_time()
            for link in tuple(self._links.values()):
                link.tend(now)
            is_busy = any(link.is_busy for link in self._links.values())
            await anyio.sleep(BUSY_TICK_SECONDS if is_busy else IDLE_TICK_SECONDS)

    async def _connect(self, peer: NodeId, endpoint: Endpoint, session: int) -> tuple[SecureStream, Sessions]:
        """A connection to a peer that proved who it is. Raises ConnectionLostError."""
        with anyio.move_on_after(self._shared.options.handshake_seconds):
            raw = await tcp.dial(endpoint, self._shared.options.congestion_control)
            stream = _secured(raw, self._dialler_tls, is_listener=False)
            try:
                there = await self._prove(stream, peer, session)
            except BaseException:
                stream.close()
                raise
            return stream, Sessions(session, there)
        raise ConnectionLostError("no answer in time")

    async def _prove(self, stream: SecureStream, peer: NodeId, session: int) -> int:
        await stream.handshake()
        digest = certificate_digest(stream.socket.getpeercert(binary_form=True) or b"")
        reception = await greet_as_dialler(stream, self._identity.key, peer, digest, session)
        if reception.verdict is not GreetingVerdict.WELCOME:
            raise PeerFullError(f"the peer refused this node: {reception.verdict.name.lower()}")
        return reception.session

    async def _listen(self) -> None:
        with self._listener:
            while True:
                try:
                    raw, address = await tcp.accept_connection(self._listener)
                except OSError:
                    await anyio.sleep(NO_ROOM_PAUSE_SECONDS)
                    continue
                if self._has_room_for(address) and tcp.is_set_up(raw, self._shared.options.congestion_control):
                    self._shaking_hands[address] += 1
                    self._shared.tasks.start_soon(self._welcome, raw, address)
                else:
                    self._turned_away += 1
                    raw.close()
                await anyio.lowlevel.checkpoint()

    def _has_room_for(self, address: str) -> bool:
        if self._shaking_hands.total() >= MAX_HANDSHAKES:
            return False
        if tcp.is_local(address):
            return True
        others = self._by_address[address] + self._shaking_hands[address]
        at_once = self._shaking_hands[address]
        return at_once < MAX_HANDSHAKES_PER_ADDRESS and others < self._shared.options.max_connections_per_address

    async def _welcome(self, raw: socket, address: str) -> None:
        try:
            peer, sessions, stream = await self._greeted(raw)
        except (ConnectionLostError, OSError):
            self._turned_away += 1
            return
        finally:
            _decrease(self._shaking_hands, address)
        self._by_address[address] += 1
        try:
            await self._link(peer).carry(stream, sessions, is_dialled=False)
        finally:
            _decrease(self._by_address, address)
            _decrease(self._inbound, peer)

    async def _greeted(self, raw: socket) -> tuple[NodeId, Sessions, SecureStream]:
        """Greet the node that dialled. Raises ConnectionLostError or OSError; then the socket is closed."""
        admitted: list[NodeId] = []

        def judge(peer: NodeId) -> Reception:
            verdict = self._judge(peer)
            if verdict is not GreetingVerdict.WELCOME:
                return Reception(verdict)
            self._inbound[peer] += 1
            admitted.append(peer)
            return Reception(verdict, self._link(peer).session)

        stream = _secured(raw, self._tls.context, is_listener=True)
        try:
            with anyio.fail_after(self._shared.options.handshake_seconds):
                await stream.handshake()
                digest = self._tls.certificate_digest
                peer, sessions = await greet_as_listener(stream, self._identity.key, digest, judge)
        except BaseException as error:
            stream.close()
            for peer in admitted:
                _decrease(self._inbound, peer)
            if isinstance(error, TimeoutError):
                raise GreetingError("no handshake in time") from None
            raise
        return peer, sessions, stream

    def _judge(self, peer: NodeId) -> GreetingVerdict:
        options = self._shared.options
        if peer == self._identity.node_id or self._shared.reputation.is_banned(peer):
            return GreetingVerdict.UNWELCOME
        dialled = self._links[peer].dialled_count if peer in self._links else 0
        if self._inbound[peer] + dialled >= options.max_connections_per_peer:
            return GreetingVerdict.FULL
        return GreetingVerdict.FULL if self._inbound.total() >= options.max_connections else GreetingVerdict.WELCOME


def _secured(raw: socket, context: ssl.SSLContext, *, is_listener: bool) -> SecureStream:
    """Takes over the socket. Raises ConnectionLostError."""
    try:
        wrapped = context.wrap_socket(raw, server_side=is_listener, do_handshake_on_connect=False)
    except (OSError, ValueError) as error:
        raw.close()
        raise ConnectionLostError(str(error)) from None
    return SecureStream(wrapped)


def _decrease(counter: Counter[_Key], key: _Key) -> None:
    counter[key] -= 1
    if not counter[key]:
        del counter[key]
