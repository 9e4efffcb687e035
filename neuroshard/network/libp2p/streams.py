"""Yamux streams (yamux specification, version 0): frames as values, a parser, receive windows and round-trip times.

The windows bound the bytes that wait on either side of a stream.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import trio
from libp2p.abc import IMuxedConn, IMuxedStream
from libp2p.stream_muxer.exceptions import MuxedStreamClosed, MuxedStreamEOF, MuxedStreamReset

from neuroshard.waiting import Signal

KEPT = 3
FIRST_PING_SECONDS = 1.0  # between the first measurements, until there are enough


class RoundTrips:
    """The newest round trips in seconds. The minimum counts: a busy loop at either end only lengthens one."""

    def __init__(self) -> None:
        self._seconds = deque[float](maxlen=KEPT)

    def add(self, seconds: float) -> None:
        """Add a measurement."""
        self._seconds.append(seconds)

    @property
    def are_enough(self) -> bool:
        """Whether there are enough measurements for the slow interval."""
        return len(self._seconds) == KEPT

    @property
    def least(self) -> float | None:
        """The minimum; None before the first measurement."""
        return min(self._seconds, default=None)


DATA, WINDOW_UPDATE, PING, GO_AWAY = range(4)
SYN, ACK, FIN, RST = 1, 2, 4, 8
NORMAL_TERMINATION, PROTOCOL_ERROR = 0, 1
INITIAL_WINDOW = 256 * 1024  # bytes each side of a stream may send at first
HEADER = struct.Struct("!BBHII")
_KNOWN_FLAGS = SYN | ACK | FIN | RST


class YamuxError(Exception):
    """The other side violates the protocol; its connection ends."""


@dataclass(frozen=True, slots=True)
class FrameHeader:
    """The header of a frame; `length` is a size, an increment, a ping's number or a reason."""

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
    """The 12 bytes of a frame's header."""
    return HEADER.pack(0, frame_type, flags, stream_id, length)


class FrameParser:
    """Splits a byte stream into headers and payloads. It never keeps more than a part of a header."""

    def __init__(self) -> None:
        self._partial = b""
        self._stream_id = 0
        self._missing = 0  # bytes of the current data frame that have not arrived

    def feed(self, data: bytes) -> Iterator[Event]:
        """The frames and pieces in the data, in order; payloads are views into `data`.

        Raises YamuxError for a bad header.
        """
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
            raise YamuxError(f"not a yamux frame: version {version}, type {frame_type}, flags {flags}")
        if frame_type == DATA:
            self._stream_id, self._missing = stream_id, length
        return FrameHeader(frame_type, flags, stream_id, length)


MAX_WINDOW = 4 * 1024 * 1024  # fills 100 Mbit/s at 300 ms
MAX_PAYLOAD = 65_519 - HEADER.size  # one Noise message together with its header, or four records of TLS
SMALL_PIECE_BYTES = 16 * 1024
_GROWS_WITHIN_ROUND_TRIPS = 4
LONGEST_RTT_SECONDS = 1.0  # the peer can delay its answers, so longer values do not count


class StreamLink(Protocol):
    """The part of a connection that a stream uses."""

    round_trips: RoundTrips

    def send_control(self, frame: bytes) -> None:
        """Queue a small frame, to be sent before waiting data; never waits."""
        ...

    async def send_data(self, stream: YamuxStream, frame: bytes) -> None:
        """Queue a frame once there is space for it."""
        ...

    def send_end(self, stream: YamuxStream, frame: bytes) -> None:
        """Queue the small frame that ends a stream, behind all its waiting data; never waits."""
        ...

    def drop_waiting(self, stream: YamuxStream) -> None:
        """Drop the waiting frames of a stream."""
        ...

    def forget(self, stream: YamuxStream) -> None:
        """Remove a stream that is closed on both sides."""
        ...

    def may_grow(self, stream: YamuxStream, byte_count: int) -> bool:
        """Whether the stream's window may grow by this number of bytes."""
        ...

    def count_unread(self, stream: YamuxStream, change: int) -> None:
        """Count bytes that wait to be read (negative: were read)."""
        ...

    def get_remote_address(self) -> tuple[str, int] | None:
        """IP address and port of the other side."""
        ...


class YamuxStream(IMuxedStream):
    """One stream. Only one task may read it and one may write it."""

    def __init__(self, link: StreamLink, connection: IMuxedConn, stream_id: int, *, is_outbound: bool) -> None:
        self.muxed_conn = connection
        self.stream_id = stream_id
        self.is_outbound = is_outbound
        self.closed_at: float | None = None  # when this side closed while the other did not
        self.is_known_to_peer = not is_outbound  # true once the first frame has left
        self._link = link
        self._chunks: deque[memoryview] = deque()
        self._unread = 0
        self._credit = INITIAL_WINDOW  # bytes the other side may still send
        self._window = INITIAL_WINDOW
        self._arriving = 0  # bytes announced by the last header
        self._is_last = False  # the other side will send no more
        self._unreturned = 0  # bytes read since the last window update
        self._updated_at = 0.0
        self._send_window = INITIAL_WINDOW
        self._due_flags = SYN if is_outbound else 0  # of the next frame
        self._is_reset = False
        self._read_ended = False
        self._write_ended = False
        self._changed = Signal()  # readable, or ended
        self._sendable = Signal()

    # Methods called by the application

    async def read(self, n: int | None = None) -> bytes:
        """Between 1 and n bytes. Raises MuxedStreamEOF at the end, MuxedStreamReset."""
        if n == 0:
            return b""
        await self._wait_readable()
        if not self._unread:
            raise MuxedStreamEOF("the stream ended")
        limit = self._unread if n is None or n < 0 else min(n, self._unread)
        return b"".join(self._taken(limit))

    async def read_into(self, buffer: memoryview) -> int:
        """Fill the buffer with the available bytes; returns 0 at the end. Raises MuxedStreamReset."""
        await self._wait_readable()
        position = 0
        for piece in self._taken(min(len(buffer), self._unread)):
            buffer[position : position + len(piece)] = piece
            position += len(piece)
        return position

    async def write(self, data: bytes | memoryview, *, is_last: bool = False) -> None:
        """Queue all bytes, waiting for the other side's window. Raises MuxedStreamReset or MuxedStreamClosed.

        `is_last` ends this side with the last byte, which saves a frame.
        """
        view = memoryview(data).cast("B")
        while view:
            size = min(len(view), MAX_PAYLOAD, await self._sendable_bytes())
            ends = is_last and size == len(view)
            flags = self._due_flags | (FIN if ends else 0)
            frame = b"".join((header_bytes(DATA, flags, self.stream_id, size), view[:size]))
            self._send_window -= size
            try:
                await self._link.send_data(self, frame)
            except BaseException:
                self._send_window += size
                raise
            self._due_flags = 0
            view = view[size:]
            if ends:
                self._end_of_writing()
        if is_last:
            self.end_writing()

    async def close(self) -> None:
        """End this side's direction; the other direction stays open."""
        await trio.lowlevel.checkpoint()
        self.end_writing()

    async def reset(self) -> None:
        """End both directions at once."""
        await trio.lowlevel.checkpoint()
        self.abandon()

    async def wait_reset(self) -> None:
        """Return when the stream broke."""
        await self._changed.until(lambda: self._is_reset)

    async def wait_ended(self) -> None:
        """Return when the other side writes no more, or the stream broke."""
        await self._changed.until(lambda: self._is_reset or self._read_ended)

    def end_writing(self) -> None:
        """Close the write direction without waiting."""
        if not self._write_ended and not self._is_reset:
            flags, self._due_flags = self._due_flags | FIN, 0
            self._link.send_end(self, header_bytes(WINDOW_UPDATE, flags, self.stream_id, 0))
            self._end_of_writing()

    def abandon(self) -> None:
        """Reset the stream without waiting."""
        if self._is_reset or (self._read_ended and self._write_ended):
            return
        self._link.drop_waiting(self)
        if self.is_known_to_peer:
            self._link.send_control(header_bytes(WINDOW_UPDATE, RST, self.stream_id, 0))
        self.break_off()
        self._link.forget(self)

    @property
    def unread(self) -> int:
        """Number of bytes that can be read without waiting."""
        return self._unread

    @property
    def is_closed(self) -> bool:
        """Whether the stream can no longer be written and has no bytes left to read."""
        return self._is_reset or (self._write_ended and self._read_ended and not self._unread)

    def set_deadline(self, ttl: int) -> None:
        """Unsupported: use trio's cancel scopes."""
        raise NotImplementedError

    def get_remote_address(self) -> tuple[str, int] | None:
        """IP address and port of the other side."""
        return self._link.get_remote_address()

    async def __aenter__(self) -> YamuxStream:
        return self

    # Methods called by the connection

    def announce(self, size: int) -> None:
        """Announce a data frame of this size. Raises YamuxError if it exceeds the granted window."""
        if size > self._credit:
            raise YamuxError(f"{size} bytes on a stream with a window of {self._credit}")
        self._credit -= size
        self._arriving = size

    def end_reading(self) -> None:
        """Note that the other side writes no more after the announced bytes."""
        self._is_last = True
        self._end_if_complete()

    def deliver(self, data: memoryview) -> None:
        """Deliver bytes that arrived."""
        if self._is_reset or self._read_ended:
            return
        self._keep(data)
        self._unread += len(data)
        self._arriving -= len(data)
        self._changed.notify()
        self._end_if_complete()
        self._link.count_unread(self, len(data))

    def extend_window(self, increment: int) -> None:
        """Extend the window in which this side may send."""
        self._send_window = min(self._send_window + increment, 2**32)
        self._sendable.notify()

    def break_off(self) -> None:
        """Break the stream off: the other side reset it, or the connection ended."""
        self._is_reset = True
        self._chunks.clear()
        self._unread = 0
        self._changed.notify()
        self._sendable.notify()

    # Internals

    def _keep(self, data: memoryview) -> None:
        """Join small pieces: each would be an object of its own and keep the whole read buffer alive."""
        if len(data) >= SMALL_PIECE_BYTES:
            self._chunks.append(data)
        elif self._chunks and len(self._chunks[-1]) < SMALL_PIECE_BYTES:
            self._chunks.append(memoryview(b"".join((self._chunks.pop(), data))))
        else:
            self._chunks.append(memoryview(bytes(data)))

    def _end_of_writing(self) -> None:
        self._write_ended = True
        if self._read_ended:
            self._link.forget(self)
        else:
            self.closed_at = trio.current_time()

    def _end_if_complete(self) -> None:
        if not self._is_last or self._arriving > 0 or self._read_ended:
            return
        self._read_ended = True
        self._changed.notify()
        if self._write_ended:
            self._link.forget(self)

    def _taken(self, count: int) -> list[memoryview]:
        pieces: list[memoryview] = []
        missing = count
        while missing:
            chunk = self._chunks.popleft()
            if len(chunk) > missing:
                self._chunks.appendleft(chunk[missing:])
                chunk = chunk[:missing]
            pieces.append(chunk)
            missing -= len(chunk)
        self._unread -= count
        self._link.count_unread(self, -count)
        self._return_credit(count)
        return pieces

    def _return_credit(self, count: int) -> None:
        self._unreturned += count
        if self._read_ended or self._unreturned < self._window // 2:
            return
        increment = self._unreturned + self._growth()
        self._unreturned = 0
        self._credit += increment
        self._link.send_control(header_bytes(WINDOW_UPDATE, 0, self.stream_id, increment))

    def _growth(self) -> int:
        """Double the window while the window, and not the reader, limits the sender."""
        now = trio.current_time()
        since, self._updated_at = now - self._updated_at, now
        rtt = self._link.round_trips.least
        grown = min(self._window, MAX_WINDOW - self._window)
        if rtt is None or grown <= 0:
            return 0
        longest = _GROWS_WITHIN_ROUND_TRIPS * min(max(rtt, 0.001), LONGEST_RTT_SECONDS)
        if since > longest or not self._link.may_grow(self, grown):
            return 0
        self._window += grown
        return grown

    async def _wait_readable(self) -> None:
        await trio.lowlevel.checkpoint()
        await self._changed.until(lambda: bool(self._unread) or self._read_ended or self._is_reset)
        if self._is_reset:
            raise MuxedStreamReset("the stream was reset")

    async def _sendable_bytes(self) -> int:
        while True:
            if self._is_reset:
                raise MuxedStreamReset("the stream was reset")
            if self._write_ended:
                raise MuxedStreamClosed("the stream is closed for writing")
            if self._send_window > 0:
                return self._send_window
            await self._sendable.wait()
