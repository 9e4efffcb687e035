"""The receiving side of the pool: it checks offers, reserves memory, places pieces and hands on whole frames.

A connection never waits here: pieces that arrive before their memory is free are dropped and requested again. Therefore
no wait for memory delays the answers on which other memory depends. A worker thread verifies large chunks.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from math import inf
from queue import SimpleQueue
from secrets import randbits
from typing import TypeAlias

import anyio
import trio
from anyio import to_thread
from anyio.abc import TaskGroup

from neuroshard.messages import (
    CHUNK_BYTES,
    ChunkCheck,
    DamagedChunkError,
    Frame,
    FrameDecoder,
    FrameHead,
    FrameLimits,
    FrameTooLargeError,
    MalformedFrameError,
    UnexpectedTensorError,
    WireError,
)
from neuroshard.network.limits import CONTESTED_GRACE_SECONDS, ByteBudget, Reservation, UploadPacer, contested_seconds
from neuroshard.network.pool.connection import PoolConnection
from neuroshard.network.pool.options import MisconductError, PoolOptions
from neuroshard.network.pool.transfers import IncomingTransfer, PacketHeader, PacketKind, is_newer, packet
from neuroshard.network.reputation import Reputation, ScoreReason
from neuroshard.network.serving import RequestServer
from neuroshard.network.transport import MAX_REASON_CHARACTERS, MessageTooLargeError, RequestRefusedError
from neuroshard.types import NodeId

ASIDE_BYTES = 256 * 1024  # hashing fewer takes no longer than to hand them over and back

Done: TypeAlias = Callable[[ChunkCheck], None]
"""Called on the event loop once a check has run."""


class Verifier:
    """One thread, in which checks run in the order in which they were asked for; it lives as long as `run`."""

    def __init__(self) -> None:
        self._asked = SimpleQueue[tuple[ChunkCheck, Done] | None]()
        self._ran = deque[tuple[ChunkCheck, Done]]()
        self._waiting = trio.lowlevel.ParkingLot()

    def verify(self, check: ChunkCheck, done: Done) -> None:
        """Run a check and call `done`: at once for a small chunk, otherwise soon, while `run` runs."""
        if check.byte_count < ASIDE_BYTES:
            check.run()
            done(check)
        else:
            self._asked.put((check, done))

    async def run(self) -> None:
        """Check until cancelled."""
        in_thread = partial(self._check_all, trio.lowlevel.current_trio_token())
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(to_thread.run_sync, in_thread, limiter=anyio.CapacityLimiter(1)))
            try:
                await self._call_done()
            finally:
                self._asked.put(None)

    def _check_all(self, loop: trio.lowlevel.TrioToken) -> None:
        while (asked := self._asked.get()) is not None:
            asked[0].run()
            self._ran.append(asked)
            loop.run_sync_soon(self._waiting.unpark_all, idempotent=True)  # pyright: ignore[reportUnknownMemberType]

    async def _call_done(self) -> None:
        while True:
            while self._ran:
                check, done = self._ran.popleft()
                done(check)
            await self._waiting.park()


def _numbers() -> Callable[[], int]:
    return count(randbits(62) + 1).__next__  # of this process, not of one before it


@dataclass(frozen=True)
class Resources:
    """Belongs to one event loop."""

    server: RequestServer
    budget: ByteBudget
    pacer: UploadPacer
    reputation: Reputation
    options: PoolOptions
    tasks: TaskGroup
    verifier: Verifier = field(default_factory=Verifier)
    next_transfer: Callable[[], int] = field(default_factory=_numbers)


MAX_REMEMBERED = 1024  # transfers that are complete, so that one offered again is not taken for a new one


@dataclass(frozen=True)
class ReceivingHooks:
    """Queries and reports of the receiver to its owner. `answers` is the transfer that one answers, 0 for a request."""

    limits_of: Callable[[int, str], FrameLimits]  # answers, kind; raises RequestRefusedError
    has_room: Callable[[], bool]  # for one more request
    is_answering: Callable[[int], bool]  # the request of this number
    complete: Callable[[int, int, Frame, Reservation | None], None]  # number, answers
    failed: Callable[[int, WireError], None]  # the reply to this transfer of ours is unusable
    report: Callable[[ScoreReason], None]
    cut: Callable[[int], None]  # connection


@dataclass(eq=False)
class _Entry:
    transfer: IncomingTransfer
    connection: PoolConnection  # over which it was offered last
    serial: int  # of that offer
    begun_at: float = inf  # when there was memory for it
    deadline: float = inf  # for the whole body, from then on
    wait: anyio.CancelScope | None = None  # for memory
    lost_at: float | None = None  # when that connection ended, or a block came after that

    def respond(self) -> None:
        """Answer the offer."""
        number = self.transfer.number
        if not self.transfer.has_memory:
            answer = packet(PacketKind.WAIT, number)
        elif self.serial:
            answer = packet(PacketKind.HELD, number, self.transfer.held_blocks(), serial=self.serial)
        else:
            answer = packet(PacketKind.ACCEPT, number, self.transfer.dropped_blocks())
        self.connection.answer(answer)


class Receiver:
    """The transfers of one peer."""

    def __init__(self, peer: NodeId, shared: Resources, hooks: ReceivingHooks) -> None:
        self._peer = peer
        self._shared = shared
        self._hooks = hooks
        self._entries: dict[int, _Entry] = {}
        self._filling: dict[int, _Entry] = {}  # connection: what it is receiving a piece of
        self._complete: OrderedDict[int, None] = OrderedDict()
        self._forgotten = 0  # the highest number that was complete and is not remembered as such
        self._heard_at = 0.0  # when the last block came that was new, or the first transfer got its memory

    def is_overdue(self, now: float) -> bool:
        """Whether the peer holds memory here and sends too slowly, or not at all."""
        here = [entry for entry in self._entries.values() if entry.lost_at is None and entry.transfer.has_memory]
        if not here:
            return False
        stalled_at = self._heard_at + self._shared.options.seconds_for(CHUNK_BYTES)
        if now > min(stalled_at, *(entry.deadline for entry in here)):
            return True
        if now > self._heard_at + CONTESTED_GRACE_SECONDS and self._shared.budget.must_yield(self._peer):
            return True
        held_bytes = sum(entry.transfer.head.body_bytes for entry in here)
        is_long = now > min(entry.begun_at for entry in here) + contested_seconds(held_bytes)
        return is_long and self._shared.budget.is_awaited_by_others(self._peer)

    @property
    def is_busy(self) -> bool:
        """Whether transfers are not complete."""
        return bool(self._entries)

    @property
    def request_count(self) -> int:
        """Number of transfers that are requests of the peer."""
        return sum(not entry.transfer.answers for entry in self._entries.values())

    def read_offer(self, connection: PoolConnection, header: PacketHeader) -> OfferReading:
        """The reader of an offered frame's head."""
        return OfferReading(self, connection, header, self._hooks)

    def offered(self, connection: PoolConnection, header: PacketHeader, head: FrameHead) -> None:
        """The head of a frame came and keeps its limits. Raises MisconductError."""
        entry = self._entries.get(header.transfer)
        if header.transfer in self._complete or self._hooks.is_answering(header.transfer):
            connection.answer(packet(PacketKind.DONE, header.transfer))
        elif entry is None:
            self._start(connection, header, head)
        elif entry.transfer.head.digest != head.digest or entry.transfer.answers != header.extra:
            raise MisconductError(ScoreReason.MALFORMED_FRAME, "two transfers with one number")
        elif is_newer(header.serial, entry.serial):
            entry.connection, entry.serial, entry.lost_at = connection, header.serial, None
            entry.respond()

    def place(self, connection: PoolConnection, header: PacketHeader) -> memoryview | None:
        """Memory for a piece; None for a piece of a transfer that was given up. Raises MisconductError."""
        entry = self._entries.get(header.transfer)
        memory = None if entry is None else entry.transfer.place(connection.number, header)
        if entry is not None and memory is not None:
            self._filling[connection.number] = entry
        return memory

    def filled(self, connection: PoolConnection, header: PacketHeader) -> None:
        """A piece is in its place; when a chunk does not match its digest the transfer is refused."""
        entry = self._filling.pop(connection.number)
        filled = entry.transfer.filled(connection.number)
        if filled.new_blocks:
            self._heard_at = anyio.current_time()
            entry.lost_at = None if entry.lost_at is None else self._heard_at
        if filled.check is not None:
            self._shared.verifier.verify(filled.check, partial(self._checked, entry, connection))

    def _checked(self, entry: _Entry, connection: PoolConnection, check: ChunkCheck) -> None:
        transfer = entry.transfer
        try:
            transfer.settle(check)
        except DamagedChunkError as error:
            if self._entries.get(transfer.number) is entry:
                self.unreadable(connection, transfer.number, transfer.answers, error)
            return
        if self._entries.get(transfer.number) is entry and transfer.is_complete:
            self._finish(entry)

    def refuse(self, connection: PoolConnection, number: int, reason: str) -> None:
        """Report to the peer why its frame is refused."""
        self.drop(number)
        connection.answer(packet(PacketKind.REFUSE, number, reason[:MAX_REASON_CHARACTERS].encode()))

    def unreadable(self, connection: PoolConnection, number: int, answers: int, error: WireError) -> None:
        """The offered bytes are not a frame, or exceed its limits, or do not match their head."""
        self._hooks.report(_reason_of(error))
        if answers:
            self._hooks.failed(answers, error)
        self.refuse(connection, number, str(error))

    def drop(self, number: int) -> None:
        """Forget a transfer that is not complete."""
        entry = self._entries.pop(number, None)
        if entry is not None:
            entry.transfer.end()
            if entry.wait is not None:
                entry.wait.cancel()

    def drop_replies(self, answers: int) -> None:
        """Forget what comes in answer to a transfer of ours that was given up."""
        for number, entry in tuple(self._entries.items()):
            if entry.transfer.answers == answers:
                self.drop(number)

    def drop_all(self) -> None:
        """Forget everything that is not complete."""
        for number in tuple(self._entries):
            self.drop(number)

    def drop_lost(self, now: float) -> tuple[int, ...]:
        """Forget transfers that their sender has not offered again since it lost its connection; their numbers.

        It has given them up, and could not say so. They end sooner while a peer with a better right needs the memory.
        """
        must_yield = self._shared.budget.must_yield(self._peer)
        before = now - (CONTESTED_GRACE_SECONDS if must_yield else self._shared.options.resume_seconds)
        lost = tuple(n for n, entry in self._entries.items() if entry.lost_at is not None and entry.lost_at <= before)
        for number in lost:
            self.drop(number)
        return lost

    def forget_numbers(self) -> None:
        """Forget the numbers of transfers: the peer counts from the start again."""
        self._complete.clear()
        self._forgotten = 0

    def lose(self, connection: PoolConnection) -> None:
        """A connection ended."""
        for offered in self._entries.values():
            if offered.connection is connection:
                offered.lost_at = anyio.current_time()
        entry = self._filling.pop(connection.number, None)
        if entry is not None:
            entry.transfer.abandon(connection.number)

    def _start(self, connection: PoolConnection, header: PacketHeader, head: FrameHead) -> None:
        number = header.transfer
        try:
            self._check(header, head)
        except RequestRefusedError as error:
            self.refuse(connection, number, str(error))
            return
        transfer = IncomingTransfer(number, head, header.extra, self._hooks.cut)
        entry = _Entry(transfer, connection, header.serial)
        self._entries[number] = entry
        if not head.body_bytes:
            self._finish(entry)
            return
        try:
            reservation = self._shared.budget.try_reserve(self._peer, head.body_bytes)
        except MessageTooLargeError as error:
            self.refuse(connection, number, str(error))
            return
        if reservation is None:
            self._shared.tasks.start_soon(self._wait_for_memory, entry)
        else:
            self._begin(entry, reservation)
        entry.respond()

    def _check(self, header: PacketHeader, head: FrameHead) -> None:
        """Raises RequestRefusedError for a new transfer that is not wanted."""
        if header.extra:
            if any(entry.transfer.answers == header.extra for entry in self._entries.values()):
                raise RequestRefusedError("Another answer to this request is on its way.")
            return
        if not self._hooks.has_room():
            raise RequestRefusedError("This node is busy; try again later.")
        if header.transfer <= self._forgotten:  # numbers rise: perhaps it was handled long ago
            raise RequestRefusedError("This request is older than what this node remembers.")
        self._shared.server.check(self._peer, head.kind, head.body_bytes)

    def _begin(self, entry: _Entry, reservation: Reservation) -> None:
        now = anyio.current_time()
        others = [other for other in self._entries.values() if other.transfer.has_memory]
        if not others:
            self._heard_at = now
        # they come one after the other
        body_bytes = sum(other.transfer.head.body_bytes for other in (entry, *others))
        entry.begun_at = now
        entry.deadline = now + self._shared.options.seconds_for(body_bytes)
        entry.transfer.begin(reservation)

    async def _wait_for_memory(self, entry: _Entry) -> None:
        transfer = entry.transfer
        entry.wait = anyio.CancelScope()
        with entry.wait:
            reservation = await self._shared.budget.reserve(self._peer, transfer.head.body_bytes)
            if self._entries.get(transfer.number) is not entry:  # given up in the very moment
                reservation.release()
                return
            self._begin(entry, reservation)
            entry.respond()

    def _finish(self, entry: _Entry) -> None:
        transfer = entry.transfer
        del self._entries[transfer.number]
        self._complete[transfer.number] = None
        if len(self._complete) > MAX_REMEMBERED:
            self._forgotten = max(self._forgotten, self._complete.popitem(last=False)[0])
        entry.connection.answer(packet(PacketKind.DONE, transfer.number))
        self._hooks.complete(transfer.number, transfer.answers, *transfer.frame())


class OfferReading:
    """Reads a head in the portions in which it arrives."""

    def __init__(
        self, receiver: Receiver, connection: PoolConnection, header: PacketHeader, hooks: ReceivingHooks
    ) -> None:
        self._receiver = receiver
        self._connection = connection
        self._header = header
        self._decoder = FrameDecoder(lambda kind: hooks.limits_of(header.extra, kind))
        self._error: WireError | RequestRefusedError | None = None

    def feed(self, data: memoryview) -> None:
        """Read a part of the head; after an error the rest is skipped."""
        if self._error is not None:
            return
        try:
            if self._decoder.head is not None or self._decoder.feed(data) != len(data):
                self._error = MalformedFrameError("There are bytes after the head of a frame.")
        except (WireError, RequestRefusedError) as error:
            self._error = error

    def end(self) -> None:
        """Accept or refuse the offered transfer, once its head is complete."""
        if isinstance(self._error, RequestRefusedError):
            self._receiver.refuse(self._connection, self._header.transfer, str(self._error))
        elif self._error is not None or self._decoder.head is None:
            error = self._error or MalformedFrameError("The head of a frame ends too early.")
            self._receiver.unreadable(self._connection, self._header.transfer, self._header.extra, error)
        else:
            self._receiver.offered(self._connection, self._header, self._decoder.head)


def _reason_of(error: WireError) -> ScoreReason:
    match error:
        case FrameTooLargeError():
            return ScoreReason.OVERSIZED
        case UnexpectedTensorError():
            return ScoreReason.UNEXPECTED_TENSOR
        case DamagedChunkError():
            return ScoreReason.DIGEST_MISMATCH
        case _:
            return ScoreReason.MALFORMED_FRAME
