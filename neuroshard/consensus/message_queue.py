"""Sends and receives the messages of a stage's rounds: cut into parts, which are repeated until they arrive.

The queue accepts messages only from nodes that train the stage, and a limited number of bytes at once. If they are too
many, the messages of nodes that count displace those of names that cost nothing. Small messages arrive at a receiver in
the order in which they were sent. Several large ones are under way to it at a time, so one may overtake another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from secrets import randbits
from typing import Annotated, TypeAlias

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup
from msgspec import Meta, Struct

from neuroshard.consensus.slices import Encoded
from neuroshard.messages import Frame, FrameLimits, TensorPart, TensorSpec, WireError
from neuroshard.network import PeerRefusedError, PeerUnreachableError, RequestRefusedError, TransportClosedError
from neuroshard.network.transport import Requester
from neuroshard.state.transfer_messages import LARGEST_NUMBER, Count, StageName
from neuroshard.types import NodeId

PART = "round/part"
PART_BYTES = 4 << 20
PART_SECONDS = 1200.0  # four parts of 4 MiB at 110 kbit/s
PARTS_AT_ONCE = 32
LARGE_AT_ONCE = 4  # messages under way to a receiver: they fill the line while the answers to others are under way
SMALL_AT_ONCE = 1  # so that they stay in order; a small message, such as a vote, waits for no large one
RETRY_SECONDS = 1.0
MAX_TRIES = 5  # for a part whose receiver is unreachable; a receiver that returns asks again
MEASURED_BYTES = 64 << 10  # smaller parts measure the delay rather than the bandwidth
STALE_SECONDS = 60.0  # a message without progress for this time may be displaced by others
SMALL_BYTES = 256 << 10
MAX_WAITING = 400  # messages for one receiver
OnRoundMessage: TypeAlias = Callable[[NodeId, Sequence[Encoded]], Awaitable[None]]
"""Is given the sender and the bytes of a whole message, in pieces."""


class MessagePart(Struct, frozen=True, forbid_unknown_fields=True):
    """A part of a round's message. Its bytes are the one tensor of the frame."""

    stage: StageName
    number: Count  # of the message
    start: Count  # place of the first byte of this part
    size: Annotated[int, Meta(ge=1, le=LARGEST_NUMBER)]  # of the whole message, in bytes


class RoundAnswer(Struct, frozen=True, forbid_unknown_fields=True):
    """The request is accepted."""


PART_LIMITS = FrameLimits(2048, PART_BYTES, message=MessagePart)
ANSWER_LIMITS = FrameLimits(256, message=RoundAnswer)


@dataclass
class _Arriving:
    """A partly received message. Its parts arrive in order."""

    size: int  # in bytes
    moved_at: float
    pieces: list[memoryview] = field(default_factory=list[memoryview])
    length: int = 0
    is_over: bool = False  # the whole message has arrived


@dataclass
class _Lane:
    """The small or the large messages that wait for one receiver or are under way to it."""

    most_carriers: int  # tasks that send its messages
    waiting: deque[Sequence[Encoded]] = field(default_factory=deque[Sequence[Encoded]])
    carriers: int = 0
    moving: int = 0  # bytes in parts that are under way


class RoundMessageQueue:
    """The message queue of one stage."""

    def __init__(
        self,
        stage: StageName,
        requester: Requester,
        max_bytes: int,
        received: OnRoundMessage,
        counts: Callable[[NodeId], bool],
    ) -> None:
        """`received` gets each message of at most `max_bytes`. `counts` is false for names that cost nothing."""
        self.stage = stage
        self._requester = requester
        self._max_bytes = max_bytes
        self._received = received
        self.counts = counts
        self._arriving: dict[tuple[NodeId, int], _Arriving] = {}  # by the message's sender and number
        # by receiver, and whether it is for large messages, while a message waits or is under way
        self._lanes: dict[tuple[NodeId, bool], _Lane] = {}
        self._number = randbits(48)  # random: a receiver may remember numbers from before this node's restart
        self.upload = 0  # rate to one receiver in bytes per second, from recent large parts; 0 while unknown
        self.sent_bytes = self.received_bytes = 0  # in parts that arrived, since the start
        self._tasks: TaskGroup | None = None

    async def run(self) -> None:
        """Transfer messages until cancelled."""
        async with anyio.create_task_group() as tasks:
            self._tasks = tasks
            try:
                for key, lane in self._lanes.items():
                    lane.carriers = min(lane.most_carriers, len(lane.waiting))
                    for _ in range(lane.carriers):
                        tasks.start_soon(self._carry, key, lane)
                await anyio.sleep_forever()
            finally:
                self._tasks = None

    def send(self, peer: NodeId, message: Sequence[Encoded]) -> None:
        """Queue the bytes of a message for a receiver."""
        key = peer, _size(message) > SMALL_BYTES
        lane = self._lanes.setdefault(key, _Lane(LARGE_AT_ONCE if key[1] else SMALL_AT_ONCE))
        waiting = lane.waiting
        waiting.append(message)
        while len(waiting) > MAX_WAITING or (len(waiting) > 1 and sum(map(_size, waiting)) > 2 * self._max_bytes):
            waiting.popleft()
        if self._tasks is not None and lane.carriers < lane.most_carriers:
            lane.carriers += 1
            self._tasks.start_soon(self._carry, key, lane)

    def is_empty(self) -> bool:
        """Whether no message waits or is under way."""
        return not self._lanes

    def has_room_for(self, peer: NodeId) -> bool:
        """Whether no large message waits for this receiver."""
        lane = self._lanes.get((peer, True))
        return lane is None or not lane.waiting

    async def take(self, sender: NodeId, frame: Frame) -> Frame:
        """Accept a part. Raises RequestRefusedError."""
        await anyio.lowlevel.checkpoint()
        part = frame.read(MessagePart)
        if len(frame.tensors) != 1 or frame.tensors[0].spec.dtype != "uint8":
            raise RequestRefusedError("A part is one tensor of bytes.")
        data = memoryview(frame.tensors[0].data)
        if part.start == 0:
            self._begin(sender, part)
        arriving, start = self._arriving.get((sender, part.number)), part.start
        stop = start + len(data)
        if arriving is None or arriving.size != part.size:
            raise RequestRefusedError("The part does not follow the one before.")
        if stop <= arriving.length and (start < stop or arriving.is_over):
            return Frame(PART, RoundAnswer())  # it came before, and the answer was lost
        if arriving.is_over or start != arriving.length or stop > arriving.size:
            raise RequestRefusedError("The part does not follow the one before.")
        if stop - start < PART_BYTES and stop < arriving.size:  # otherwise any number of short parts would be kept
            raise RequestRefusedError(f"Only the last part of a message has less than {PART_BYTES} bytes.")
        # memory is taken by parts that arrived, not by announced ones; small messages such as votes always fit
        if arriving.size > SMALL_BYTES and not self._has_memory(sender, stop - start):
            raise RequestRefusedError("There is no memory for this message now; try again later.")
        arriving.length, arriving.moved_at = stop, anyio.current_time()
        arriving.pieces.append(data)
        self.received_bytes += stop - start
        if arriving.length == arriving.size:
            arriving.is_over, pieces, arriving.pieces = True, arriving.pieces, []
            await self._received(sender, pieces)
        return Frame(PART, RoundAnswer())

    def _has_memory(self, sender: NodeId, size: int) -> bool:
        """Whether a part may be kept. For a node that counts, messages of others are dropped: they start again."""
        others = [key for key, one in self._arriving.items() if not one.is_over and not self.counts(key[0])]
        while self._arrived_bytes() + size > 2 * self._max_bytes:
            if not others or not self.counts(sender):
                return False
            del self._arriving[others.pop()]
        return True

    def _arrived_bytes(self) -> int:
        return sum(one.length for one in self._arriving.values() if not one.is_over)

    def _begin(self, sender: NodeId, part: MessagePart) -> None:
        if (sender, part.number) in self._arriving:
            return
        now, of_sender, over = anyio.current_time(), list[tuple[NodeId, int]](), list[tuple[NodeId, int]]()
        for key, one in list(self._arriving.items()):
            if now - one.moved_at > STALE_SECONDS:
                del self._arriving[key]
            elif key[0] == sender:
                (over if one.is_over else of_sender).append(key)
        if part.size > self._max_bytes:
            raise RequestRefusedError("There is no memory for a message of this size now; try again later.")
        if (
            len(over) + len(of_sender) == LARGE_AT_ONCE + SMALL_AT_ONCE
        ):  # an honest sender begins no other one before one is over
            del self._arriving[[*over, *of_sender][0]]
        self._arriving[sender, part.number] = _Arriving(part.size, now)

    async def _carry(self, key: tuple[NodeId, bool], lane: _Lane) -> None:
        """Send waiting messages of a lane, then end: a node meets many receivers in its life."""
        try:
            while lane.waiting:
                number = self._number = self._number + 1
                await self._send(key[0], lane, number, lane.waiting.popleft())
        finally:
            lane.carriers -= 1
            if not lane.carriers and not lane.waiting:
                del self._lanes[key]

    async def _send(self, peer: NodeId, lane: _Lane, number: int, message: Sequence[Encoded]) -> None:
        start, size = 0, _size(message)
        for pieces in _parts_of(message):
            part, length = MessagePart(self.stage, number, start, size), sum(map(len, pieces))
            tensor = TensorPart(TensorSpec("part", "uint8", (length,)), pieces[0], tuple(pieces[1:]))
            lane.moving += length
            try:
                if not await self._has_arrived(peer, Frame(PART, part, (tensor,)), length, lane.moving):
                    return
            finally:
                lane.moving -= length
            start += length

    async def _has_arrived(self, peer: NodeId, frame: Frame, length: int, moving: int) -> bool:
        """Send a part of this length, with which `moving` bytes are under way to its receiver."""
        for _ in range(MAX_TRIES):
            began = anyio.current_time()
            try:
                await self._requester.request(peer, frame, reply=ANSWER_LIMITS, timeout_seconds=PART_SECONDS)
            except (PeerRefusedError, PeerUnreachableError, WireError):
                await anyio.sleep(RETRY_SECONDS)
            except TransportClosedError:
                return False
            else:
                self.sent_bytes += length
                seconds = anyio.current_time() - began
                if length >= MEASURED_BYTES and seconds > 0:
                    rate = int(moving / seconds)
                    self.upload = rate if self.upload == 0 else (3 * self.upload + rate) // 4
                return True
        return False


def _size(message: Sequence[Encoded]) -> int:
    return sum(map(len, message))


def _parts_of(message: Sequence[Encoded]) -> Iterator[Sequence[memoryview]]:
    """The bytes of a message in parts of PART_BYTES, without copying."""
    pieces, room = list[memoryview](), PART_BYTES
    for view in map(memoryview, message):
        start = 0
        while start < len(view):
            piece = view[start : start + room]
            pieces.append(piece)
            start, room = start + len(piece), room - len(piece)
            if room == 0:
                yield pieces
                pieces, room = [], PART_BYTES
    if pieces:
        yield pieces
