"""Requests over libp2p streams: one frame and its answer on each stream, with limits, deadlines and byte budgets."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from types import MappingProxyType

import anyio
from libp2p.abc import INetStream
from libp2p.exceptions import BaseLibp2pError

from neuroshard.errors import NeuroShardError
from neuroshard.messages import (
    DamagedChunkError,
    EncodedFrame,
    Frame,
    FrameDecoder,
    FrameHead,
    FrameLimits,
    FrameTooLargeError,
    UnexpectedTensorError,
    WireError,
    as_received,
)
from neuroshard.network.libp2p.addresses import parse_address
from neuroshard.network.libp2p.bodies import BodyConnections, is_bulk
from neuroshard.network.libp2p.connections import Connections
from neuroshard.network.libp2p.host import stream_of
from neuroshard.network.libp2p.negotiation import confirm, proposal
from neuroshard.network.libp2p.streams import YamuxStream
from neuroshard.network.limits import (
    CONTESTED_GRACE_SECONDS,
    ByteBudget,
    PeerStanding,
    Reservation,
    contested_seconds,
    frame_budget,
)
from neuroshard.network.pool import BulkPool
from neuroshard.network.pool.exchange import encoded
from neuroshard.network.reputation import ScoreReason
from neuroshard.network.serving import REFUSED_KIND, REFUSED_LIMITS, RequestServer, accepted, refusal
from neuroshard.network.transport import (
    Admission,
    Connection,
    MessageTooLargeError,
    PeerUnreachableError,
    RequestHandler,
    RequestRefusedError,
    RequestTimeoutError,
    TransportClosedError,
)
from neuroshard.types import NodeId

_LOG = logging.getLogger(__name__)
FRAME_PROTOCOL = "/neuroshard/frame/1"
HEAD_SECONDS = 10.0  # for everything except tensors; they get their size over LEAST_RATE in addition
LEAST_RATE = 16 * 1024  # bytes per second; a slower peer is cut off
HEADS_BYTES = 64 * 1024 * 1024
SMALL_HEAD_BYTES = 4 * 1024  # memory allowed for every stream that a peer opens
MEMORY_SECONDS = 60.0  # how long a frame waits for memory before it is refused
LOOK_SECONDS = 1.0  # between checks whether the sender has become too slow
LINGER_SECONDS = 5.0  # for a peer to read the refusal before its stream breaks
REASON_OF: Mapping[type[WireError], ScoreReason] = MappingProxyType(
    {
        FrameTooLargeError: ScoreReason.OVERSIZED,
        DamagedChunkError: ScoreReason.DIGEST_MISMATCH,
        UnexpectedTensorError: ScoreReason.UNEXPECTED_TENSOR,
    }
)


def transfer_seconds(byte_count: int) -> float:
    """How long this number of bytes may take on the slowest tolerated connection."""
    return HEAD_SECONDS + byte_count / LEAST_RATE


def frame_score_reason(error: WireError) -> ScoreReason:
    """The reputation reason for the sender of an unacceptable frame."""
    return REASON_OF.get(type(error), ScoreReason.MALFORMED_FRAME)


class BadAnswerError(NeuroShardError):
    """The peer's answer violated the protocol; `cause` says how."""

    def __init__(self, cause: WireError) -> None:
        super().__init__(cause.message)
        self.cause = cause


class RequestStreams:
    """Both sides of requests over streams of this node."""

    def __init__(
        self,
        server: RequestServer,
        budget: ByteBudget,
        report: Callable[[NodeId, ScoreReason], None],
        heads: ByteBudget | None = None,
    ) -> None:
        """`budget` is for tensors, `heads` for frame headers: a frame that waits for the one may hold bytes of the
        other.
        """
        self._server = server
        self._budget = budget
        self._heads = heads or frame_budget(HEADS_BYTES)
        self._report = report

    def share_by(self, standing_of: Callable[[NodeId], PeerStanding]) -> None:
        """Set who gets memory first."""
        self._budget.share_by(standing_of)
        self._heads.share_by(standing_of)

    def expect(self, limits: FrameLimits) -> None:
        """Make sure that frames within these limits fit into the budgets, at least one at a time."""
        self._budget.make_fit(limits.max_body_bytes)

    async def ask(self, stream: YamuxStream, peer: NodeId, request: EncodedFrame, reply: FrameLimits) -> Frame:
        """The peer's answer, which may be a refusal; the caller sets a deadline. The stream ends afterwards.

        Raises BadAnswerError, MessageTooLargeError, or PeerUnreachableError if the stream breaks.
        """
        outcome: Frame | NeuroShardError | None = None
        try:
            async with anyio.create_task_group() as tasks:
                # a refusal may arrive before the request is fully sent
                tasks.start_soon(_send_request, stream, request)
                outcome = await self._reply(stream, peer, reply)
                tasks.cancel_scope.cancel()
        finally:
            stream.abandon()
        if isinstance(outcome, Frame):
            return outcome
        raise outcome or PeerUnreachableError(f"Peer {peer} did not answer.")

    async def answer(self, stream: YamuxStream, peer: NodeId) -> None:
        """Answer the one request on a stream whose protocol is negotiated."""
        try:
            answer = await self._answered(stream, peer)
            if answer is not None:
                await _send_answer(stream, answer)
        finally:
            stream.abandon()

    async def _reply(self, stream: YamuxStream, peer: NodeId, limits: FrameLimits) -> Frame | NeuroShardError:
        decoder = FrameDecoder(lambda kind: REFUSED_LIMITS if kind == REFUSED_KIND else limits)
        try:
            await confirm(stream, FRAME_PROTOCOL)
            await _receive_head(stream, decoder)
            frame, reservation = await self._receive_body(stream, peer, decoder)
        except (BaseLibp2pError, RequestRefusedError) as error:
            return PeerUnreachableError(f"The answer of peer {peer} did not arrive: {error}.")
        except TimeoutError:
            self._report(peer, ScoreReason.TOO_SLOW)
            return RequestTimeoutError(f"Peer {peer} sends its answer too slowly.")
        except WireError as error:
            return BadAnswerError(error)
        except NeuroShardError as error:
            return error
        if reservation is not None:
            reservation.release()
        return frame

    async def _answered(self, stream: YamuxStream, peer: NodeId) -> Frame | None:
        """The answer to the request on the stream; None if no peer waits for it."""
        with ExitStack() as held:
            return await self._answered_within(stream, peer, held)

    async def _answered_within(self, stream: YamuxStream, peer: NodeId, held: ExitStack) -> Frame | None:
        """As `_answered`; the memory reserved for the head is released with `held`."""
        decoder = FrameDecoder(self._server.limits_of)
        try:
            head = await self._receive_large_head(stream, peer, decoder, held)
            self._server.check(peer, head.kind, head.body_bytes)
            request, reservation = await self._receive_body(stream, peer, decoder)
        except (RequestRefusedError, MessageTooLargeError) as error:
            return refusal(str(error))
        except WireError as error:
            self._report(peer, frame_score_reason(error))
            return refusal(str(error))
        except TimeoutError:
            self._report(peer, ScoreReason.TOO_SLOW)
            return refusal("The request arrived too slowly.")
        try:
            return await self._answer_while_asked(stream, peer, request)
        finally:
            if reservation is not None:
                reservation.release()

    async def _receive_large_head(
        self, stream: YamuxStream, peer: NodeId, decoder: FrameDecoder, held: ExitStack
    ) -> FrameHead:
        """Read a large head. Raises TimeoutError for a slow peer, RequestRefusedError if no memory is free."""
        began = anyio.current_time()
        with anyio.fail_after(HEAD_SECONDS):
            while decoder.head is None and not decoder.head_bytes:
                await _fill(stream, decoder)
        seconds_left = began + HEAD_SECONDS - anyio.current_time()
        if decoder.head_bytes > SMALL_HEAD_BYTES:
            held.callback((await _reserved(self._heads, peer, decoder.head_bytes)).release)
        with anyio.fail_after(seconds_left):
            return await _receive_head(stream, decoder)

    async def _answer_while_asked(self, stream: YamuxStream, peer: NodeId, request: Frame) -> Frame | None:
        """Run the handler while the peer waits. Returns None if the peer gave up."""
        answer: Frame | None = None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_cancel_when_reset, stream, tasks.cancel_scope)
            answer = await self._server.answer(peer, request)
            tasks.cancel_scope.cancel()
        return answer

    async def _receive_body(
        self, stream: YamuxStream, peer: NodeId, decoder: FrameDecoder
    ) -> tuple[Frame, Reservation | None]:
        """The rest of a frame, and its reserved memory, to be released when it is no longer needed."""
        if decoder.is_complete:
            return decoder.frame(), None
        byte_count = decoder.head.body_bytes if decoder.head else 0
        reservation = await _reserved(self._budget, peer, byte_count)
        try:
            await self._receive_rest(stream, peer, decoder, byte_count)
            return decoder.frame(), reservation
        except BaseException:
            reservation.release()
            raise

    async def _receive_rest(self, stream: YamuxStream, peer: NodeId, decoder: FrameDecoder, byte_count: int) -> None:
        """Raises TimeoutError for a slow peer, and sooner while others wait for its memory."""
        began = moved_at = anyio.current_time()
        while not decoder.is_complete:
            now = anyio.current_time()
            is_stalled = now - moved_at > CONTESTED_GRACE_SECONDS and self._budget.must_yield(peer)
            if is_stalled or now - began > self._seconds_for(peer, byte_count):
                raise TimeoutError
            with anyio.move_on_after(LOOK_SECONDS):
                await _fill(stream, decoder)
                moved_at = anyio.current_time()

    def _seconds_for(self, peer: NodeId, byte_count: int) -> float:
        slow = transfer_seconds(byte_count)
        is_contested = self._budget.is_awaited_by_others(peer)
        return min(slow, contested_seconds(self._budget.used_by(peer))) if is_contested else slow


async def _reserved(budget: ByteBudget, peer: NodeId, byte_count: int) -> Reservation:
    """Raises RequestRefusedError if no memory is free in time, MessageTooLargeError if there will never be enough."""
    reservation: Reservation | None = None
    with anyio.move_on_after(MEMORY_SECONDS):
        reservation = await budget.reserve(peer, byte_count)
    if reservation is None:
        raise RequestRefusedError("This node has no memory free for such a frame now; try again later.")
    return reservation


async def _send_request(stream: YamuxStream, request: EncodedFrame) -> None:
    with suppress(BaseLibp2pError):  # the reader of the answer gets the same error
        await _send(stream, proposal(FRAME_PROTOCOL) + request.head, request.body)


async def _send_answer(stream: YamuxStream, answer: Frame) -> None:
    try:
        data = await encoded(answer)
    except WireError:
        _LOG.exception("The answer of kind %s cannot be sent.", answer.kind)
        data = await encoded(refusal("internal error"))
    with anyio.move_on_after(transfer_seconds(data.byte_count)):
        await _send(stream, data.head, data.body)
        with anyio.move_on_after(LINGER_SECONDS):
            await stream.wait_ended()


async def _send(stream: YamuxStream, head: bytes, body: Sequence[memoryview]) -> None:
    await stream.write(head, is_last=not body)
    for left, view in enumerate(body, 1 - len(body)):
        await stream.write(view, is_last=left == 0)


async def _receive_head(stream: YamuxStream, decoder: FrameDecoder) -> FrameHead:
    while (head := decoder.head) is None:
        await _fill(stream, decoder)
    return head


async def _fill(stream: YamuxStream, decoder: FrameDecoder) -> None:
    count = await stream.read_into(decoder.receive_buffer())
    if count == 0:
        decoder.frame()  # raises the error that says which bytes are missing
    decoder.commit(count)


async def _cancel_when_reset(stream: YamuxStream, scope: anyio.CancelScope) -> None:
    await stream.wait_reset()
    scope.cancel()


OPENING_TRIES = 3
REQUESTS_TO_PEER = 24  # concurrent requests to one peer; fewer than the streams that a peer may open


class Libp2pTransport:
    """One node's requests."""

    def __init__(
        self,
        connections: Connections,
        server: RequestServer,
        exchange: RequestStreams,
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
        self._bodies: BodyConnections | None = None
        self._pool: BulkPool | None = None
        self._is_closed = False
        self._slots: dict[NodeId, anyio.Semaphore] = {}
        self._pending: set[anyio.CancelScope] = set()

    @property
    def local_id(self) -> NodeId:
        return self._local_id

    async def request(
        self, peer: NodeId, frame: Frame, *, reply: FrameLimits | None = None, timeout_seconds: float
    ) -> Frame:
        self._check_open()
        if peer == self._local_id:
            return accepted(peer, await self._ask_itself(frame, reply or FrameLimits(), timeout_seconds))
        answer: Frame | None = None
        with anyio.move_on_after(timeout_seconds) as scope:
            self._pending.add(scope)
            try:
                answer = await self._ask(peer, frame, reply or FrameLimits(), timeout_seconds)
            except BadAnswerError as error:
                self._report(peer, frame_score_reason(error.cause))
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
        for_anyone: bool = False,
    ) -> None:
        limits = limits or FrameLimits()
        self._exchange.expect(limits)
        self._server.serve(kind, handler, limits, max_concurrent, admit=admit, for_anyone=for_anyone)

    async def connect(self, address: str, *, is_given: bool = False) -> NodeId:
        self._check_open()
        parsed = parse_address(address)
        await self._connections.follow(parsed, is_given=is_given)
        return parsed.peer

    def addresses(self) -> tuple[str, ...]:
        return self._own_addresses()

    def peers(self) -> frozenset[NodeId]:
        return self._connections.peers()

    def connections(self) -> tuple[Connection, ...]:
        return self._connections.list({} if self._pool is None else self._pool.traffic())

    def busy_peers(self) -> set[NodeId]:
        """Peers with which large frames are on their way."""
        return set() if self._pool is None else self._pool.busy_peers

    @contextmanager
    def large_over(self, bodies: BodyConnections, pool: BulkPool) -> Generator[None]:
        """Send large frames over connections of their own within the block."""
        self._bodies, self._pool, bodies.pool = bodies, pool, pool
        try:
            yield
        finally:
            self._bodies = self._pool = bodies.pool = None

    async def close(self) -> None:
        """Stop requests. The connections end with the block of `libp2p_network`."""
        self._is_closed = True
        for scope in tuple(self._pending):
            scope.cancel()
        await anyio.lowlevel.checkpoint()

    async def handle_stream(self, net_stream: INetStream) -> None:
        """Answer the request on a stream that a peer opened."""
        peer = NodeId(str(net_stream.muxed_conn.peer_id))
        await self._exchange.answer(stream_of(net_stream), peer)

    async def ask_small(self, peer: NodeId, frame: Frame, timeout_seconds: float) -> Frame:
        """Send a request without tensors over a stream."""
        return await self.request(peer, frame, timeout_seconds=timeout_seconds)

    async def _ask(self, peer: NodeId, frame: Frame, reply: FrameLimits, timeout_seconds: float) -> Frame:
        self._exchange.expect(reply)
        if self._bodies is not None and is_bulk(frame, reply):
            answer = await self._bodies.request(peer, frame, reply, timeout_seconds)
            if answer is not None:
                return answer
        request = await encoded(frame)
        async with self._slot(peer):
            stream = await self._opened_stream(peer)
            return await self._exchange.ask(stream, peer, request, reply)

    async def _opened_stream(self, peer: NodeId) -> YamuxStream:
        for _ in range(OPENING_TRIES):  # a connection may end between lookup and use
            muxer = await self._connections.to(peer)
            with suppress(BaseLibp2pError):
                return await muxer.open_stream()
        raise PeerUnreachableError(f"Peer {peer} closed the connection.")

    async def _ask_itself(self, frame: Frame, reply: FrameLimits, timeout_seconds: float) -> Frame:
        try:
            frame = as_received(frame, self._server.limits_of(frame.kind))
        except (RequestRefusedError, WireError) as error:
            return refusal(str(error))
        answer: Frame | None = None
        with anyio.move_on_after(timeout_seconds):
            answer = await self._server.answer(self._local_id, frame)
        if answer is None:
            raise RequestTimeoutError(f"This node did not answer itself within {timeout_seconds:g} s.")
        return as_received(answer, REFUSED_LIMITS if answer.kind == REFUSED_KIND else reply)

    @asynccontextmanager
    async def _slot(self, peer: NodeId) -> AsyncGenerator[None]:
        """Wait for one of the few concurrent requests to a peer: waiting here is better than at the peer's limits."""
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
