"""The transport of a node over libp2p; see the interface in `neuroshard.network.transport`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress

import anyio
from libp2p.abc import INetStream
from libp2p.exceptions import BaseLibp2pError

from neuroshard.network.libp2p.addresses import parse_address
from neuroshard.network.libp2p.bulk import BulkRoute, is_bulk
from neuroshard.network.libp2p.connections import Connections
from neuroshard.network.libp2p.host import stream_of
from neuroshard.network.libp2p.requests import BadAnswerError, RequestExchange, reason_of
from neuroshard.network.libp2p.streams import YamuxStream
from neuroshard.network.pool.exchange import encoded
from neuroshard.network.scores import ScoreReason
from neuroshard.network.serving import REFUSED_KIND, RequestServer, accepted, refusal
from neuroshard.network.transport import (
    Admission,
    Connection,
    PeerUnreachableError,
    RequestHandler,
    RequestRefusedError,
    RequestTimeoutError,
    TransportClosedError,
)
from neuroshard.types import NodeId
from neuroshard.wire import Frame, FrameLimits, WireError, check_limits

OPENING_TRIES = 3
REQUESTS_TO_PEER = 24  # at once; fewer than the streams that a peer may open


class Libp2pTransport:
    """One node's requests."""

    def __init__(
        self,
        connections: Connections,
        server: RequestServer,
        exchange: RequestExchange,
        *,
        own_addresses: Callable[[], tuple[str, ...]],
        report: Callable[[NodeId, ScoreReason], None],
    ) -> None:
        self._local_id = connections.local_id
        self._connections = connections
        self._server = server
        self._exchange = exchange
        self._own_addresses = own_addresses
        self._report = report
        self.bulk: BulkRoute | None = None
        self._is_closed = False
        self._slots: dict[NodeId, anyio.Semaphore] = {}
        self._pending: set[anyio.CancelScope] = set()

    @property
    def local_id(self) -> NodeId:
        """This node."""
        return self._local_id

    async def request(
        self, peer: NodeId, frame: Frame, *, reply: FrameLimits | None = None, timeout_seconds: float
    ) -> Frame:
        """See Transport."""
        self._check_open()
        if peer == self._local_id:
            return accepted(peer, await self._ask_itself(frame, reply or FrameLimits(), timeout_seconds))
        answer: Frame | None = None
        with anyio.move_on_after(timeout_seconds) as scope:
            self._pending.add(scope)
            try:
                answer = await self._ask(peer, frame, reply or FrameLimits(), timeout_seconds)
            except BadAnswerError as error:
                self._report(peer, reason_of(error.cause))
                raise error.cause from None
            except PeerUnreachableError as error:
                self._report(peer, ScoreReason.UNREACHABLE)
                self._check_open()
                raise error from None
            finally:
                self._pending.discard(scope)
        self._check_open()
        if answer is None:
            self._report(peer, ScoreReason.TIMEOUT)
            raise RequestTimeoutError(f"Peer {peer} did not answer within {timeout_seconds:g} s.")
        self._report(peer, ScoreReason.GOOD_ANSWER)
        return accepted(peer, answer)

    def serve(
        self,
        kind: str,
        handler: RequestHandler,
        limits: FrameLimits | None = None,
        *,
        max_concurrent: int = 16,
        admit: Admission | None = None,
    ) -> None:
        """See Transport."""
        limits = limits or FrameLimits()
        self._exchange.expect(limits)
        self._server.serve(kind, handler, limits, max_concurrent, admit=admit)

    async def connect(self, address: str, *, is_given: bool = False) -> NodeId:
        """See Transport."""
        self._check_open()
        parsed = parse_address(address)
        await self._connections.follow(parsed, is_given=is_given)
        return parsed.peer

    def addresses(self) -> tuple[str, ...]:
        """See Transport."""
        return self._own_addresses()

    def peers(self) -> frozenset[NodeId]:
        """See Transport."""
        return self._connections.peers()

    def connections(self) -> tuple[Connection, ...]:
        """See Transport."""
        return self._connections.list()

    async def close(self) -> None:
        """See Transport; the connections end with the block of `libp2p_network`."""
        self._is_closed = True
        for scope in tuple(self._pending):
            scope.cancel()
        await anyio.lowlevel.checkpoint()

    async def handle_stream(self, net_stream: INetStream) -> None:
        """Answer the request on a stream that a peer opened."""
        peer = NodeId(str(net_stream.muxed_conn.peer_id))
        await self._exchange.answer(stream_of(net_stream), peer)

    async def ask_small(self, peer: NodeId, frame: Frame, timeout_seconds: float) -> Frame:
        """A request without tensors, over libp2p."""
        return await self.request(peer, frame, timeout_seconds=timeout_seconds)

    async def _ask(self, peer: NodeId, frame: Frame, reply: FrameLimits, timeout_seconds: float) -> Frame:
        self._exchange.expect(reply)
        if self.bulk is not None and is_bulk(frame, reply):
            answer = await self.bulk.request(peer, frame, reply, timeout_seconds)
            if answer is not None:
                return answer
        request = await encoded(frame)
        async with self._slot(peer):
            stream = await self._opened_stream(peer)
            return await self._exchange.ask(stream, peer, request, reply)

    async def _opened_stream(self, peer: NodeId) -> YamuxStream:
        for _ in range(OPENING_TRIES):  # a connection may end between being found and being used
            muxer = await self._connections.to(peer)
            with suppress(BaseLibp2pError):
                return await muxer.open_stream()
        raise PeerUnreachableError(f"Peer {peer} hangs up.")

    async def _ask_itself(self, frame: Frame, reply: FrameLimits, timeout_seconds: float) -> Frame:
        try:
            check_limits(frame, self._server.limits_of(frame.kind))
        except (RequestRefusedError, WireError) as error:
            return refusal(str(error))
        answer: Frame | None = None
        with anyio.move_on_after(timeout_seconds):
            answer = await self._server.answer(self._local_id, frame)
        if answer is None:
            raise RequestTimeoutError(f"This node did not answer itself within {timeout_seconds:g} s.")
        check_limits(answer, FrameLimits() if answer.kind == REFUSED_KIND else reply)
        return answer

    @asynccontextmanager
    async def _slot(self, peer: NodeId) -> AsyncGenerator[None]:
        """One of the few requests that a peer is asked at once; the others wait here and not at the peer's limits."""
        slots = self._slots.setdefault(peer, anyio.Semaphore(REQUESTS_TO_PEER))
        try:
            async with slots:
                yield
        finally:
            if slots.value == REQUESTS_TO_PEER:
                self._slots.pop(peer, None)

    def _check_open(self) -> None:
        if self._is_closed:
            raise TransportClosedError("This node's transport is closed.")
