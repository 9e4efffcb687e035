"""One frame on its way from a peer: which blocks of it are here, and where the next ones belong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from neuroshard.network.budget import Reservation
from neuroshard.network.pool.errors import MisconductError
from neuroshard.network.pool.packets import (
    BLOCK_BYTES,
    PacketHeader,
    block_count,
    encode_masks,
    full_mask,
)
from neuroshard.network.scores import ScoreReason
from neuroshard.wire import CHUNK_BYTES, ChunkAssembly, ChunkCheck, Frame, FrameHead


@dataclass(frozen=True, slots=True)
class _Piece:
    """A run of blocks of one chunk that a connection is receiving now."""

    chunk: int
    mask: int


@dataclass(frozen=True, slots=True)
class Filled:
    """What a piece brought."""

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
