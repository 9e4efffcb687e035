"""Transfers of the pool without I/O: packets, the state of an outgoing frame and the state of an incoming one.

A frame travels as one *transfer*: its head in an OFFER, its body in PIECEs over all connections to the peer. The sender
numbers its transfers; every answer about a transfer contains its number. A packet has 24 bytes and a payload:

    kind u8 | 0 u8 | serial u16 | payload length u32 | transfer u64 | extra u64          (little-endian)

    OFFER    head of the frame; extra: the transfer it answers, 0 for a request; serial > 0: offered again
    PIECE    extra: position of the payload in the body; whole blocks of one chunk
    WAIT     the offer is good, but memory for it is not free yet
    ACCEPT   continue; payload: mask of blocks that came before there was memory, and are needed again
    HELD     answers an offer with a serial and repeats it; payload: mask of blocks that have arrived
    DONE     the whole body has arrived and is verified
    REFUSE   the receiver does not want the frame, or does not answer it any more; payload: the reason in words
    CANCEL   the sender gives up the transfer, and the answer to it

A mask has 16 bits for each chunk, bit i for its block i.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from struct import Struct

from neuroshard.messages import CHUNK_BYTES, MAX_HEADER_BYTES, ChunkAssembly, ChunkCheck, EncodedFrame, Frame, FrameHead
from neuroshard.network.limits import Reservation
from neuroshard.network.pool.options import MisconductError
from neuroshard.network.reputation import ScoreReason
from neuroshard.network.transport import MAX_REASON_CHARACTERS

BLOCK_BYTES = 64 * 1024
CHUNK_BLOCKS = CHUNK_BYTES // BLOCK_BYTES
MAX_SERIAL = 2**16 - 1
MAX_CHUNKS = 16 * 1024  # bodies up to 16 GiB
_MASK_BYTES = CHUNK_BLOCKS // 8
_HEADER = Struct("<BBHIQQ")
HEADER_BYTES = _HEADER.size


class PacketKind(IntEnum):
    """Kind of a packet, in its first byte."""

    OFFER = 1
    PIECE = 2
    WAIT = 3
    ACCEPT = 4
    HELD = 5
    DONE = 6
    REFUSE = 7
    CANCEL = 8


_MAX_PAYLOAD_BYTES = {
    PacketKind.OFFER: MAX_HEADER_BYTES + 32 * (MAX_CHUNKS + 1) + 256,  # read in small portions against its limits
    PacketKind.PIECE: CHUNK_BYTES,
    PacketKind.ACCEPT: _MASK_BYTES * MAX_CHUNKS,
    PacketKind.HELD: _MASK_BYTES * MAX_CHUNKS,
    PacketKind.REFUSE: 4 * MAX_REASON_CHARACTERS,
}


@dataclass(frozen=True, slots=True)
class PacketHeader:
    """The first 24 bytes of a packet."""

    kind: PacketKind
    transfer: int
    length: int = 0  # of the payload
    extra: int = 0
    serial: int = 0

    def encode(self) -> bytes:
        """HEADER_BYTES bytes."""
        return _HEADER.pack(self.kind, 0, self.serial, self.length, self.transfer, self.extra)


def parse_header(data: bytes | bytearray) -> PacketHeader:
    """Read HEADER_BYTES bytes. Raises MisconductError for what cannot be the header of a packet."""
    kind, zero, serial, length, transfer, extra = _HEADER.unpack(data)
    try:
        known = PacketKind(kind)
    except ValueError:
        raise MisconductError(ScoreReason.MALFORMED_FRAME, f"a packet of the unknown kind {kind}") from None
    if zero:
        raise MisconductError(ScoreReason.MALFORMED_FRAME, "a packet sets bits that have no meaning yet")
    if length > _MAX_PAYLOAD_BYTES.get(known, 0):
        raise MisconductError(ScoreReason.OVERSIZED, f"a {known.name} packet with {length} bytes")
    return PacketHeader(known, transfer, length, extra, serial)


def packet(kind: PacketKind, transfer: int, payload: bytes = b"", *, extra: int = 0, serial: int = 0) -> bytes:
    """A whole small packet."""
    return PacketHeader(kind, transfer, len(payload), extra, serial).encode() + payload


def next_serial(serial: int | None) -> int:
    """Of the offer after the one with this serial: 0, 1, 2 ... MAX_SERIAL, 1, 2 ..."""
    return 0 if serial is None else serial % MAX_SERIAL + 1


def is_newer(serial: int, other: int) -> bool:
    """Whether an offer was made after another one: over several connections they may arrive in any order."""
    if not serial or not other:
        return serial > other
    return 0 < (serial - other) % MAX_SERIAL < MAX_SERIAL // 2


def block_count(byte_count: int) -> int:
    """Blocks of a chunk of `byte_count` bytes; the last one may be short."""
    return -(-byte_count // BLOCK_BYTES)


def full_mask(chunk_bytes: int) -> int:
    """All blocks of a chunk."""
    return (1 << block_count(chunk_bytes)) - 1


def encode_masks(masks: list[int]) -> bytes:
    """One mask for each chunk."""
    return b"".join(mask.to_bytes(_MASK_BYTES, "little") for mask in masks)


def parse_masks(data: bytes, chunk_count: int) -> list[int]:
    """Masks of all chunks. Raises MisconductError for another number of them."""
    if len(data) != _MASK_BYTES * chunk_count:
        raise MisconductError(ScoreReason.MALFORMED_FRAME, f"a mask of {len(data)} bytes for {chunk_count} chunks")
    starts = range(0, len(data), _MASK_BYTES)
    return [int.from_bytes(data[start : start + _MASK_BYTES], "little") for start in starts]


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
        self._doubted_at: float | None = None  # when the peer was asked last what it has; at first, when all was sent
        self._is_doubted = False
        self._missing: dict[int, list[int]] = {}  # connection: blocks that it took and the peer did not have then

    @property
    def needs_offer(self) -> bool:
        """Whether this transfer must be offered to the peer, for the first time or again."""
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
        """Approximate number of bytes that are not on their way yet."""
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

    def doubt(self, now: float, seconds: float) -> None:
        """Offer a frame again that was sent completely and is not complete there after `seconds`.

        Perhaps one of several connections is open and carries nothing.
        """
        if not (self._may_send and self._is_answered and self._has_sent_all()):
            self._doubted_at = None
        elif self._doubted_at is None:
            self._doubted_at = now
        elif now - self._doubted_at >= seconds:
            self._doubted_at, self._is_doubted, self._offered_over = now, True, None

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

    def held(self, serial: int, masks: bytes) -> frozenset[int]:
        """The peer answered the offer of this serial with what it has.

        Returns the connections of which no block arrived between two doubts. Raises MisconductError.
        """
        here = parse_masks(masks, len(self._unsent))
        if serial != self._serial or self._offered_over is None:
            return frozenset()
        self._is_answered = self._may_send = True
        if self._uncertain is not None:
            again = [uncertain & ~held for uncertain, held in zip(self._uncertain, here, strict=True)]
            self._uncertain = None
            self._require(again, again)
        return self._stalled(here) if self._is_doubted else frozenset()

    def _stalled(self, here: list[int]) -> frozenset[int]:
        before, self._missing, self._is_doubted = self._missing, {}, False
        for number, masks in self._sent_over.items():
            missing = [sent & ~held for sent, held in zip(masks, here, strict=True)]
            if any(missing):
                self._missing[number] = missing
        return frozenset(number for number, missing in self._missing.items() if before.get(number) == missing)

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


@dataclass(frozen=True, slots=True)
class _Piece:
    """A run of blocks of one chunk that a connection is receiving now."""

    chunk: int
    mask: int


@dataclass(frozen=True, slots=True)
class Filled:
    """Result of a received piece."""

    new_blocks: int = 0
    check: ChunkCheck | None = None  # of the chunk it completes, to be run and then settled


class IncomingTransfer:
    """Bookkeeping and memory of one frame; no sockets. Connections are named by their numbers."""

    def __init__(self, number: int, head: FrameHead, answers: int, cut: Callable[[int], None]) -> None:
        """`cut` must end a connection so that it writes no more into memory it was given here."""
        self.number = number
        self.head = head
        self.answers = answers
        self._cut = cut
        self._reservation: Reservation | None = None
        self._assembly: ChunkAssembly | None = None
        self._lent: dict[int, memoryview] = {}  # the chunks that are being filled
        self._checking = 0  # chunks
        self._here = [0] * len(head.chunk_digests)
        self._dropped = [0] * len(head.chunk_digests)
        self._filling: dict[int, _Piece] = {}
        self._is_ended = False

    @property
    def has_memory(self) -> bool:
        """Whether pieces are kept: before, they are dropped."""
        return self._assembly is not None

    @property
    def is_complete(self) -> bool:
        """Whether the whole body is here and verified."""
        return not self.head.body_bytes or (self._assembly is not None and self._assembly.is_complete)

    def begin(self, reservation: Reservation) -> None:
        """Allocate the body, for which bytes were reserved."""
        self._reservation = reservation
        self._assembly = ChunkAssembly(self.head)

    def dropped_blocks(self) -> bytes:
        """Mask of the blocks that came before there was memory; empty when there were none."""
        return encode_masks(self._dropped) if any(self._dropped) else b""

    def held_blocks(self) -> bytes:
        """Mask of the blocks that are here."""
        return encode_masks(self._here)

    def place(self, connection: int, header: PacketHeader) -> memoryview | None:
        """Where a piece belongs; None when it is not needed. Raises MisconductError for a piece of nothing."""
        piece = self._checked(header)
        if self._assembly is None:
            self._dropped[piece.chunk] |= piece.mask
            return None
        if not piece.mask & ~self._here[piece.chunk]:
            return None
        for other, filling in tuple(self._filling.items()):
            # Sent again: so the sender saw the other connection die. Nothing may write there when it is verified.
            if filling.chunk == piece.chunk and filling.mask & piece.mask:
                del self._filling[other]
                self._cut(other)
        self._filling[connection] = piece
        start = header.extra - piece.chunk * CHUNK_BYTES
        return self._chunk_memory(self._assembly, piece.chunk)[start : start + header.length]

    def filled(self, connection: int) -> Filled:
        """The piece of this connection is complete."""
        piece = self._filling.pop(connection, None)
        if piece is None or self._assembly is None or self._is_ended:
            self._release_if_ended()
            return Filled()
        new = piece.mask & ~self._here[piece.chunk]
        self._here[piece.chunk] |= piece.mask
        if self._here[piece.chunk] != full_mask(self.head.chunk_bytes(piece.chunk)):
            return Filled(new.bit_count())
        del self._lent[piece.chunk]  # nobody writes there any more
        self._checking += 1
        return Filled(new.bit_count(), self._assembly.check(piece.chunk))

    def settle(self, check: ChunkCheck) -> None:
        """A check that `filled` gave has run. Raises DamagedChunkError for a chunk that does not match its digest."""
        assert self._assembly is not None
        self._checking -= 1
        try:
            self._assembly.settle(check)
        finally:
            self._release_if_ended()

    def abandon(self, connection: int) -> None:
        """A connection ended in the middle of a piece, or between two."""
        self._filling.pop(connection, None)
        self._release_if_ended()

    def end(self) -> None:
        """Give the bytes back, as soon as nobody uses the memory any more."""
        self._is_ended = True
        self._release_if_ended()

    def _release_if_ended(self) -> None:
        if self._is_ended and not self._filling and not self._checking and self._reservation is not None:
            self._reservation.release()

    def frame(self) -> tuple[Frame, Reservation | None]:
        """The frame and the reservation of its memory, which is the caller's to release."""
        reservation, self._reservation = self._reservation, None
        return (self._assembly or ChunkAssembly(self.head)).frame(), reservation

    def _chunk_memory(self, assembly: ChunkAssembly, chunk: int) -> memoryview:
        if chunk not in self._lent:
            self._lent[chunk] = assembly.lend(chunk)
        return self._lent[chunk]

    def _checked(self, header: PacketHeader) -> _Piece:
        chunk, start = divmod(header.extra, CHUNK_BYTES)
        first, unaligned = divmod(start, BLOCK_BYTES)
        stop = start + header.length
        size = self.head.chunk_bytes(chunk) if chunk < len(self._here) else 0
        if unaligned or not start < stop <= size or (stop % BLOCK_BYTES and stop != size):
            raise MisconductError(ScoreReason.MALFORMED_FRAME, "a piece that is not made of blocks of a chunk")
        return _Piece(chunk, ((1 << block_count(header.length)) - 1) << first)
