"""Frames to bytes and bytes to frames, without a socket.

Encoding does not copy tensors: the body consists of views of their memory. Decoding accepts bytes in portions of any
size, and checks the head before it allocates the body. Chunks of the body may arrive in any order. Each one is verified
before it counts.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
from blake3 import blake3

from neuroshard.messages.frame import (
    CHUNK_BYTES,
    PREFIX_BYTES,
    DamagedChunkError,
    Frame,
    FrameHead,
    FrameLimits,
    MalformedFrameError,
    TensorPart,
    check_sizes,
    check_specs,
    encode_head,
    encode_header,
    pack,
    parse_kind,
    parse_prefix,
    parse_rest,
    unpack,
)


@dataclass(frozen=True)
class EncodedFrame:
    """A frame ready to be sent: `head`, then every view of `body`. The memory must not change until it is sent."""

    head: bytes = field(repr=False)
    body: tuple[memoryview, ...] = field(repr=False)  # the tensors in order, read-only, without empty ones
    chunks: tuple[tuple[memoryview, ...], ...] = field(repr=False)  # the same bytes, CHUNK_BYTES in each entry

    @property
    def body_bytes(self) -> int:
        """Total size of the tensors in bytes."""
        return sum(map(len, self.body))

    @property
    def byte_count(self) -> int:
        """Size of head and body in bytes."""
        return len(self.head) + self.body_bytes


def encode(frame: Frame) -> EncodedFrame:
    """Return the bytes that FrameDecoder reads; hashes the body once.

    Raises MalformedFrameError for a kind, header or tensor that cannot be sent, FrameTooLargeError for a long header.
    """
    body = tuple(chain.from_iterable(map(_bytes_of, frame.tensors)))
    chunks = tuple(_chunks(body))
    digests = [_digest(chunk) for chunk in chunks]
    head = encode_head(frame, digests, sum(map(len, body)))
    return EncodedFrame(head, body, chunks)


def as_received(frame: Frame, limits: FrameLimits) -> Frame:
    """Return a frame as a receiver with these limits would decode it. Raises the same WireError."""
    views = list(map(_bytes_of, frame.tensors))
    check_sizes(frame.kind, len(encode_header(frame)), sum(map(len, chain(*views))), limits)
    check_specs(frame.kind, tuple(part.spec for part in frame.tensors), limits)
    tensors = tuple(
        TensorPart(part.spec, b"".join(some)) if part.more else part
        for part, some in zip(frame.tensors, views, strict=True)
    )
    return Frame(frame.kind, unpack(pack(frame.message), limits.message), tensors)


def _bytes_of(part: TensorPart) -> Sequence[memoryview]:
    views = list[memoryview]()
    for view in map(memoryview, (part.data, *part.more)):
        if not view.c_contiguous:
            raise MalformedFrameError(f"The bytes of the tensor {part.spec.name!r} have gaps.")
        if view.nbytes:
            views.append(view.cast("B").toreadonly())
    count = sum(map(len, views))
    if count != part.spec.byte_count:
        raise MalformedFrameError(
            f"The tensor {part.spec.name!r} has {count} bytes; its shape needs {part.spec.byte_count}."
        )
    return views


def _chunks(body: tuple[memoryview, ...]) -> Iterator[tuple[memoryview, ...]]:
    """Yield the body in chunks of CHUNK_BYTES, each as the views that it consists of."""
    pieces: list[memoryview] = []
    room = CHUNK_BYTES
    for view in body:
        start = 0
        while start < len(view):
            piece = view[start : start + room]
            pieces.append(piece)
            start += len(piece)
            room -= len(piece)
            if room == 0:
                yield tuple(pieces)
                pieces, room = [], CHUNK_BYTES
    if pieces:
        yield tuple(pieces)


def _digest(pieces: tuple[memoryview, ...]) -> bytes:
    hasher = blake3()
    for piece in pieces:
        hasher.update(piece)
    return hasher.digest()


class ChunkCheck:
    """The check of one received chunk against its digest.

    It may run in any thread while no other code writes to the chunk's memory.
    """

    def __init__(self, index: int, data: memoryview, digest: bytes) -> None:
        self.index = index
        self._data = data
        self._digest = digest
        self._is_good: bool | None = None

    @property
    def byte_count(self) -> int:
        """Size of the chunk in bytes."""
        return len(self._data)

    def run(self) -> None:
        """Hash the chunk and compare the digest; the result is kept for `end`."""
        self._is_good = blake3(self._data).digest() == self._digest

    def end(self) -> None:
        """Release the memory. Raises DamagedChunkError if the digest differs, ValueError before `run`."""
        if self._is_good is None:
            raise ValueError(f"chunk {self.index} was not checked")
        self._data.release()
        if not self._is_good:
            raise DamagedChunkError(self.index)


class ChunkAssembly:
    """The memory of one body and a record of the chunks that are in it.

    A chunk is passed whole to `accept`, or written into the memory itself: inside `receiving(index)`, or between
    `lend(index)` and `check(index)`, whose result `settle` takes.

    The memory (head.body_bytes) is allocated here and nowhere else.
    """

    def __init__(self, head: FrameHead) -> None:
        self._head = head
        # Not a bytearray: zeroing it costs page faults before any byte arrives, and a peer that never sends would
        # occupy real memory. Unverified memory is never read, so its earlier content does not matter.
        self._body = np.empty(head.body_bytes, np.uint8).data
        self._missing = set(range(len(head.chunk_digests)))
        self._lent: set[int] = set()

    @property
    def head(self) -> FrameHead:
        """The head that this body belongs to."""
        return self._head

    @property
    def is_complete(self) -> bool:
        """Whether every chunk has arrived."""
        return not self._missing

    def missing(self) -> tuple[int, ...]:
        """Return the indices of the missing chunks, ascending, including those that are being received."""
        return tuple(sorted(self._missing))

    def accept(self, index: int, data: bytes | bytearray | memoryview) -> bool:
        """Take a whole chunk. False if the chunk has arrived or is being received; then `data` is not read.

        Raises IndexError, MalformedFrameError for a wrong length or DamagedChunkError; the chunk then stays missing.
        """
        size = self._head.chunk_bytes(index)
        if index not in self._missing or index in self._lent:
            return False
        if len(data) != size:
            raise MalformedFrameError(f"Chunk {index} of a frame has {len(data)} bytes; it needs {size}.")
        self._verify(index, data)
        start = index * CHUNK_BYTES
        self._body[start : start + size] = data
        self._missing.discard(index)
        return True

    @contextmanager
    def receiving(self, index: int) -> Generator[memoryview]:
        """Lend the memory of a missing chunk, to be filled inside the block; it is verified when the block ends.

        Raises IndexError, ValueError for a chunk that has arrived or is being received, or at the end
        DamagedChunkError. The chunk stays missing after an error.
        """
        memory = self.lend(index)
        try:
            with memory as view:
                yield view
                self._verify(index, view)
        finally:
            self._lent.discard(index)
        self._missing.discard(index)

    def lend(self, index: int) -> memoryview:
        """Return the memory of a missing chunk, to be filled and then checked.

        Raises IndexError, ValueError for a chunk that has arrived or is being received.
        """
        view = self._memory_of(index)
        if index not in self._missing or index in self._lent:
            raise ValueError(f"chunk {index} is here or being received already")
        self._lent.add(index)
        return view

    def check(self, index: int) -> ChunkCheck:
        """Return the check of a chunk that was lent and is filled. Raises ValueError for one that was not lent."""
        if index not in self._lent:
            raise ValueError(f"chunk {index} is not being received")
        return ChunkCheck(index, self._memory_of(index), self._head.chunk_digests[index])

    def settle(self, check: ChunkCheck) -> None:
        """Record the result of a check that has run. Raises DamagedChunkError; the chunk then stays missing."""
        self._lent.discard(check.index)
        check.end()
        self._missing.discard(check.index)

    def frame(self) -> Frame:
        """Return the frame, with writable views of the one body. Raises MalformedFrameError if incomplete."""
        if self._missing:
            raise MalformedFrameError(f"A frame misses {len(self._missing)} of {len(self._head.chunk_digests)} chunks.")
        start = 0
        parts: list[TensorPart] = []
        for spec in self._head.specs:
            parts.append(TensorPart(spec, self._body[start : start + spec.byte_count]))
            start += spec.byte_count
        return Frame(self._head.kind, self._head.message, tuple(parts))

    def _memory_of(self, index: int) -> memoryview:
        size = self._head.chunk_bytes(index)
        return self._body[index * CHUNK_BYTES : index * CHUNK_BYTES + size]

    def _verify(self, index: int, data: bytes | bytearray | memoryview) -> None:
        if blake3(data).digest() != self._head.chunk_digests[index]:
            raise DamagedChunkError(index)


class FrameDecoder:
    """Reads one frame.

    Either pass the received bytes to `feed`, or let a socket write into `receive_buffer()` and report the count with
    `commit`. Before the head is known, the decoder allocates at most 64 KiB + 32 bytes for each chunk that the limits
    allow. It does so in the first call after `head_bytes` is known, and allocates the body in the first call after the
    head is known, so the caller has time to reserve the memory. After an error the decoder reads no more; `take_body()`
    returns the chunks that were verified before.
    """

    def __init__(self, limits_of: Callable[[str], FrameLimits]) -> None:
        """`limits_of` returns the limits of a kind; its error for an unknown kind reaches the caller."""
        self._limits_of = limits_of
        self._head: FrameHead | None = None
        self._head_bytes = 0
        self._assembly: ChunkAssembly | None = None
        self._received = 0
        self._steps = self._reading()
        self._view = next(self._steps)  # the piece being filled
        self._filled = 0

    @property
    def head(self) -> FrameHead | None:
        """The head as soon as its last byte has arrived, before that None."""
        return self._head

    @property
    def head_bytes(self) -> int:
        """Size of the head after the name of its kind, in bytes; 0 until it is known."""
        return self._head_bytes

    @property
    def is_complete(self) -> bool:
        """Whether the whole frame has arrived."""
        return self._head is not None and (not self._head.body_bytes or self._has_body())

    def feed(self, data: bytes | bytearray | memoryview) -> int:
        """Take bytes and return how many were used. It stops after the head, and after the frame.

        Raises WireError, or the error of `limits_of`.
        """
        source, used = memoryview(data), 0
        while used < len(source) and not self.is_complete:
            view = self.receive_buffer()
            count = min(len(view), len(source) - used)
            view[:count] = source[used : used + count]
            used += count
            had_head = self._head is not None
            self.commit(count)
            if self._head is not None and not had_head:
                break
        return used

    def receive_buffer(self) -> memoryview:
        """Return the memory for the next bytes: 1 to CHUNK_BYTES. Raises ValueError when complete, WireError."""
        if self.is_complete:
            raise ValueError("the frame is complete")
        if self._filled == len(self._view):
            self._advance()
        return self._view[self._filled :]

    def commit(self, count: int) -> None:
        """Accept the first `count` bytes of the receive buffer. Raises WireError, or the error of `limits_of`."""
        if not 0 <= count <= len(self._view) - self._filled:
            raise ValueError(f"{count} bytes do not fit the receive buffer")
        self._filled += count
        self._received += count
        if self._filled == len(self._view):
            self._advance()

    def take_body(self) -> ChunkAssembly:
        """Return the body with the chunks received so far, to fetch the rest by other means; end this decoder.

        Raises ValueError before the head is known.
        """
        if self._head is None:
            raise ValueError("the head of the frame is not known yet")
        # Closing the generator ends the block of `receiving`: an unfinished chunk stays missing, its view is released.
        self._view = memoryview(b"")
        self._filled = 0
        self._steps.close()
        if self._assembly is None:
            self._assembly = ChunkAssembly(self._head)
        return self._assembly

    def frame(self) -> Frame:
        """Return the frame. Raises MalformedFrameError if incomplete: call it when no more bytes come."""
        if self._head is None or not self.is_complete:
            raise MalformedFrameError(f"A frame ends after {self._received} bytes; more were announced.")
        return (self._assembly or ChunkAssembly(self._head)).frame()

    def _has_body(self) -> bool:
        return self._assembly is not None and self._assembly.is_complete

    def _advance(self) -> None:
        self._filled = 0
        self._view = memoryview(b"")
        view = next(self._steps, None)
        if view is not None:
            self._view = view
        elif not self.is_complete:
            raise MalformedFrameError("A frame was refused already; what follows cannot be read.")

    def _reading(self) -> Generator[memoryview]:
        """Yield memory to be filled, one piece after the other. Only checked lengths decide the size of a piece."""
        prefix_data = bytearray(PREFIX_BYTES)
        yield memoryview(prefix_data)
        prefix = parse_prefix(bytes(prefix_data))
        kind_data = bytearray(prefix.kind_bytes)
        yield memoryview(kind_data)
        kind = parse_kind(bytes(kind_data))
        limits = self._limits_of(kind)
        check_sizes(kind, prefix.header_bytes, prefix.body_bytes, limits)
        self._head_bytes = prefix.rest_bytes
        yield memoryview(b"")  # nothing to fill: the caller may reserve memory first
        rest = bytearray(prefix.rest_bytes)
        yield memoryview(rest)
        head = parse_rest(bytes(prefix_data + kind_data), bytes(rest), prefix, kind, limits)
        self._head = head
        if not head.body_bytes:
            return
        yield memoryview(b"")  # nothing to fill: the caller may reserve memory first
        assembly = self._assembly = ChunkAssembly(head)
        for index in assembly.missing():
            with assembly.receiving(index) as view:
                yield view


def decode(data: bytes | bytearray | memoryview, limits_of: Callable[[str], FrameLimits]) -> Frame:
    """Return the one frame in `data`. Raises WireError, also for bytes after it, or the error of `limits_of`."""
    decoder, source, used = FrameDecoder(limits_of), memoryview(data), 0
    while used < len(source) and not decoder.is_complete:
        used += decoder.feed(source[used:])
    frame = decoder.frame()
    if used != len(source):
        raise MalformedFrameError(f"There are {len(source) - used} bytes after a frame.")
    return frame
