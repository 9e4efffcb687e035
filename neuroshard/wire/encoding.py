"""Frames to bytes. The tensors are not copied: the body is views of the memory they are in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from blake3 import blake3

from neuroshard.wire.frame import (
    Frame,
    FrameLimits,
    MalformedFrameError,
    TensorPart,
    check_body_size,
    check_header_size,
    check_specs,
)
from neuroshard.wire.head import CHUNK_BYTES, encode_head, encode_header


@dataclass(frozen=True)
class EncodedFrame:
    """A frame ready to be sent: `head`, then every view of `body`. The memory must not change until it is sent."""

    head: bytes = field(repr=False)
    body: tuple[memoryview, ...] = field(repr=False)  # the tensors in order, read-only, without empty ones
    chunks: tuple[tuple[memoryview, ...], ...] = field(repr=False)  # the same bytes, CHUNK_BYTES in each entry

    @property
    def body_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(len(view) for view in self.body)

    @property
    def byte_count(self) -> int:
        """Bytes of head and body."""
        return len(self.head) + self.body_bytes


def encode(frame: Frame) -> EncodedFrame:
    """Bytes that FrameDecoder reads; hashes the body once.

    Raises MalformedFrameError for a kind, header or tensor that cannot travel, FrameTooLargeError for a long header.
    """
    body = tuple(view for part in frame.tensors if (view := _bytes_of(part)))
    chunks = tuple(_chunks(body))
    digests = [_digest(chunk) for chunk in chunks]
    head = encode_head(frame, digests, sum(len(view) for view in body))
    return EncodedFrame(head, body, chunks)


def check_limits(frame: Frame, limits: FrameLimits) -> None:
    """Raises the WireError that a receiver with these limits would raise, for a frame that is in memory already."""
    views = [_bytes_of(part) for part in frame.tensors]
    check_header_size(frame.kind, len(encode_header(frame)), limits)
    check_body_size(frame.kind, sum(len(view) for view in views), limits)
    check_specs(frame.kind, tuple(part.spec for part in frame.tensors), limits)


def _bytes_of(part: TensorPart) -> memoryview:
    view = memoryview(part.data)
    if view.nbytes != part.spec.byte_count:
        raise MalformedFrameError(
            f"The tensor {part.spec.name!r} has {view.nbytes} bytes; its shape needs {part.spec.byte_count}."
        )
    if not view.c_contiguous:
        raise MalformedFrameError(f"The bytes of the tensor {part.spec.name!r} are not in one piece.")
    return view.cast("B").toreadonly() if view.nbytes else memoryview(b"")


def _chunks(body: tuple[memoryview, ...]) -> Iterator[tuple[memoryview, ...]]:
    """The views cut at every multiple of CHUNK_BYTES."""
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
