"""The shard cache: one file per shard with uint16 or uint32 ids, a storage limit, least recently used eviction."""

from __future__ import annotations

import contextlib
import os
import re
import struct
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Self

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from neuroshard.config.state_file import TEMPORARY_PREFIX
from neuroshard.data.packed_file import MAX_AROUND_BYTES, PackedFile, PackedLayout, Segment
from neuroshard.data.shard_file import ShardForm, ShardStream
from neuroshard.data.storage import storage_error
from neuroshard.data.windows import TokenArray
from neuroshard.errors import DataError, StorageError, UnwritableError
from neuroshard.types import ShardId

_MAGIC = b"NSTOKEN3"
_HEADER = struct.Struct("<8sBxHHIQ32s32s")  # magic, item bytes, bytes before and after, largest id, count, key, BLAKE3
CACHE_HEADER_BYTES = 4096  # with what the shard's file has before and after its tokens


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
        header = file.read(CACHE_HEADER_BYTES)
    if len(header) != CACHE_HEADER_BYTES:
        raise DataError(f"{path.name} is truncated.")
    magic, width, before, after, largest, count, stored_key, _digest = _HEADER.unpack_from(header)
    if magic != _MAGIC or width not in (2, 4) or stored_key != key or not count:
        raise DataError(f"{path.name} has a damaged header.")
    if path.stat().st_size != CACHE_HEADER_BYTES + count * width:
        raise DataError(f"{path.name} has the wrong length.")
    dtype = np.dtype("<u2") if width == 2 else np.dtype("<u4")
    tokens: TokenArray = np.memmap(path, dtype=dtype, mode="r", offset=CACHE_HEADER_BYTES, shape=(count,))
    if not before:
        return CacheFile(header, tokens, largest, None)
    segments = (
        Segment(_HEADER.size, before),
        Segment(CACHE_HEADER_BYTES, count * width),
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
        self._file.seek(CACHE_HEADER_BYTES)  # the header comes last
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
        around = (before + after).ljust(CACHE_HEADER_BYTES - _HEADER.size, b"\0")
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


_FILE_NAME = re.compile(r"shard_(\d+)-([0-9a-f]{16})\.tokens")


@dataclass(frozen=True)
class CachedShard:
    """A verified shard, mapped from the cache."""

    shard: ShardId
    tokens: TokenArray  # (n,) read-only
    largest: int  # the largest id among them


class ShardCache:
    """Keeps shards under `folder`, together never above `limit_bytes`, a download in progress included.

    What lies in the folder `beside` counts too: the descriptions of data sets.

    A shard is found by its id and a 32-byte key that names its exact contents (its digest). All methods block on the
    disk: call them from a worker thread. They may be called from several. It keeps what a shard's file says: which
    ids a run knows is not its business, so that what one run left here serves another, and other nodes.
    """

    def __init__(self, folder: Path, *, limit_bytes: int, beside: Path | None = None) -> None:
        self.folder = folder
        self.limit_bytes = limit_bytes
        self._beside = beside
        self.damaged_files = 0  # cache files found damaged and removed
        self._lock = Lock()
        self._sizes: dict[Path, int] = {}  # least recently used first
        self._reserved: dict[ShardId, int] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for leftover in (*folder.glob("*.part"), *folder.glob(f"{TEMPORARY_PREFIX}*")):
                leftover.unlink()
            found = sorted((path.stat().st_mtime_ns, path) for path in folder.glob("*.tokens"))
            self._sizes = {path: path.stat().st_size for _, path in found}
        except OSError as error:
            raise storage_error(folder, error) from error

    def usage(self) -> tuple[int, int]:
        """Cached shards, and the bytes that they and what counts with them take."""
        with self._lock:
            return len(self._sizes), sum(self._sizes.values()) + self._beside_bytes()

    def file_size(self, token_count: int, id_count: int) -> int:
        """Bytes of a cached shard whose ids are below `id_count`."""
        return CACHE_HEADER_BYTES + token_count * item_bytes(id_count)

    def contains(self, shard: ShardId, key: bytes) -> bool:
        """Whether the shard is there; its contents are checked by `get` only."""
        with self._lock:
            return self._path(shard, key) in self._sizes

    def get(self, shard: ShardId, key: bytes) -> CachedShard | None:
        """The shard, its digest checked, or None. A damaged file is removed.

        Raises UnwritableError without a folder.
        """
        path = self._path(shard, key)
        with self._lock:
            if path not in self._sizes:
                return None
            try:
                contents = open_checked(path, key)
            except (DataError, OSError):  # truncated, flipped bits, deleted: fetch it again
                self._check_folder()
                self.damaged_files += 1
                self._remove(path)
                return None
            _touch(path)
            self._sizes[path] = self._sizes.pop(path)  # now the most recently used
        return CachedShard(shard, contents.tokens, contents.largest)

    def size_of(self, shard: ShardId, key: bytes) -> int | None:
        """Bytes that the shard takes, None when it is not here."""
        with self._lock:
            return self._sizes.get(self._path(shard, key))

    def shards(self) -> tuple[ShardId, ...]:
        """The shards that are here, in their order; of whichever data set."""
        with self._lock:
            return tuple(ShardId(shard) for shard in sorted({_shard_of(path) for path in self._sizes}))

    def packed(self, shard: ShardId, key: bytes) -> PackedFile | None:
        """The shard as it can be given to others, checked; None when it is not here, or not with its whole file."""
        path = self._path(shard, key)
        with self._lock:
            if path not in self._sizes:
                return None
            try:
                return open_checked(path, key).packed
            except (DataError, OSError):
                if self.folder.is_dir():
                    self.damaged_files += 1
                    self._remove(path)
                return None

    def reserve(self, shard: ShardId, needed_bytes: int, keep: Collection[ShardId]) -> bool:
        """Set bytes aside for a download, removing the least recently used shards, but none of `keep`.

        False when they fit only after another reservation was released. Raises StorageError when they never fit,
        UnwritableError without a folder.
        """
        with self._lock:
            self._check_folder()
            kept = self._kept_bytes(keep) + self._beside_bytes()
            if kept + needed_bytes > self.limit_bytes:
                raise StorageError(
                    f"The storage limit of {_mb(self.limit_bytes)} is too small: shard {shard} needs "
                    f"{_mb(needed_bytes)} while it is fetched, and what is in use takes {_mb(kept)}.",
                    f"Set --max-storage to at least {_mb(kept + needed_bytes)}.",
                )
            if not self._make_room(needed_bytes, keep):
                return False
            self._reserved[shard] = needed_bytes
            return True

    def make_room(self, needed_bytes: int, keep: Collection[ShardId]) -> bool:
        """Remove the least recently used shards, but none of `keep`, until so many bytes fit; False if never."""
        with self._lock:
            return self.folder.is_dir() and self._make_room(needed_bytes, keep)

    def release(self, shard: ShardId, keep: Collection[ShardId]) -> None:
        """End a reservation. What was fetched stays, unless it and `keep` became too much: the limit may have sunk."""
        with self._lock:
            self._reserved.pop(shard, None)
            self._shrink(self._room(), {*keep, shard})

    def change_limit(self, limit_bytes: int, keep: Collection[ShardId]) -> None:
        """Obey another limit at once: the least recently used shards go, but none of `keep`."""
        with self._lock:
            self.limit_bytes = limit_bytes
            self._shrink(self._room(), keep)

    def release_all(self, keep: Collection[ShardId]) -> None:
        """Remove every shard but those of `keep`: the disk is full."""
        with self._lock:
            for path in [path for path in self._sizes if _shard_of(path) not in keep]:
                self._remove(path)

    def writer(self, shard: ShardId, key: bytes, id_count: int, form: ShardForm) -> CacheFileWriter:
        """Where to write a shard's file, whose ids are below `id_count`. Raises DiskFullError or StorageError."""
        return CacheFileWriter(self._path(shard, key).with_suffix(".part"), key, id_count, form)

    def take(self, shard: ShardId, key: bytes, writer: CacheFileWriter) -> CachedShard:
        """Keep what was written. Its digest is compared whenever it is opened later.

        Raises DataError for what is no shard or has other ids, DiskFullError or StorageError when it cannot be written.
        """
        path, written = self._path(shard, key), writer.finish()
        try:
            written.replace(path)
            contents = open_written(path, key)
            size = path.stat().st_size
        except OSError as error:
            raise storage_error(path, error) from error
        _touch(path)
        with self._lock:
            self._sizes[path] = size
        return CachedShard(shard, contents.tokens, contents.largest)

    def _check_folder(self) -> None:
        """Raises UnwritableError when it was moved away: what lies in it counts, and may come back whole."""
        if not self.folder.is_dir():
            raise UnwritableError(f"The data cache {self.folder} is not there any more.", "Put it back.")

    def _path(self, shard: ShardId, key: bytes) -> Path:
        return self.folder / f"shard_{shard}-{key.hex()[:16]}.tokens"

    def _room(self) -> int:
        """Bytes that shards may take at present."""
        return self.limit_bytes - sum(self._reserved.values()) - self._beside_bytes()

    def _make_room(self, needed_bytes: int, keep: Collection[ShardId]) -> bool:
        room = self._room() - needed_bytes
        if self._kept_bytes(keep) > room:
            return False
        self._shrink(room, keep)
        return True

    def _kept_bytes(self, keep: Collection[ShardId]) -> int:
        return sum(size for path, size in self._sizes.items() if _shard_of(path) in keep)

    def _beside_bytes(self) -> int:
        if self._beside is None:
            return 0
        try:
            with os.scandir(self._beside) as found:
                return sum(entry.stat().st_size for entry in found if entry.is_file())
        except OSError:
            return 0  # nothing was kept yet, or just now replaced

    def _shrink(self, most_bytes: int, keep: Collection[ShardId]) -> None:
        """Remove the least recently used shards, but none of `keep`, until the others take so many bytes at most."""
        for path in [path for path in self._sizes if _shard_of(path) not in keep]:
            if sum(self._sizes.values()) <= most_bytes:
                break
            self._remove(path)

    def _remove(self, path: Path) -> None:
        """A file that the system does not let go (mapped, on Windows; on a read-only disk) stays counted."""
        try:
            path.unlink(missing_ok=True)
        except OSError:
            return
        self._sizes.pop(path, None)


def _touch(path: Path) -> None:
    """Note the time of use; the file system's own stamp is coarser than two uses may be apart."""
    now = time.time_ns()
    with contextlib.suppress(OSError):  # a read-only disk can be read
        os.utime(path, ns=(now, now))


def _shard_of(path: Path) -> int:
    match = _FILE_NAME.fullmatch(path.name)
    return int(match[1]) if match else -1


def _mb(size: int) -> str:
    return f"{size / 1e6:.1f} MB"
