"""Messages of a round as requests: cut into parts, from members of the round only, and never more than it needs.

Parts of a round that is agreed on are taken in before this node enters it; those of any other are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import anyio
import anyio.lowlevel

from neuroshard.network import (
    PeerRefusedError,
    PeerUnreachableError,
    RequestRefusedError,
    TransportClosedError,
)
from neuroshard.swarm.claim_fields import hash_field, line_field, whole_field
from neuroshard.swarm.round import Message
from neuroshard.training.remote_hop import Requester
from neuroshard.training.transfer.fields import LARGEST_NUMBER, StageName, read_request_about, request_about
from neuroshard.types import JsonValue, NodeId
from neuroshard.wire import Frame, FrameLimits, TensorPart, TensorSpec, WireError

PART = "round/part"
PART_BYTES = 4 << 20
PART_SECONDS = 300.0  # 4 MiB at 110 kbit/s
OPENING_SECONDS = 20.0  # a member may learn of a round so much later than others
PARTS_AT_ONCE = 16
PART_LIMITS = FrameLimits(1024, PART_BYTES)
_FIELDS = ("round", "message", "total", "start")


@dataclass
class _Arriving:
    """A message whose parts come in order."""

    content: bytearray
    length: int = 0
    is_complete: bool = False

    def take(self, start: int, total: int, data: memoryview) -> bool:
        """Add a part; whether the message is complete now. Raises RequestRefusedError."""
        stop = start + len(data)
        if self.is_complete or total != len(self.content) or start != self.length or stop > total:
            raise RequestRefusedError("The part does not follow the one before.")
        self.content[start:stop] = data
        self.length, self.is_complete = stop, stop == total
        return self.is_complete

    def taken_out(self) -> bytes:
        """The message; its memory is given back, that it was there is remembered."""
        content, self.content = bytes(self.content), bytearray()
        return content


@dataclass
class _Round:
    """What is taken in for one round."""

    name: str  # hex of the round's id
    members: frozenset[NodeId]
    largest: Mapping[str, int]  # bytes of a message, by kind
    arriving: dict[tuple[NodeId, str], _Arriving] = field(default_factory=dict[tuple[NodeId, str], _Arriving])
    complete: dict[str, list[Message]] = field(default_factory=dict[str, list[Message]])
    changed: anyio.Event = field(default_factory=anyio.Event)
    is_over: bool = False

    def wake(self) -> None:
        changed, self.changed = self.changed, anyio.Event()
        changed.set()


class RoundLine:
    """One stage's messages; a Messenger of `run_round`. One round at a time."""

    def __init__(self, stage: StageName, requester: Requester) -> None:
        self.stage = stage
        self._requester = requester
        self._round: _Round | None = None
        self._opened = anyio.Event()
        self._early: set[NodeId] = set()  # whose part waits for a round that is not known here yet

    def open(self, name: str, others: frozenset[NodeId], largest: Mapping[str, int]) -> None:
        """Take in messages of this round from now on, at most so many bytes each, by kind."""
        self.close()
        self._round = _Round(name, others, largest)
        opened, self._opened = self._opened, anyio.Event()
        opened.set()

    def close(self) -> None:
        """Take in no more; what has come is dropped."""
        if self._round is not None:
            self._round.is_over = True
            self._round.wake()
        self._round = None

    async def send(self, peer: NodeId, kind: str, payload: bytes) -> None:
        """See Messenger. Raises PeerUnreachableError, TransportClosedError."""
        the_round = self._present()
        view = memoryview(payload)
        for start in range(0, max(1, len(view)), PART_BYTES):
            part = bytes(view[start : start + PART_BYTES])
            tensor = TensorPart(TensorSpec("part", "uint8", (len(part),)), part)
            about = request_about(PART, self.stage, round=the_round.name, message=kind, total=len(view), start=start)
            frame = Frame(PART, about.header, (tensor,))
            try:
                await self._requester.request(peer, frame, timeout_seconds=PART_SECONDS)
            except (PeerRefusedError, WireError) as error:
                raise PeerUnreachableError(error.message) from None

    async def receive(self, kind: str) -> Message:
        """See Messenger. Raises TransportClosedError when the round is over."""
        the_round = self._present()
        while not the_round.complete.get(kind):
            if the_round.is_over:
                raise TransportClosedError("The round is over.")
            await the_round.changed.wait()
        await anyio.lowlevel.checkpoint()
        return the_round.complete[kind].pop(0)

    def awaited(self, kind: str) -> frozenset[NodeId]:
        """Members whose message of this kind has not come whole; none when there is no round."""
        if self._round is None:
            return frozenset()
        come = {
            sender for (sender, its), arriving in self._round.arriving.items() if its == kind and arriving.is_complete
        }
        return self._round.members - come

    async def take(self, sender: NodeId, frame: Frame) -> Frame:
        """Take in a part. Raises RequestRefusedError."""
        _, fields = read_part(frame)
        try:
            name, kind = hash_field(fields["round"], "round"), line_field(fields["message"], 64, "message")
            total, start = _whole(fields["total"], "total"), _whole(fields["start"], "start")
        except ValueError as error:
            raise RequestRefusedError(f"The part cannot be read: {error}.") from None
        if len(frame.tensors) != 1 or frame.tensors[0].spec.dtype != "uint8":
            raise RequestRefusedError("A part is bytes.")
        the_round = await self._awaited(name, sender)
        if sender not in the_round.members or total > the_round.largest.get(kind, -1):
            raise RequestRefusedError("This is no message of the round.")
        arriving = the_round.arriving.setdefault((sender, kind), _Arriving(bytearray(total)))
        if arriving.take(start, total, memoryview(frame.tensors[0].data)):
            the_round.complete.setdefault(kind, []).append(Message(sender, kind, arriving.taken_out()))
            the_round.wake()
        return Frame(PART)

    async def _awaited(self, name: str, sender: NodeId) -> _Round:
        """The round of this name, which may be agreed on a little later here; one part of a sender waits for that."""
        if self._round is not None and self._round.name == name:
            return self._round
        if sender in self._early:
            raise RequestRefusedError("Another part waits for this round.")
        self._early.add(sender)
        try:
            with anyio.move_on_after(OPENING_SECONDS):
                while self._round is None or self._round.name != name:
                    await self._opened.wait()
                return self._round
        finally:
            self._early.discard(sender)
        raise RequestRefusedError("This node is not in such a round.")

    def _present(self) -> _Round:
        if self._round is None:
            raise TransportClosedError("There is no round.")
        return self._round


def read_part(frame: Frame) -> tuple[StageName, Mapping[str, JsonValue]]:
    """The stage that a part is for, and its header. Raises RequestRefusedError."""
    return read_request_about(frame, *_FIELDS)


def _whole(value: JsonValue, name: str) -> int:
    return whole_field(value, 0, LARGEST_NUMBER, name)
