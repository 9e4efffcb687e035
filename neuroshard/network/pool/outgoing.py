"""One frame on its way to a peer: which blocks of it still have to be sent, and over which connection others went."""

from __future__ import annotations

from dataclasses import dataclass

from neuroshard.network.pool.errors import MisconductError
from neuroshard.network.pool.packets import (
    BLOCK_BYTES,
    PacketHeader,
    PacketKind,
    full_mask,
    next_serial,
    packet,
    parse_masks,
)
from neuroshard.network.scores import ScoreReason
from neuroshard.wire import CHUNK_BYTES, EncodedFrame

EAGER_BLOCKS = 32  # sent behind the offer, before the peer answers it


@dataclass(frozen=True, slots=True)
class OutgoingPacket:
    """Views of memory that leave one after the other."""

    views: tuple[bytes | memoryview, ...]
    byte_count: int


class OutgoingTransfer:
    """Pure bookkeeping. Connections are named by their numbers."""

    def __init__(self, number: int, frame: EncodedFrame, answers: int = 0) -> None:
        """`answers` is the peer's transfer that this one is the reply to, 0 when it is a request."""
        self.number = number
        self.answers = answers
        self._frame = frame
        self._unsent = [full_mask(sum(map(len, chunk))) for chunk in frame.chunks]
        self._first_unsent = 0
        self._sent_over: dict[int, list[int]] = {}  # connection: blocks it took
        self._uncertain: list[int] | None = None  # blocks that went into connections that broke
        self._serial: int | None = None  # of the newest offer
        self._offered_over: int | None = None
        self._is_answered = False
        self._may_send = False
        self._eager_blocks = EAGER_BLOCKS
        self._was_sent_whole = False

    @property
    def needs_offer(self) -> bool:
        """Whether the peer must be told of this transfer, for the first time or again."""
        return self._offered_over is None

    @property
    def unanswered_over(self) -> int | None:
        """The connection over which an offer went that the peer has not answered, if there is one."""
        return None if self._is_answered else self._offered_over

    @property
    def may_have_arrived(self) -> bool:
        """Whether the peer may have the whole frame: all of it left at least once."""
        return self._was_sent_whole

    @property
    def bytes_unsent(self) -> int:
        """About so many bytes are not on their way yet."""
        return sum(mask.bit_count() for mask in self._unsent) * BLOCK_BYTES

    def offer(self, connection: int) -> OutgoingPacket:
        """The offer, to be sent over this connection."""
        self._serial = next_serial(self._serial)
        self._offered_over, self._is_answered = connection, False
        self._was_sent_whole |= not self._unsent
        data = packet(PacketKind.OFFER, self.number, self._frame.head, extra=self.answers, serial=self._serial)
        return OutgoingPacket((data,), len(data))

    def take(self, connection: int, most_blocks: int) -> OutgoingPacket | None:
        """The next blocks, all of one chunk, to be sent over this connection; None when it has none to send now."""
        if not self._may_send:
            if connection != self._offered_over or self._serial != 0:
                return None
            most_blocks = min(most_blocks, self._eager_blocks)
        if most_blocks <= 0 or self._has_sent_all():
            return None
        return self._take_from(self._first_unsent, connection, most_blocks)

    def lose(self, connection: int) -> None:
        """A connection broke: the transfer is offered again, and what went over it is sent again where needed.

        Also the peer's answers may have been on it, so this holds for every transfer that was offered.
        """
        self._offered_over = None
        # what was sent before the peer answered may have been dropped there, over whichever connection it went
        lost = (connection,) if self._may_send else tuple(self._sent_over)
        for number in lost:
            masks = self._sent_over.pop(number, None)
            if masks is not None:
                self._uncertain = masks if self._uncertain is None else _union(self._uncertain, masks)

    def restart(self) -> None:
        """The peer has forgotten the transfer."""
        self._unsent = [full_mask(sum(map(len, chunk))) for chunk in self._frame.chunks]
        self._first_unsent = 0
        self._sent_over.clear()
        self._uncertain = self._offered_over = None
        self._may_send = False

    def wait(self) -> None:
        """The peer knows of it but has no memory yet."""
        self._is_answered = True

    def accept(self, dropped: bytes) -> None:
        """The peer has memory; it dropped some blocks that came too early. Raises MisconductError."""
        again = parse_masks(dropped, len(self._unsent)) if dropped else None
        if self._serial != 0 or self._offered_over is None:
            return  # of an offer that was made again since
        self._is_answered = self._may_send = True
        if again is not None:
            self._require(again, self._all_sent())

    def held(self, serial: int, masks: bytes) -> None:
        """The peer told what it has, in answer to the offer of this serial. Raises MisconductError."""
        here = parse_masks(masks, len(self._unsent))
        if serial != self._serial or self._offered_over is None:
            return
        self._is_answered = self._may_send = True
        if self._uncertain is not None:
            again = [uncertain & ~held for uncertain, held in zip(self._uncertain, here, strict=True)]
            self._uncertain = None
            self._require(again, again)

    def _take_from(self, chunk: int, connection: int, most_blocks: int) -> OutgoingPacket:
        mask = self._unsent[chunk]
        first = (mask & -mask).bit_length() - 1
        count = 1
        while count < most_blocks and mask >> (first + count) & 1:
            count += 1
        taken = ((1 << count) - 1) << first
        self._unsent[chunk] &= ~taken
        self._sent_over.setdefault(connection, [0] * len(self._unsent))[chunk] |= taken
        self._was_sent_whole |= self._has_sent_all()
        if not self._may_send:
            self._eager_blocks -= count
        views = _cut(self._frame.chunks[chunk], first * BLOCK_BYTES, (first + count) * BLOCK_BYTES)
        length = sum(map(len, views))
        start = chunk * CHUNK_BYTES + first * BLOCK_BYTES
        header = PacketHeader(PacketKind.PIECE, self.number, length, start).encode()
        return OutgoingPacket((header, *views), len(header) + length)

    def _has_sent_all(self) -> bool:
        while self._first_unsent < len(self._unsent) and not self._unsent[self._first_unsent]:
            self._first_unsent += 1
        return self._first_unsent == len(self._unsent)

    def _require(self, again: list[int], may_be: list[int]) -> None:
        if any(needed & ~sent for needed, sent in zip(again, may_be, strict=True)):
            raise MisconductError(ScoreReason.MALFORMED_FRAME, "a peer misses blocks that were not sent")
        self._unsent = _union(self._unsent, again)
        self._first_unsent = 0

    def _all_sent(self) -> list[int]:
        total = [0] * len(self._unsent)
        for masks in self._sent_over.values():
            total = _union(total, masks)
        return total


def _union(some: list[int], others: list[int]) -> list[int]:
    return [a | b for a, b in zip(some, others, strict=True)]


def _cut(views: tuple[memoryview, ...], start: int, stop: int) -> tuple[memoryview, ...]:
    """The bytes from start to stop of views that stand for one chunk."""
    cut: list[memoryview] = []
    for view in views:
        if start < len(view) and stop > 0:
            cut.append(view[max(start, 0) : stop])
        start -= len(view)
        stop -= len(view)
    return tuple(cut)
