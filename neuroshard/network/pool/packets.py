"""What travels inside a connection of the pool: packets of 24 bytes and a payload. Pure: no sockets.

A frame travels as one *transfer*: its head in an OFFER, its body in PIECEs over all connections to the peer. The number
of a transfer is its sender's; every answer about it names that number.

    kind u8 | 0 u8 | serial u16 | payload length u32 | transfer u64 | extra u64          (little-endian)

    OFFER    head of the frame; extra: the transfer it answers, 0 for a request; serial > 0: offered again
    PIECE    extra: where in the body the payload belongs; whole blocks of one chunk
    WAIT     the offer is good, but memory for it is not free yet
    ACCEPT   go on; payload: mask of blocks that came before there was memory, and are needed again
    HELD     answers an offer with a serial, naming it; payload: mask of blocks that are here
    DONE     the whole body is here and verified
    REFUSE   the receiver does not want the frame, or does not answer it any more; payload: the reason in words
    CANCEL   the sender gives up the transfer, and the answer to it
    WANT     extra: how many connections this side would like to have

A mask has 16 bits for each chunk, bit i for its block i.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from struct import Struct

from neuroshard.network.pool.errors import MisconductError
from neuroshard.network.scores import ScoreReason
from neuroshard.network.transport import MAX_REASON_CHARACTERS
from neuroshard.wire import CHUNK_BYTES, MAX_HEADER_BYTES

BLOCK_BYTES = 64 * 1024
CHUNK_BLOCKS = CHUNK_BYTES // BLOCK_BYTES
MAX_SERIAL = 2**16 - 1
MAX_CHUNKS = 16 * 1024  # bodies up to 16 GiB
_MASK_BYTES = CHUNK_BLOCKS // 8
_HEADER = Struct("<BBHIQQ")
HEADER_BYTES = _HEADER.size


class PacketKind(IntEnum):
    """See above."""

    OFFER = 1
    PIECE = 2
    WAIT = 3
    ACCEPT = 4
    HELD = 5
    DONE = 6
    REFUSE = 7
    CANCEL = 8
    WANT = 9


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
    """Blocks of a chunk of so many bytes; the last one may be short."""
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
