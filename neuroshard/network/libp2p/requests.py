"""A question and its answer on one stream: a frame there, a frame back, with limits, deadlines and byte budgets."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from types import MappingProxyType

import anyio
from libp2p.exceptions import BaseLibp2pError

from neuroshard.errors import NeuroShardError
from neuroshard.network.budget import ByteBudget, Reservation, contested_seconds, frame_budget
from neuroshard.network.libp2p.negotiation import confirm, proposal
from neuroshard.network.libp2p.streams import YamuxStream
from neuroshard.network.pool.exchange import encoded
from neuroshard.network.scores import ScoreReason
from neuroshard.network.serving import REFUSED_KIND, RequestServer, refusal
from neuroshard.network.transport import (
    MessageTooLargeError,
    PeerUnreachableError,
    RequestRefusedError,
    RequestTimeoutError,
)
from neuroshard.types import NodeId
from neuroshard.wire import (
    DamagedChunkError,
    EncodedFrame,
    Frame,
    FrameDecoder,
    FrameHead,
    FrameLimits,
    FrameTooLargeError,
    UnexpectedTensorError,
    WireError,
)

_LOG = logging.getLogger(__name__)
FRAME_PROTOCOL = "/neuroshard/frame/1"
HEAD_SECONDS = 10.0  # for everything but tensors, which have their size over LEAST_RATE besides
LEAST_RATE = 16 * 1024  # bytes a second; whoever is slower is cut
HEADS_BYTES = 64 * 1024 * 1024
SMALL_HEAD_BYTES = 4 * 1024  # as many may be held for every stream that others open
MEMORY_SECONDS = 60.0  # how long a frame waits for room in memory before it is refused
LOOK_SECONDS = 1.0  # whether whoever sends has become too slow
LINGER_SECONDS = 5.0  # for a peer to read why it is refused before its stream breaks
REASON_OF: Mapping[type[WireError], ScoreReason] = MappingProxyType(
    {
        FrameTooLargeError: ScoreReason.OVERSIZED,
        DamagedChunkError: ScoreReason.DIGEST_MISMATCH,
        UnexpectedTensorError: ScoreReason.UNEXPECTED_TENSOR,
    }
)


def transfer_seconds(byte_count: int) -> float:
    """How long so many bytes may take on the slowest line that is put up with."""
    return HEAD_SECONDS + byte_count / LEAST_RATE


def reason_of(error: WireError) -> ScoreReason:
    """What a frame that cannot be accepted says about its sender."""
    return REASON_OF.get(type(error), ScoreReason.MALFORMED_FRAME)


class BadAnswerError(NeuroShardError):
    """The peer's answer broke the rules; `cause` says which."""

    def __init__(self, cause: WireError) -> None:
        super().__init__(cause.message)
        self.cause = cause


class RequestExchange:
    """Both sides of requests over streams of this node."""

    def __init__(
        self,
        server: RequestServer,
        budget: ByteBudget,
        report: Callable[[NodeId, ScoreReason], None],
        heads: ByteBudget | None = None,
    ) -> None:
        """`budget` is for tensors, `heads` for what stands before them: who waits for the one may hold of the other."""
        self._server = server
        self._budget = budget
        self._heads = heads or frame_budget(HEADS_BYTES)
        self._report = report

    def expect(self, limits: FrameLimits) -> None:
        """Frames within these limits are to find room, one at a time at least."""
        self._budget.make_fit(limits.max_body_bytes)

    async def ask(self, stream: YamuxStream, peer: NodeId, request: EncodedFrame, reply: FrameLimits) -> Frame:
        """The peer's answer, also one that refuses; the caller sets a deadline. The stream is over afterwards.

        Raises BadAnswerError, MessageTooLargeError, or PeerUnreachableError when the stream breaks.
        """
        outcome: Frame | NeuroShardError | None = None
        try:
            async with anyio.create_task_group() as tasks:
                # the answer may come before the question was sent: when it is refused
                tasks.start_soon(_send_request, stream, request)
                outcome = await self._reply(stream, peer, reply)
                tasks.cancel_scope.cancel()
        finally:
            stream.abandon()
        if isinstance(outcome, Frame):
            return outcome
        raise outcome or PeerUnreachableError(f"Peer {peer} did not answer.")

    async def answer(self, stream: YamuxStream, peer: NodeId) -> None:
        """Answer the one request on a stream whose protocol is agreed on."""
        try:
            answer = await self._answered(stream, peer)
            if answer is not None:
                await _send_answer(stream, answer)
        finally:
            stream.abandon()

    async def _reply(self, stream: YamuxStream, peer: NodeId, limits: FrameLimits) -> Frame | NeuroShardError:
        decoder = FrameDecoder(lambda kind: FrameLimits() if kind == REFUSED_KIND else limits)
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
        """The answer to what comes on the stream; None when there is nobody to tell it to."""
        with ExitStack() as held:
            return await self._answered_within(stream, peer, held)

    async def _answered_within(self, stream: YamuxStream, peer: NodeId, held: ExitStack) -> Frame | None:
        """As `_answered`; what is reserved for the head is released with `held`."""
        decoder = FrameDecoder(self._server.limits_of)
        try:
            head = await self._receive_large_head(stream, peer, decoder, held)
            self._server.check(head.kind, head.body_bytes)
            request, reservation = await self._receive_body(stream, peer, decoder)
        except (RequestRefusedError, MessageTooLargeError) as error:
            return refusal(str(error))
        except WireError as error:
            self._report(peer, reason_of(error))
            return refusal(str(error))
        except TimeoutError:
            self._report(peer, ScoreReason.TOO_SLOW)
            return refusal("This node does not wait for so slow a request.")
        try:
            return await self._answer_while_asked(stream, peer, request)
        finally:
            if reservation is not None:
                reservation.release()

    async def _receive_large_head(
        self, stream: YamuxStream, peer: NodeId, decoder: FrameDecoder, held: ExitStack
    ) -> FrameHead:
        """Raises TimeoutError for a peer that is too slow, RequestRefusedError when there is no memory."""
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
        """None when the peer gave up waiting."""
        answer: Frame | None = None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_cancel_when_reset, stream, tasks.cancel_scope)
            answer = await self._server.answer(peer, request)
            tasks.cancel_scope.cancel()
        return answer

    async def _receive_body(
        self, stream: YamuxStream, peer: NodeId, decoder: FrameDecoder
    ) -> tuple[Frame, Reservation | None]:
        """The rest of a frame, and the room reserved for it, to be released when it is not needed any more."""
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
        """Raises TimeoutError for a peer that is too slow, which is sooner when others wait for the memory."""
        began = anyio.current_time()
        while not decoder.is_complete:
            if anyio.current_time() - began > self._seconds_for(peer, byte_count):
                raise TimeoutError
            with anyio.move_on_after(LOOK_SECONDS):
                await _fill(stream, decoder)

    def _seconds_for(self, peer: NodeId, byte_count: int) -> float:
        slow = transfer_seconds(byte_count)
        is_contested = self._budget.is_awaited_by_others(peer)
        return min(slow, contested_seconds(self._budget.used_by(peer))) if is_contested else slow


async def _reserved(budget: ByteBudget, peer: NodeId, byte_count: int) -> Reservation:
    """Raises RequestRefusedError when there is no room in time, MessageTooLargeError when there will never be."""
    reservation: Reservation | None = None
    with anyio.move_on_after(MEMORY_SECONDS):
        reservation = await budget.reserve(peer, byte_count)
    if reservation is None:
        raise RequestRefusedError("This node has no memory free for such a frame now; try again later.")
    return reservation


async def _send_request(stream: YamuxStream, request: EncodedFrame) -> None:
    with suppress(BaseLibp2pError):  # whoever reads the answer meets it too
        await _send(stream, proposal(FRAME_PROTOCOL) + request.head, request.body)


async def _send_answer(stream: YamuxStream, answer: Frame) -> None:
    try:
        data = await encoded(answer)
    except WireError:
        _LOG.exception("An answer of kind %s cannot travel.", answer.kind)
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
        decoder.frame()  # says that bytes are missing
    decoder.commit(count)


async def _cancel_when_reset(stream: YamuxStream, scope: anyio.CancelScope) -> None:
    await stream.wait_reset()
    scope.cancel()
