"""Messages of a stage's rounds as requests: cut into parts, in order for each receiver, sent again until they arrive.

A receiver takes messages from nodes at work on the stage only, at most so many bytes at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from secrets import randbits
from typing import TypeAlias

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

from neuroshard.network import (
    PeerRefusedError,
    PeerUnreachableError,
    RequestRefusedError,
    ScoreReason,
    TransportClosedError,
)
from neuroshard.swarm.claim_fields import whole_field
from neuroshard.training.remote_hop import Requester
from neuroshard.training.transfer.fields import LARGEST_NUMBER, StageName, read_request_about, request_about
from neuroshard.types import JsonValue, NodeId
from neuroshard.wire import (
    CHUNK_BYTES,
    MAX_HEADER_BYTES,
    PREFIX_BYTES,
    EncodedFrame,
    Frame,
    FrameDecoder,
    FrameLimits,
    MalformedFrameError,
    TensorPart,
    TensorSpec,
    WireError,
    decode_where_it_lies,
)

PART = "round/part"
PART_BYTES = 4 << 20
PART_SECONDS = 300.0  # 4 MiB at 110 kbit/s
PARTS_AT_ONCE = 16
MAX_PIECES = 16  # of a part: what lies in more places is copied into one
PART_LIMITS = FrameLimits(4096, PART_BYTES)
DIGEST_BYTES = 32  # of each chunk, in a frame's head
RETRY_SECONDS = 1.0
MAX_TRIES = 5  # of a part whose receiver cannot be reached: who comes back asks again
MEASURED_BYTES = 64 << 10  # smaller parts say more about the delay than about the line
STALE_SECONDS = 60.0  # a message of which nothing has come for so long gives way to others
SMALL_BYTES = 256 << 10
MAX_WAITING = 400  # messages for one receiver
Received: TypeAlias = Callable[[NodeId, Frame], Awaitable[None]]
"""Is given the sender and a whole message."""


@dataclass
class _Arriving:
    """A message of one sender, whose parts come in order."""

    number: int
    total: int  # bytes
    decoder: FrameDecoder
    moved_at: float
    length: int = 0
    is_over: bool = False  # it came whole, or cannot be read


@dataclass
class _Outbox:
    """What waits for one receiver."""

    waiting: deque[EncodedFrame] = field(default_factory=deque[EncodedFrame])
    filled: anyio.Event = field(default_factory=anyio.Event)


class RoundMail:
    """One stage's."""

    def __init__(
        self,
        stage: StageName,
        requester: Requester,
        limits: FrameLimits,
        received: Received,
        report: Callable[[NodeId, ScoreReason], None] = lambda _node, _reason: None,
    ) -> None:
        """`received` is given each message within the limits; `report` hears of senders of others."""
        self.stage = stage
        self._requester = requester
        self._limits = limits
        self._received = received
        self._report = report
        self._arriving: dict[NodeId, _Arriving] = {}
        self._outboxes: dict[NodeId, _Outbox] = {}
        self._number = randbits(48)  # a receiver may remember numbers of this node's last life
        self._upload = 0
        self.sent_bytes = self.received_bytes = 0  # of parts that arrived, since the start
        self._tasks: TaskGroup | None = None

    @property
    def upload(self) -> int:
        """Bytes a second that went to one receiver at a time, of the last large parts; 0 while unknown."""
        return self._upload

    async def run(self) -> None:
        """Carry messages until cancelled."""
        async with anyio.create_task_group() as tasks:
            self._tasks = tasks
            try:
                for peer in self._outboxes:
                    tasks.start_soon(self._carry, peer)
                await anyio.sleep_forever()
            finally:
                self._tasks = None

    def send(self, peer: NodeId, message: EncodedFrame) -> None:
        """Put a message into the receiver's outbox."""
        outbox = self._outboxes.get(peer)
        if outbox is None:
            outbox = self._outboxes[peer] = _Outbox()
            if self._tasks is not None:
                self._tasks.start_soon(self._carry, peer)
        outbox.waiting.append(message)
        while len(outbox.waiting) > MAX_WAITING or (len(outbox.waiting) > 1 and self._waits_too_much(outbox)):
            outbox.waiting.popleft()
        outbox.filled.set()

    def has_room_for(self, peer: NodeId) -> bool:
        """Whether no large message waits for this receiver."""
        outbox = self._outboxes.get(peer)
        return outbox is None or all(message.byte_count <= SMALL_BYTES for message in outbox.waiting)

    def _waits_too_much(self, outbox: _Outbox) -> bool:
        return sum(message.byte_count for message in outbox.waiting) > 2 * most_bytes(self._limits)

    async def take(self, sender: NodeId, frame: Frame) -> Frame:
        """Take in a part. Raises RequestRefusedError."""
        await anyio.lowlevel.checkpoint()
        _, fields = read_part(frame)
        try:
            number, total, start = (
                whole_field(fields[name], 0, LARGEST_NUMBER, name) for name in ("number", "total", "start")
            )
        except ValueError as error:
            raise RequestRefusedError(f"The part cannot be read: {error}.") from None
        data = [memoryview(tensor.data) for tensor in frame.tensors]
        if not data or len(data) > MAX_PIECES or any(tensor.spec.dtype != "uint8" for tensor in frame.tensors):
            raise RequestRefusedError(f"A part is bytes in 1 to {MAX_PIECES} pieces.")
        if start == 0:
            self._begin(sender, number, total)
        arriving, stop = self._arriving.get(sender), start + sum(map(len, data))
        if arriving is not None and arriving.number == number and stop <= arriving.length:
            return Frame(PART)  # it came before, and the answer to it did not
        is_next = arriving is not None and arriving.number == number and arriving.length == start
        if arriving is None or arriving.is_over or not is_next or stop > arriving.total:
            raise RequestRefusedError("The part does not follow the one before.")
        # what was announced and does not come takes no memory; small messages, votes among them, always find room
        if arriving.total > SMALL_BYTES and self._arrived_bytes() + stop - start > 2 * most_bytes(self._limits):
            raise RequestRefusedError("There is no room for this message now.")
        arriving.length, arriving.moved_at = stop, anyio.current_time()
        self.received_bytes += sum(map(len, data))
        try:
            whole = self._read(arriving, data, self._limits)
        except WireError as error:
            arriving.is_over = True
            self._report(sender, ScoreReason.MALFORMED_FRAME)
            raise RequestRefusedError(f"This is no message of a round: {error}") from None
        if whole is not None:
            await self._received(sender, whole)
        return Frame(PART)

    @staticmethod
    def _read(arriving: _Arriving, data: Sequence[memoryview], limits: FrameLimits) -> Frame | None:
        """The message, once it is whole. Raises WireError."""
        decoder = arriving.decoder
        if arriving.length == arriving.total == sum(map(len, data)):  # it came in one part
            frame = decode_where_it_lies(data, lambda _kind: limits)
            if frame is not None:
                arriving.is_over = True
                return frame
        for piece in data:
            used = 0
            while used < len(piece) and not decoder.is_complete:
                used += decoder.feed(piece[used:])
            if used < len(piece):
                raise MalformedFrameError("There are bytes after a message.")
        if arriving.length < arriving.total:
            return None
        frame = decoder.frame()
        arriving.is_over, arriving.decoder = True, FrameDecoder(lambda _kind: FrameLimits())
        return frame

    def _arrived_bytes(self) -> int:
        return sum(one.length for one in self._arriving.values() if not one.is_over)

    def _begin(self, sender: NodeId, number: int, total: int) -> None:
        known = self._arriving.get(sender)
        if known is not None and known.number == number:
            return
        now, largest = anyio.current_time(), most_bytes(self._limits)
        for node, one in list(self._arriving.items()):
            if now - one.moved_at > STALE_SECONDS:
                del self._arriving[node]
        if total > largest:
            raise RequestRefusedError("There is no room for a message as large as this one.")
        self._arriving[sender] = _Arriving(number, total, FrameDecoder(lambda _kind: self._limits), now)

    async def _carry(self, peer: NodeId) -> None:
        outbox = self._outboxes[peer]
        while True:
            while not outbox.waiting:
                outbox.filled = anyio.Event()
                await outbox.filled.wait()
            message = outbox.waiting.popleft()
            number = self._number = self._number + 1
            await self._send(peer, number, message)

    async def _send(self, peer: NodeId, number: int, message: EncodedFrame) -> None:
        start = 0
        for pieces in _parts_of(message):
            about = request_about(PART, self.stage, number=number, total=message.byte_count, start=start)
            tensors = tuple(
                TensorPart(TensorSpec(f"piece {place}", "uint8", (len(piece),)), piece)
                for place, piece in enumerate(pieces)
            )
            if not await self._has_arrived(peer, Frame(PART, about.header, tensors)):
                return
            start += sum(map(len, pieces))

    async def _has_arrived(self, peer: NodeId, frame: Frame) -> bool:
        for _ in range(MAX_TRIES):
            began = anyio.current_time()
            try:
                await self._requester.request(peer, frame, timeout_seconds=PART_SECONDS)
            except (PeerRefusedError, PeerUnreachableError, WireError):
                await anyio.sleep(RETRY_SECONDS)
            except TransportClosedError:
                return False
            else:
                self._measure(sum(len(tensor.data) for tensor in frame.tensors), anyio.current_time() - began)
                return True
        return False

    def _measure(self, size: int, seconds: float) -> None:
        self.sent_bytes += size
        if size >= MEASURED_BYTES and seconds > 0:
            rate = int(size / seconds)
            self._upload = rate if self._upload == 0 else (3 * self._upload + rate) // 4


def read_part(frame: Frame) -> tuple[StageName, Mapping[str, JsonValue]]:
    """The stage that a part is for, and its header. Raises RequestRefusedError."""
    return read_request_about(frame, "number", "total", "start")


def most_bytes(limits: FrameLimits) -> int:
    """Of a message within the limits, with its head."""
    chunks = limits.max_body_bytes // CHUNK_BYTES + 1
    return limits.max_body_bytes + MAX_HEADER_BYTES + PREFIX_BYTES + DIGEST_BYTES * chunks


def _parts_of(message: EncodedFrame) -> Iterator[Sequence[memoryview]]:
    """The bytes of a message, PART_BYTES at a time, where they lie."""
    pieces, room = list[memoryview](), PART_BYTES
    for view in (memoryview(message.head), *message.body):
        start = 0
        while start < len(view):
            piece = view[start : start + room]
            pieces.append(piece)
            start, room = start + len(piece), room - len(piece)
            if room == 0:
                yield _in_few_pieces(pieces)
                pieces, room = [], PART_BYTES
    if pieces:
        yield _in_few_pieces(pieces)


def _in_few_pieces(pieces: Sequence[memoryview]) -> Sequence[memoryview]:
    return [memoryview(b"".join(pieces))] if len(pieces) > MAX_PIECES else pieces
