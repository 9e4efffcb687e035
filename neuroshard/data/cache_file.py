"""The file of a cached shard: a header, what the shard's file has around its tokens, and these as uint16 or uint32."""

from __future__ import annotations

import contextlib
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from neuroshard.data.genesis.shard_stream import ShardForm, ShardStream
from neuroshard.data.packed import MAX_AROUND_BYTES, PackedFile, PackedLayout, Segment
from neuroshard.data.storage import storage_error
from neuroshard.data.windows import TokenArray
from neuroshard.errors import DataError

_MAGIC = b"NSTOKEN3"
_HEADER = struct.Struct("<8sBxHHIQ32s32s")  # magic, item bytes, bytes before and after, largest id, count, key, BLAKE3
HEADER_BYTES = 4096  # with what the shard's file has before and after its tokens


@dataclass(frozen=True)
class CacheFile:
    """What a cache file holds."""

    header: bytes
    tokens: TokenArray  # (n,) read-only
    largest: int  # the largest id among them
    packed: PackedFile | None  # None: too much stood around the tokens in the shard's file


def item_bytes(id_count: int) -> int:
    """2 when every id fits, else 4."""
    return 2 if id_count <= 1 << 16 else 4


def open_checked(path: Path, key: bytes) -> CacheFile:
    """Map a cache file and compare all of it with its header.

    Raises DataError when it is not what was written, OSError when it cannot be read.
    """
    contents = open_written(path, key)
    *head, digest = _HEADER.unpack_from(contents.header)
    found = blake3(contents.tokens.data.cast("B"))
    found.update(_summary(tuple(head)) + contents.header[_HEADER.size :])
    if found.digest() != digest:
        raise DataError(f"{path.name} is damaged.")
    return contents


def open_written(path: Path, key: bytes) -> CacheFile:
    """Map a cache file whose header fits it; only for one that was written just now."""
    with path.open("rb") as file:
        header = file.read(HEADER_BYTES)
    if len(header) != HEADER_BYTES:
        raise DataError(f"{path.name} is truncated.")
    magic, width, before, after, largest, count, stored_key, _digest = _HEADER.unpack_from(header)
    if magic != _MAGIC or width not in (2, 4) or stored_key != key or not count:
        raise DataError(f"{path.name} has a damaged header.")
    if path.stat().st_size != HEADER_BYTES + count * width:
        raise DataError(f"{path.name} has the wrong length.")
    dtype = np.dtype("<u2") if width == 2 else np.dtype("<u4")
    tokens: TokenArray = np.memmap(path, dtype=dtype, mode="r", offset=HEADER_BYTES, shape=(count,))
    if not before:
        return CacheFile(header, tokens, largest, None)
    segments = (
        Segment(_HEADER.size, before),
        Segment(HEADER_BYTES, count * width),
        Segment(_HEADER.size + before, after),
    )
    return CacheFile(header, tokens, largest, PackedFile(path, PackedLayout(before, count, width, after), segments))


class CacheFileWriter:
    """Makes a cache file of a shard's file while that comes; a Sink. All methods block on the disk.

    Nothing may read the file before `finish` came back: until then nobody knows whether these are the right bytes.
    """

    def __init__(self, path: Path, key: bytes, id_count: int, form: ShardForm) -> None:
        """The shard's ids are below `id_count`. Raises DiskFullError or StorageError."""
        self._path = path
        self._key = key
        self._id_count = id_count
        self._form = form
        try:
            self._file = path.open("wb", buffering=0)
        except OSError as error:
            raise storage_error(path, error) from error
        self._begin()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the file, unless it has another name by now; one that cannot be removed goes with the next start."""
        self._file.close()
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)

    def restart(self) -> None:
        """Forget everything written. Raises DiskFullError or StorageError."""
        try:
            self._file.truncate(0)
        except OSError as error:
            raise storage_error(self._path, error) from error
        self._begin()

    def _begin(self) -> None:
        self._file.seek(HEADER_BYTES)  # the header comes last
        self._stream = ShardStream(self._form)
        self._digest = blake3()
        self._largest = 0
        self._problem: DataError | None = None

    def write(self, data: bytes) -> None:
        """Take the next bytes of the shard's file. Raises DiskFullError or StorageError."""
        if self._problem is not None:
            return
        try:
            for tokens in self._stream.feed(data):
                narrow = self._narrowed(tokens)
                self._digest.update(narrow)
                self._write(narrow)
        except DataError as error:
            self._problem = error  # for `finish`: whether these are the right bytes at all is found out first

    def finish(self) -> Path:
        """Check what came and complete the file. Raises DataError, DiskFullError or StorageError."""
        if self._problem is not None:
            raise self._problem
        frame = self._stream.end()
        before, after = frame.before, frame.after
        if len(before) + len(after) > MAX_AROUND_BYTES:
            before = after = b""
        around = (before + after).ljust(HEADER_BYTES - _HEADER.size, b"\0")
        width = item_bytes(self._id_count)
        head = (_MAGIC, width, len(before), len(after), self._largest, frame.token_count, self._key)
        self._digest.update(_summary(head) + around)
        try:
            self._file.seek(0)
            self._write(_HEADER.pack(*head, self._digest.digest()) + around)
            self._file.close()  # not synced: what a crash leaves of it does not match its digest, and is fetched again
        except OSError as error:
            raise storage_error(self._path, error) from error
        return self._path

    def _narrowed(self, tokens: NDArray[np.int64]) -> memoryview:
        largest = int(tokens.view(np.uint64).max())  # a negative one is very large so
        if largest >= self._id_count:
            lowest = int(tokens.min())
            wrong = lowest if lowest < 0 else largest
            raise DataError(f"{self._form.name} has the token id {wrong}, outside its vocabulary of {self._id_count}.")
        self._largest = max(self._largest, largest)
        return tokens.astype(f"<u{item_bytes(self._id_count)}").data.cast("B")

    def _write(self, data: bytes | memoryview) -> None:
        """All of it: a raw write may take a part only."""
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            raise storage_error(self._path, error) from error


def _summary(head: tuple[object, ...]) -> bytes:
    """The part of the header that the digest covers beside the tokens: all before it."""
    return _HEADER.pack(*head, b"")
