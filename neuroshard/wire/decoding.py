"""Bytes to frames, without a socket: bytes come in any portions, and the head is known before the body is taken."""

from __future__ import annotations

from collections.abc import Callable, Generator

from neuroshard.wire.chunks import ChunkAssembly
from neuroshard.wire.frame import Frame, FrameLimits, MalformedFrameError
from neuroshard.wire.head import PREFIX_BYTES, FrameHead, check_prefix, parse_kind, parse_prefix, parse_rest


class FrameDecoder:
    """Reads one frame.

    Either hand over what arrived (`feed`), or let a socket write into `receive_buffer()` and tell how much with
    `commit`. Before the head is known at most 64 KiB + 32 bytes a chunk that the limits allow are held; they are
    allocated by the first call after `head_bytes` is known, the body by the first one after the head is, so there is
    time to reserve the memory. After an error the decoder reads nothing more; chunks that were verified before are
    in `take_body()`.
    """

    def __init__(self, limits_of: Callable[[str], FrameLimits]) -> None:
        """`limits_of` gives the limits of a kind; what it raises for an unknown one is raised to the caller."""
        self._limits_of = limits_of
        self._head: FrameHead | None = None
        self._head_bytes = 0
        self._assembly: ChunkAssembly | None = None
        self._received = 0
        self._steps = self._reading()
        self._view = next(self._steps)  # what is being filled
        self._filled = 0

    @property
    def head(self) -> FrameHead | None:
        """Known as soon as its last byte arrived."""
        return self._head

    @property
    def head_bytes(self) -> int:
        """Size of the head behind the name of its kind; 0 until that is known."""
        return self._head_bytes

    @property
    def is_complete(self) -> bool:
        """Whether the whole frame is here."""
        return self._head is not None and (not self._head.body_bytes or self._has_body())

    def feed(self, data: bytes | bytearray | memoryview) -> int:
        """Take bytes; returns how many were used. It stops after the head, and after the frame, where others begin.

        Raises WireError, or what `limits_of` raises.
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
        """Where the next bytes belong, at least one and at most a chunk. Raises ValueError when complete, WireError."""
        if self.is_complete:
            raise ValueError("the frame is complete")
        if self._filled == len(self._view):
            self._advance()
        return self._view[self._filled :]

    def commit(self, count: int) -> None:
        """The first `count` bytes of the receive buffer were filled. Raises WireError, or what `limits_of` raises."""
        if not 0 <= count <= len(self._view) - self._filled:
            raise ValueError(f"{count} bytes do not fit the receive buffer")
        self._filled += count
        self._received += count
        if self._filled == len(self._view):
            self._advance()

    def take_body(self) -> ChunkAssembly:
        """The body as far as it is here, for whoever fetches the rest otherwise; this decoder reads nothing more.

        Raises ValueError before the head is known.
        """
        if self._head is None:
            raise ValueError("the head of the frame is not known yet")
        self._view = memoryview(b"")
        self._filled = 0
        self._steps.close()
        if self._assembly is None:
            self._assembly = ChunkAssembly(self._head)
        return self._assembly

    def frame(self) -> Frame:
        """The frame. Raises MalformedFrameError while it is incomplete: the way to tell that the bytes ended."""
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
        """Yields memory to be filled, one piece after the other; each piece is sized by what was checked before."""
        prefix_data = bytearray(PREFIX_BYTES)
        yield memoryview(prefix_data)
        prefix = parse_prefix(bytes(prefix_data))
        kind_data = bytearray(prefix.kind_bytes)
        yield memoryview(kind_data)
        kind = parse_kind(bytes(kind_data))
        limits = self._limits_of(kind)
        check_prefix(prefix, kind, limits)
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
    """The one frame in `data`. Raises WireError, also for bytes after it, or what `limits_of` raises."""
    decoder, source, used = FrameDecoder(limits_of), memoryview(data), 0
    while used < len(source) and not decoder.is_complete:
        used += decoder.feed(source[used:])
    frame = decoder.frame()
    if used != len(source):
        raise MalformedFrameError(f"There are {len(source) - used} bytes after a frame.")
    return frame
