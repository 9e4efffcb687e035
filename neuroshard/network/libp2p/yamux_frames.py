"""The frames of yamux as values, and a parser that takes bytes as they come (yamux specification, version 0)."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

DATA, WINDOW_UPDATE, PING, GO_AWAY = range(4)
SYN, ACK, FIN, RST = 1, 2, 4, 8
NORMAL_TERMINATION, PROTOCOL_ERROR = 0, 1
INITIAL_WINDOW = 256 * 1024  # bytes each side of a stream may send at first
HEADER = struct.Struct("!BBHII")
_KNOWN_FLAGS = SYN | ACK | FIN | RST


class YamuxError(Exception):
    """The other side breaks the protocol: its connection ends."""


@dataclass(frozen=True, slots=True)
class FrameHeader:
    """What stands before every frame; `length` is a size, an increment, a ping's number or a reason."""

    type: int
    flags: int
    stream_id: int
    length: int


@dataclass(frozen=True, slots=True)
class Payload:
    """A piece of the bytes of a data frame."""

    stream_id: int
    data: memoryview


Event: TypeAlias = FrameHeader | Payload


def header_bytes(frame_type: int, flags: int, stream_id: int, length: int) -> bytes:
    """A frame's 12 bytes of header."""
    return HEADER.pack(0, frame_type, flags, stream_id, length)


class FrameParser:
    """Bytes in, headers and payloads out. It never keeps more than a part of a header."""

    def __init__(self) -> None:
        self._partial = b""
        self._stream_id = 0
        self._missing = 0  # bytes of the data frame that is being read

    def feed(self, data: bytes) -> Iterator[Event]:
        """What the data completes, in order; payloads are views into `data`. Raises YamuxError for a bad header."""
        view = memoryview(self._partial + data if self._partial else data)
        self._partial = b""
        position = 0
        while position < len(view):
            if self._missing:
                piece = view[position : position + self._missing]
                self._missing -= len(piece)
                position += len(piece)
                yield Payload(self._stream_id, piece)
            elif len(view) - position < HEADER.size:
                self._partial = bytes(view[position:])
                return
            else:
                header = self._header(view, position)
                position += HEADER.size
                yield header

    def _header(self, view: memoryview, position: int) -> FrameHeader:
        version, frame_type, flags, stream_id, length = HEADER.unpack_from(view, position)
        if version != 0 or frame_type > GO_AWAY or flags & ~_KNOWN_FLAGS:
            raise YamuxError(f"no yamux frame: version {version}, type {frame_type}, flags {flags}")
        if frame_type == DATA:
            self._stream_id, self._missing = stream_id, length
        return FrameHeader(frame_type, flags, stream_id, length)
