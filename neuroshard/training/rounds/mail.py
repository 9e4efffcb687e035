"""Messages of a stage's rounds as requests: cut into parts, in order for each receiver, sent again until they arrive.

A receiver takes messages from nodes at work on the stage only, at most so many bytes at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from secrets import randbits
from typing import TypeAlias

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

from neuroshard.network import PeerRefusedError, PeerUnreachableError, RequestRefusedError, TransportClosedError
from neuroshard.swarm.claim_fields import whole_field
from neuroshard.training.remote_hop import Requester
from neuroshard.training.transfer.fields import LARGEST_NUMBER, StageName, read_request_about, request_about
from neuroshard.types import JsonValue, NodeId
from neuroshard.wire import Frame, FrameLimits, TensorPart, TensorSpec, WireError

PART = "round/part"
PART_BYTES = 4 << 20
PART_SECONDS = 300.0  # 4 MiB at 110 kbit/s
PARTS_AT_ONCE = 16
PART_LIMITS = FrameLimits(1024, PART_BYTES)
RETRY_SECONDS = 1.0
MAX_TRIES = 5  # of a part whose receiver cannot be reached: who comes back asks again
MEASURED_BYTES = 64 << 10  # smaller parts say more about the delay than about the line
STALE_SECONDS = 60.0  # a message of which nothing has come for so long gives way to others
MAX_WAITING = 400  # messages for one receiver
Received: TypeAlias = Callable[[NodeId, bytes], Awaitable[None]]
"""Is given the sender and a whole message."""


@dataclass
class _Arriving:
    """A message of one sender, whose parts come in order."""

    number: int
    content: bytearray
    moved_at: float
    length: int = 0


@dataclass
class _Outbox:
    """What waits for one receiver."""

    waiting: deque[bytes] = field(default_factory=deque[bytes])
    filled: anyio.Event = field(default_factory=anyio.Event)


class RoundMail:
    """One stage's."""

    def __init__(self, stage: StageName, requester: Requester, largest: int, received: Received) -> None:
        """`received` is given each message, of at most `largest` bytes."""
        self.stage = stage
        self._requester = requester
        self._largest = largest
        self._received = received
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

    def send(self, peer: NodeId, payload: bytes) -> None:
        """Put a message into the receiver's outbox."""
        outbox = self._outboxes.get(peer)
        if outbox is None:
            outbox = self._outboxes[peer] = _Outbox()
            if self._tasks is not None:
                self._tasks.start_soon(self._carry, peer)
        outbox.waiting.append(payload)
        while len(outbox.waiting) > MAX_WAITING:
            outbox.waiting.popleft()
        outbox.filled.set()

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
        if len(frame.tensors) != 1 or frame.tensors[0].spec.dtype != "uint8":
            raise RequestRefusedError("A part is bytes.")
        if start == 0:
            self._begin(sender, number, total)
        arriving, data = self._arriving.get(sender), memoryview(frame.tensors[0].data)
        stop = start + len(data)
        if arriving is not None and arriving.number == number and stop <= arriving.length:
            return Frame(PART)  # it came before, and the answer to it did not
        is_next = arriving is not None and arriving.number == number and arriving.length == start
        if arriving is None or not is_next or stop > len(arriving.content):
            raise RequestRefusedError("The part does not follow the one before.")
        arriving.content[start:stop] = data
        arriving.length, arriving.moved_at = stop, anyio.current_time()
        self.received_bytes += len(data)
        if stop == len(arriving.content):
            content, arriving.content = bytes(arriving.content), bytearray()
            await self._received(sender, content)
        return Frame(PART)

    def _begin(self, sender: NodeId, number: int, total: int) -> None:
        known = self._arriving.get(sender)
        if known is not None and known.number == number:
            return
        now = anyio.current_time()
        for node, one in list(self._arriving.items()):
            if now - one.moved_at > STALE_SECONDS:
                del self._arriving[node]
        others = sum(len(one.content) for node, one in self._arriving.items() if node != sender)
        if total > self._largest or others + total > 2 * self._largest:
            raise RequestRefusedError("There is no room for this message now.")
        self._arriving[sender] = _Arriving(number, bytearray(total), now)

    async def _carry(self, peer: NodeId) -> None:
        outbox = self._outboxes[peer]
        while True:
            while not outbox.waiting:
                outbox.filled = anyio.Event()
                await outbox.filled.wait()
            payload = outbox.waiting.popleft()
            number = self._number = self._number + 1
            await self._send(peer, number, payload)

    async def _send(self, peer: NodeId, number: int, payload: bytes) -> None:
        view = memoryview(payload)
        for start in range(0, len(view), PART_BYTES):
            part = view[start : start + PART_BYTES]
            about = request_about(PART, self.stage, number=number, total=len(view), start=start)
            tensor = TensorPart(TensorSpec("part", "uint8", (len(part),)), part)
            if not await self._has_arrived(peer, Frame(PART, about.header, (tensor,))):
                return

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
