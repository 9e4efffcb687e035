"""Sends and receives the messages of a stage's rounds: cut into parts, in order, repeated until they arrive.

The queue accepts messages only from nodes that train the stage, and a limited number of bytes at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from secrets import randbits
from typing import TypeAlias, cast

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

from neuroshard.consensus.message_frames import KIND
from neuroshard.identity.strict_json import exact_object, line_field, list_field, whole_field
from neuroshard.messages import MAX_HEADER_BYTES, Frame, FrameLimits, TensorPart, TensorSpec, WireError, WireValue
from neuroshard.network import (
    PeerRefusedError,
    PeerUnreachableError,
    RequestRefusedError,
    ScoreReason,
    TransportClosedError,
)
from neuroshard.network.transport import Requester
from neuroshard.state.transfer_messages import LARGEST_NUMBER, StageName, read_request_about, request_about
from neuroshard.types import JsonValue, NodeId

PART = "round/part"
PART_BYTES = 4 << 20
PART_SECONDS = 300.0  # 4 MiB at 110 kbit/s
PARTS_AT_ONCE = 16
MAX_PIECES = 16  # pieces per part: a part in more pieces is copied into one
MAX_TENSORS = 256  # tensors per message: slices, claims and votes
PART_LIMITS = FrameLimits(MAX_HEADER_BYTES, PART_BYTES)
RETRY_SECONDS = 1.0
MAX_TRIES = 5  # for a part whose receiver is unreachable; a receiver that returns asks again
MEASURED_BYTES = 64 << 10  # smaller parts measure the delay rather than the bandwidth
STALE_SECONDS = 60.0  # a message without progress for this time may be displaced by others
SMALL_BYTES = 256 << 10
MAX_WAITING = 400  # messages for one receiver
OnRoundMessage: TypeAlias = Callable[[NodeId, Frame], Awaitable[None]]
"""Is given the sender and a whole message."""


@dataclass
class _Arriving:
    """A partly received message. Its parts arrive in order."""

    number: int
    header: Mapping[str, WireValue]
    specs: Sequence[TensorSpec]
    total: int  # in bytes
    moved_at: float
    pieces: list[memoryview] = field(default_factory=list[memoryview])
    length: int = 0
    is_over: bool = False  # the whole message has arrived


class RoundMessageQueue:
    """The message queue of one stage."""

    def __init__(
        self,
        stage: StageName,
        requester: Requester,
        limits: FrameLimits,
        received: OnRoundMessage,
        report: Callable[[NodeId, ScoreReason], None] = lambda _node, _reason: None,
    ) -> None:
        """`received` gets each message within the limits; `report` gets the senders of invalid ones."""
        self.stage = stage
        self._requester = requester
        self._limits = limits
        self._received = received
        self._report = report
        self._arriving: dict[NodeId, _Arriving] = {}
        self._outboxes: dict[NodeId, deque[Frame]] = {}  # receivers for which a message waits or is under way
        self._number = randbits(48)  # random: a receiver may remember numbers from before this node's restart
        self._upload = 0
        self.sent_bytes = self.received_bytes = 0  # in parts that arrived, since the start
        self._tasks: TaskGroup | None = None

    @property
    def upload(self) -> int:
        """Upload rate to one receiver in bytes per second, from recent large parts; 0 while unknown."""
        return self._upload

    async def run(self) -> None:
        """Transfer messages until cancelled."""
        async with anyio.create_task_group() as tasks:
            self._tasks = tasks
            try:
                for peer in self._outboxes:
                    tasks.start_soon(self._carry, peer)
                await anyio.sleep_forever()
            finally:
                self._tasks = None

    def send(self, peer: NodeId, message: Frame) -> None:
        """Queue a message for a receiver."""
        outbox = self._outboxes.get(peer)
        if outbox is None:
            outbox = self._outboxes[peer] = deque()
            if self._tasks is not None:
                self._tasks.start_soon(self._carry, peer)
        outbox.append(message)
        while len(outbox) > MAX_WAITING or (len(outbox) > 1 and self._waits_too_much(outbox)):
            outbox.popleft()

    def has_room_for(self, peer: NodeId) -> bool:
        """Whether no large message waits for this receiver."""
        return all(_size(message) <= SMALL_BYTES for message in self._outboxes.get(peer, ()))

    def _waits_too_much(self, outbox: Iterable[Frame]) -> bool:
        return sum(map(_size, outbox)) > 2 * self._limits.max_body_bytes

    async def take(self, sender: NodeId, frame: Frame) -> Frame:
        """Accept a part. Raises RequestRefusedError."""
        await anyio.lowlevel.checkpoint()
        _, fields = read_part(frame)
        try:
            number, start = (whole_field(fields[name], 0, LARGEST_NUMBER, name) for name in ("number", "start"))
        except ValueError as error:
            raise RequestRefusedError(f"The part cannot be read: {error}.") from None
        data = [memoryview(tensor.data) for tensor in frame.tensors]
        if len(data) > MAX_PIECES or any(tensor.spec.dtype != "uint8" for tensor in frame.tensors):
            raise RequestRefusedError(f"A part is bytes in at most {MAX_PIECES} pieces.")
        if start == 0:
            self._begin(sender, number, fields["message"])
        arriving, stop = self._arriving.get(sender), start + sum(map(len, data))
        if arriving is None or arriving.number != number:
            raise RequestRefusedError("The part does not follow the one before.")
        if stop <= arriving.length and (start < stop or arriving.is_over):
            return Frame(PART)  # it came before, and the answer was lost
        if arriving.is_over or start != arriving.length or stop > arriving.total:
            raise RequestRefusedError("The part does not follow the one before.")
        if stop - start < PART_BYTES and stop < arriving.total:  # otherwise any number of short parts would be kept
            raise RequestRefusedError(f"Only the last part of a message has less than {PART_BYTES} bytes.")
        # memory is taken by parts that arrived, not by announced ones; small messages such as votes always fit
        if arriving.total > SMALL_BYTES and self._arrived_bytes() + stop - start > 2 * self._limits.max_body_bytes:
            raise RequestRefusedError("There is no memory for this message now; try again later.")
        arriving.length, arriving.moved_at = stop, anyio.current_time()
        arriving.pieces += data
        self.received_bytes += stop - start
        if arriving.length == arriving.total:
            arriving.is_over, pieces, arriving.pieces = True, arriving.pieces, []
            await self._received(sender, Frame(KIND, arriving.header, _cut(pieces, arriving.specs)))
        return Frame(PART)

    def _arrived_bytes(self) -> int:
        return sum(one.length for one in self._arriving.values() if not one.is_over)

    def _begin(self, sender: NodeId, number: int, message: JsonValue) -> None:
        known = self._arriving.get(sender)
        if known is not None and known.number == number:
            return
        now = anyio.current_time()
        for node, one in list(self._arriving.items()):
            if now - one.moved_at > STALE_SECONDS:
                del self._arriving[node]
        try:
            header, specs = _read_message(message)
        except (ValueError, WireError) as error:
            self._report(sender, ScoreReason.MALFORMED_FRAME)
            raise RequestRefusedError(f"This is not a message of a round: {error}") from None
        total = sum(spec.byte_count for spec in specs)
        if total > self._limits.max_body_bytes:
            raise RequestRefusedError("There is no memory for a message of this size now; try again later.")
        self._arriving[sender] = _Arriving(number, header, specs, total, now)

    async def _carry(self, peer: NodeId) -> None:
        """Send all waiting messages of one receiver, then end: a node meets many receivers in its life."""
        outbox = self._outboxes[peer]
        while outbox:
            message = outbox.popleft()
            number = self._number = self._number + 1
            await self._send(peer, number, message)
        del self._outboxes[peer]

    async def _send(self, peer: NodeId, number: int, message: Frame) -> None:
        start, about = 0, _about(message)
        for pieces in _parts_of(message):
            header = request_about(PART, self.stage, number=number, start=start, message=about).header
            tensors = tuple(
                TensorPart(TensorSpec(f"piece {place}", "uint8", (len(piece),)), piece)
                for place, piece in enumerate(pieces)
            )
            if not await self._has_arrived(peer, Frame(PART, header, tensors)):
                return
            start, about = start + sum(map(len, pieces)), None

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
    """The stage of a part, and its header. Raises RequestRefusedError."""
    return read_request_about(frame, "number", "start", "message")


def _about(message: Frame) -> WireValue:
    """The description of a message that its first part contains."""
    return {"header": message.header, "tensors": [[part.spec.name, len(part.data)] for part in message.tensors]}


def _read_message(about: JsonValue) -> tuple[Mapping[str, WireValue], Sequence[TensorSpec]]:
    """The inverse of `_about`. Raises ValueError, WireError."""
    fields = exact_object(about, {"header", "tensors"}, "a message")
    pairs = [list_field(pair, 2, "tensors") for pair in list_field(fields["tensors"], MAX_TENSORS, "tensors")]
    if not isinstance(fields["header"], Mapping) or any(len(pair) != 2 for pair in pairs):
        raise ValueError("a message has a header, and tensors with name and size")
    named = {line_field(name, 32, "name"): whole_field(size, 0, LARGEST_NUMBER, "size") for name, size in pairs}
    if len(named) != len(pairs):
        raise ValueError("a message names a tensor twice")
    specs = [TensorSpec(name, "uint8", (size,)) for name, size in named.items()]
    return cast("Mapping[str, WireValue]", fields["header"]), specs


def _size(message: Frame) -> int:
    return sum(len(part.data) for part in message.tensors)


def _parts_of(message: Frame) -> Iterator[Sequence[memoryview]]:
    """The bytes of a message in parts of PART_BYTES, without copying; at least one part."""
    pieces, room = list[memoryview](), PART_BYTES
    for view in (memoryview(part.data) for part in message.tensors):
        start = 0
        while start < len(view):
            piece = view[start : start + room]
            pieces.append(piece)
            start, room = start + len(piece), room - len(piece)
            if room == 0:
                yield _in_few_pieces(pieces)
                pieces, room = [], PART_BYTES
    if pieces or not _size(message):
        yield _in_few_pieces(pieces)


def _in_few_pieces(pieces: Sequence[memoryview]) -> Sequence[memoryview]:
    return [memoryview(b"".join(pieces))] if len(pieces) > MAX_PIECES else pieces


def _cut(pieces: Sequence[memoryview], specs: Sequence[TensorSpec]) -> tuple[TensorPart, ...]:
    """Tensors cut from consecutive pieces. Only a tensor that spans several pieces is copied."""
    rest, tensors = deque(pieces), list[TensorPart]()
    for spec in specs:
        views, missing = list[memoryview](), spec.byte_count
        while missing:
            piece = rest.popleft()
            views.append(piece[:missing])
            missing -= len(views[-1])
            if len(views[-1]) < len(piece):
                rest.appendleft(piece[len(views[-1]) :])
        tensors.append(TensorPart(spec, views[0] if len(views) == 1 else b"".join(views)))
    return tuple(tensors)
