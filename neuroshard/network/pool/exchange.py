"""Requests and replies with one peer, over however many connections there are at the moment.

A request is handled at most once, whatever breaks. Its number names it while it travels, while it is handled and until
its answer has arrived, so offered again it is the same one; and nothing that may have arrived whole is sent to a peer
that has forgotten it. Its memory is bounded: at most `max_transfers_per_peer` requests for one peer, within the byte
budget; answers wait at most `answer_seconds` for a peer that takes nothing of them, and everything waits at
most `resume_seconds` for a peer without any connection."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import anyio

from neuroshard.messages import EncodedFrame, Frame, FrameLimits, WireError, encode
from neuroshard.network.limits import Reservation
from neuroshard.network.pool.connection import PoolConnection
from neuroshard.network.pool.options import NotDeliveredError
from neuroshard.network.pool.receiving import OfferReading, Receiver, ReceivingHooks, Resources
from neuroshard.network.pool.transfers import (
    BLOCK_BYTES,
    OutgoingPacket,
    OutgoingTransfer,
    PacketHeader,
    PacketKind,
    packet,
)
from neuroshard.network.reputation import ScoreReason
from neuroshard.network.serving import REFUSED_KIND, REFUSED_LIMITS, accepted, refusal
from neuroshard.network.transport import PeerRefusedError, PeerUnreachableError, RequestRefusedError
from neuroshard.types import NodeId

ENCODE_ASIDE_BYTES = 8 * 1024 * 1024  # hashing more than this would hold up the event loop for milliseconds
_LOG = logging.getLogger(__name__)


@dataclass(eq=False)
class _Pending:
    """A request of ours."""

    transfer: OutgoingTransfer
    limits: FrameLimits
    settled: anyio.Event = field(default_factory=anyio.Event)
    answer: Frame | None = None
    error: Exception | None = None

    def settle(self, answer: Frame | None, error: Exception | None = None) -> None:
        """The first outcome counts."""
        if not self.settled.is_set():
            self.answer, self.error = answer, error
            self.settled.set()


@dataclass(eq=False)
class _Answering:
    """A request of the peer, from its last byte until the peer has the answer."""

    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    ended: anyio.Event = field(default_factory=anyio.Event)
    reply: OutgoingTransfer | None = None
    bytes_unsent: int = 0  # of the reply, at the last look
    moved_at: float = 0.0  # when they became fewer


@dataclass(frozen=True)
class TransferHooks:
    """Queries and reports of the exchange to the owner of the connections."""

    report: Callable[[ScoreReason], None]
    wake: Callable[[], None]  # the connections: there is something to send
    send: Callable[[bytes], None]  # a small packet over any connection; lost when there is none
    cut: Callable[[int], None]  # a connection
    cut_stalled: Callable[[int], None]  # a connection that carries nothing
    blocks_at_a_time: Callable[[], int]


class PeerTransfers:
    """Transfers in both directions; see PacketHandler in connection.py."""

    def __init__(self, peer: NodeId, shared: Resources, hooks: TransferHooks) -> None:
        self._peer = peer
        self._shared = shared
        self._hooks = hooks
        self._outgoing: dict[int, OutgoingTransfer] = {}
        self._pending: dict[int, _Pending] = {}
        self._answering: dict[int, _Answering] = {}
        receiving = ReceivingHooks(
            self._limits_of,
            self._has_room,
            self._answering.__contains__,
            self._received,
            self._failed,
            hooks.report,
            hooks.cut,
        )
        self.receiver = Receiver(peer, shared, receiving)

    @property
    def is_busy(self) -> bool:
        """Whether anything is on its way or awaited."""
        return bool(self._outgoing or self._pending or self._answering or self.receiver.is_busy)

    @property
    def bytes_waiting(self) -> int:
        """Of bodies that were not handed to any connection yet."""
        return sum(transfer.bytes_unsent for transfer in self._outgoing.values())

    async def request(self, frame: EncodedFrame, limits: FrameLimits) -> Frame:
        """Send a request and wait for the answer.

        Raises PeerRefusedError, WireError for an answer that breaks the limits, PeerUnreachableError (NotDeliveredError
        when the peer cannot have handled it), or whatever `fail` was called with.
        """
        transfer = OutgoingTransfer(self._shared.next_transfer(), frame)
        pending = self._pending[transfer.number] = _Pending(transfer, limits)
        self._outgoing[transfer.number] = transfer
        try:
            self._hooks.wake()
            await pending.settled.wait()
        finally:
            del self._pending[transfer.number]
            self._outgoing.pop(transfer.number, None)
            self.receiver.drop_replies(transfer.number)
            if pending.answer is None:
                self._hooks.send(packet(PacketKind.CANCEL, transfer.number))
        if pending.error is not None:
            raise pending.error
        assert pending.answer is not None
        return accepted(self._peer, pending.answer)

    def fail(self, error: Exception) -> None:
        """End everything. Requests of ours raise `error`."""
        for pending in self._pending.values():
            pending.settle(None, error)
        self._outgoing.clear()
        self._forget()

    def give_up(self, reason: str) -> None:
        """The peer is gone for good: end everything."""
        for pending in self._pending.values():
            pending.settle(None, _unreachable(reason, pending))
        self._outgoing.clear()
        self._forget()

    def begin_anew(self) -> None:
        """The peer has forgotten everything; what never was there as a whole is sent to it once more."""
        reason = f"Peer {self._peer} has restarted."
        for number, pending in self._pending.items():
            if pending.transfer.may_have_arrived:
                pending.settle(None, _unreachable(reason, pending))
                self._outgoing.pop(number, None)
            else:
                pending.transfer.restart()
        self._forget()
        self.receiver.forget_numbers()

    def _forget(self) -> None:
        """Forget the peer's requests and the answers to them."""
        for answering in self._answering.values():
            answering.scope.cancel()
            if answering.reply is not None:
                self._outgoing.pop(answering.reply.number, None)
        self.receiver.drop_all()

    def lose(self, connection: PoolConnection) -> None:
        """A connection ended: send the blocks that did not arrive again, over other connections."""
        self.receiver.lose(connection)
        for transfer in self._outgoing.values():
            transfer.lose(connection.number)
        self._hooks.wake()

    def doubt_stalled(self, now: float) -> None:
        """Ask the peer what it has of frames that should be complete there."""
        seconds = self._shared.options.seconds_for(BLOCK_BYTES)
        for transfer in self._outgoing.values():
            transfer.doubt(now, seconds)
        if any(transfer.needs_offer for transfer in self._outgoing.values()):
            self._hooks.wake()

    def drop_stalled(self, now: float) -> None:
        """Give up transfers that hold memory here and do not move. Notify the peer if it can be reached."""
        for number in self.receiver.drop_lost(now):
            self._hooks.send(packet(PacketKind.REFUSE, number, b"It was not offered again."))
        self._drop_stalled_answers(now)

    def _drop_stalled_answers(self, now: float) -> None:
        for number, answering in self._answering.items():
            if answering.reply is None or answering.scope.cancel_called:
                continue
            bytes_unsent = answering.reply.bytes_unsent
            if bytes_unsent != answering.bytes_unsent:
                answering.bytes_unsent, answering.moved_at = bytes_unsent, now
            elif now - answering.moved_at >= self._shared.options.answer_seconds:
                answering.scope.cancel()
                self._hooks.send(packet(PacketKind.REFUSE, number, b"Its answer was not taken."))

    def unanswered_over(self) -> set[int]:
        """Connections over which an offer went that the peer has not answered."""
        over = {transfer.unanswered_over for transfer in self._outgoing.values()}
        return {number for number in over if number is not None}

    def next_packet(self, connection: PoolConnection) -> OutgoingPacket | None:
        """The next packet to send: offers first, so that the peer can allocate memory; then blocks in order."""
        for transfer in self._outgoing.values():
            if transfer.needs_offer:
                return transfer.offer(connection.number)
        if connection.is_resting:
            return None
        most_blocks = self._hooks.blocks_at_a_time()
        for transfer in self._outgoing.values():
            blocks = transfer.take(connection.number, most_blocks)
            if blocks is not None:
                return blocks
        return None

    def place(self, connection: PoolConnection, header: PacketHeader) -> memoryview | None:
        """The memory for the content of a received packet; None if the packet is dropped."""
        return self.receiver.place(connection, header)

    def filled(self, connection: PoolConnection, header: PacketHeader) -> None:
        """Handle a packet whose content is now in its place."""
        self.receiver.filled(connection, header)

    def read_offer(self, connection: PoolConnection, header: PacketHeader) -> OfferReading:
        """A reader for the head of an offered frame."""
        return self.receiver.read_offer(connection, header)

    def heard(self, connection: PoolConnection, header: PacketHeader, payload: bytes) -> None:
        """Handle a packet. Ignore it if it is about a transfer that was given up meanwhile."""
        if header.kind is PacketKind.CANCEL:
            self._cancelled(header.transfer)
        elif (transfer := self._outgoing.get(header.transfer)) is not None:
            self._answered(transfer, header, payload)
        elif header.kind is PacketKind.REFUSE:  # of an answer that does not come any more
            self._refused(header.transfer, payload)
        self._hooks.wake()

    def _answered(self, transfer: OutgoingTransfer, header: PacketHeader, payload: bytes) -> None:
        match header.kind:
            case PacketKind.WAIT:
                transfer.wait()
            case PacketKind.ACCEPT:
                transfer.accept(payload)
            case PacketKind.HELD:
                for number in transfer.held(header.serial, payload):
                    self._hooks.cut_stalled(number)
            case _:  # DONE or REFUSE
                del self._outgoing[transfer.number]
                if transfer.answers:
                    self._reply_ended(transfer)
                elif header.kind is PacketKind.REFUSE:
                    self._refused(transfer.number, payload)

    def _refused(self, number: int, payload: bytes) -> None:
        reason = payload.decode(errors="replace")
        self._settle(number, PeerRefusedError(f"Peer {self._peer} refused: {reason}"))

    def _settle(self, number: int, error: Exception) -> None:
        pending = self._pending.get(number)
        if pending is not None:
            pending.settle(None, error)

    def _failed(self, number: int, error: WireError) -> None:
        self._settle(number, error)

    def _limits_of(self, answers: int, kind: str) -> FrameLimits:
        if not answers:
            return self._shared.server.limits_of(kind)
        pending = self._pending.get(answers)
        if pending is None:
            raise RequestRefusedError("No request waits for this answer.")
        return REFUSED_LIMITS if kind == REFUSED_KIND else pending.limits

    def _has_room(self) -> bool:
        return len(self._answering) + self.receiver.request_count < self._shared.options.max_transfers_per_peer

    def _received(self, number: int, answers: int, frame: Frame, reservation: Reservation | None) -> None:
        if not answers:
            answering = self._answering[number] = _Answering()
            self._shared.tasks.start_soon(self._answer, answering, number, frame, reservation)
            return
        if reservation is not None:
            reservation.release()  # the memory is the caller's from here on
        pending = self._pending.get(answers)
        if pending is not None:
            pending.settle(frame)

    async def _answer(
        self, answering: _Answering, number: int, request: Frame, reservation: Reservation | None
    ) -> None:
        with answering.scope:
            try:
                answer = await self._shared.server.answer(self._peer, request)
            finally:
                del request
                if reservation is not None:
                    reservation.release()  # before the answer is sent: memory must not wait for the peer's memory
            reply = OutgoingTransfer(self._shared.next_transfer(), await _encoded_answer(answer), number)
            answering.reply, answering.moved_at = reply, anyio.current_time()
            self._outgoing[reply.number] = reply
            try:
                self._hooks.wake()
                await answering.ended.wait()
            finally:
                self._outgoing.pop(reply.number, None)
        del self._answering[number]

    def _reply_ended(self, transfer: OutgoingTransfer) -> None:
        answering = self._answering.get(transfer.answers)
        if answering is not None:
            answering.ended.set()

    def _cancelled(self, number: int) -> None:
        self.receiver.drop(number)
        answering = self._answering.get(number)
        if answering is not None:
            answering.scope.cancel()


def _unreachable(reason: str, pending: _Pending) -> PeerUnreachableError:
    if pending.transfer.may_have_arrived:
        return PeerUnreachableError(f"{reason} The request may have been handled.")
    return NotDeliveredError(reason)


async def encoded(frame: Frame) -> EncodedFrame:
    """The bytes of a frame. Raises WireError for one that cannot travel."""
    if sum(part.spec.byte_count for part in frame.tensors) < ENCODE_ASIDE_BYTES:
        return encode(frame)
    return await anyio.to_thread.run_sync(encode, frame)


async def _encoded_answer(answer: Frame) -> EncodedFrame:
    try:
        return await encoded(answer)
    except WireError:
        _LOG.exception("An answer of kind %s cannot be sent.", answer.kind)
        return encode(refusal("internal error"))
