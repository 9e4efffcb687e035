"""Reading Zstandard files, of one frame or several, as a stream that tells an end from a cut."""

from __future__ import annotations

import io
from typing import Any, BinaryIO

from neuroshard.genesis.sources.extras import zstandard

_MAX_WINDOW_BYTES = 1 << 27  # memory that a frame may ask for
_PACKED_BYTES = 2_048  # at a time: a block of 4 bytes may hold 128 KiB, so no more than 64 MiB come out at once


class ZstandardFile(io.RawIOBase):
    """The unpacked bytes of a file. Raises EOFError where it ends within a frame, ZstdError where it is damaged."""

    def __init__(self, packed: BinaryIO) -> None:
        self._packed = packed
        self._unpacker = zstandard().ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES)
        self._frame: Any = None
        self._input = b""
        self._output = memoryview(b"")

    def readable(self) -> bool:
        """Always."""
        return True

    def readinto(self, buffer: Any, /) -> int:
        """Fill the buffer as far as there are bytes; 0 at the end."""
        while not self._output:
            if not self._input:
                self._input = self._packed.read(_PACKED_BYTES)
            if not self._input:
                if self._frame is not None:
                    raise EOFError("the file ends within a Zstandard frame")
                return 0
            self._unpack()
        target = memoryview(buffer).cast("B")
        count = min(len(target), len(self._output))
        target[:count] = self._output[:count]
        self._output = self._output[count:]
        return count

    def _unpack(self) -> None:
        if self._frame is None:
            self._frame = self._unpacker.decompressobj()
        self._output = memoryview(self._frame.decompress(self._input))
        self._input = b""
        if self._frame.eof:
            self._input, self._frame = self._frame.unused_data, None
