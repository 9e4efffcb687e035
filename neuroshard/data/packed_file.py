"""The form in which nodes exchange a shard file: its tokens in the cache's integer type, a quarter of the bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

WIDE_BYTES = 8  # of a token in a shard's file
MAX_AROUND_BYTES = 4000  # of a shard's file, before and after its tokens together


@dataclass(frozen=True)
class PackedLayout:
    """Lengths of the three pieces; `item_bytes` of a token as it travels."""

    before_bytes: int
    token_count: int = 0
    item_bytes: int = 2
    after_bytes: int = 0

    def __post_init__(self) -> None:
        """Raises ValueError for what no file can be."""
        if min(self.before_bytes, self.token_count, self.after_bytes) < 0 or self.item_bytes not in (2, 4):
            raise ValueError("the layout of a packed file is impossible")

    @property
    def token_bytes(self) -> int:
        """Bytes of all tokens as they travel."""
        return self.token_count * self.item_bytes

    @property
    def packed_bytes(self) -> int:
        """What travels."""
        return self.before_bytes + self.token_bytes + self.after_bytes

    @property
    def file_bytes(self) -> int:
        """Length of the file that comes of it."""
        return self.before_bytes + self.token_count * WIDE_BYTES + self.after_bytes


@dataclass(frozen=True)
class Segment:
    """A stretch of a file on this computer."""

    start: int
    size: int


@dataclass(frozen=True)
class PackedFile:
    """A file on this computer that can be given away; the segments are its three pieces in their order."""

    path: Path
    layout: PackedLayout
    segments: Sequence[Segment]

    def read(self, start: int, size: int) -> bytes:
        """Bytes of the packed form; blocks. Raises OSError, also when the file became shorter."""
        parts, asked = list[bytes](), size
        with self.path.open("rb") as file:
            for segment in self.segments:
                skipped = min(start, segment.size)
                wanted = min(size, segment.size - skipped)
                if wanted:
                    file.seek(segment.start + skipped)
                    parts.append(file.read(wanted))
                start, size = start - skipped, size - wanted
        data = b"".join(parts)
        if len(data) != asked:
            raise OSError(f"{self.path.name} ends too early")
        return data


def whole_file(path: Path) -> PackedFile:
    """A small file as it is. Raises OSError."""
    size = path.stat().st_size
    return PackedFile(path, PackedLayout(size), (Segment(0, size),))


class Unpacker:
    """Turns the packed form, which comes in any pieces, into the bytes of the file."""

    def __init__(self, layout: PackedLayout) -> None:
        self._layout = layout
        self._taken = 0  # bytes of the packed form
        self._half = b""  # the beginning of a token whose rest is not here yet
        self._narrow = np.dtype("<u2") if layout.item_bytes == 2 else np.dtype("<u4")

    @property
    def is_done(self) -> bool:
        """Whether everything is here."""
        return self._taken == self._layout.packed_bytes

    def feed(self, data: bytes) -> bytes:
        """The next bytes of the file. Raises ValueError when more come than the layout has."""
        if self._taken + len(data) > self._layout.packed_bytes:
            raise ValueError("more bytes came than were announced")
        first, last = self._layout.before_bytes, self._layout.before_bytes + self._layout.token_bytes
        begin = min(max(first - self._taken, 0), len(data))
        end = min(max(last - self._taken, 0), len(data))
        self._taken += len(data)
        return data[:begin] + self._widened(data[begin:end]) + data[end:]

    def _widened(self, data: bytes) -> bytes:
        joined = self._half + data
        whole = len(joined) - len(joined) % self._layout.item_bytes
        self._half = joined[whole:]
        return np.frombuffer(joined[:whole], dtype=self._narrow).astype("<i8").tobytes()
