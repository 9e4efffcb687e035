"""Shards on this computer as uint16 or uint32, within a storage limit; the least recently used ones go first."""

from __future__ import annotations

import hashlib
import os
import re
import struct
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

import numpy as np

from neuroshard.config.atomic_write import TEMPORARY_PREFIX
from neuroshard.data.genesis.torch_file import TokenRecord
from neuroshard.data.packed import MAX_AROUND_BYTES, WIDE_BYTES, PackedFile, PackedLayout, Segment
from neuroshard.data.storage import storage_error
from neuroshard.data.windows import TokenArray
from neuroshard.errors import DataError, StorageError
from neuroshard.types import ShardId

_MAGIC = b"NSTOKEN2"
_HEADER = struct.Struct("<8sBxHHIQ32s32s")  # magic, item bytes, bytes before and after, largest id, count, key, BLAKE2b
_HEADER_BYTES = 4096  # with what the shard's file has before and after its tokens
_CHUNK_TOKENS = 1 << 20
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
        return _HEADER_BYTES + token_count * _item_bytes(id_count)

    def contains(self, shard: ShardId, key: bytes) -> bool:
        """Whether the shard is there; its contents are checked by `get` only."""
        with self._lock:
            return self._path(shard, key) in self._sizes

    def get(self, shard: ShardId, key: bytes) -> CachedShard | None:
        """The shard, its digest checked, or None. A damaged file is removed."""
        path = self._path(shard, key)
        with self._lock:
            if path not in self._sizes:
                return None
            try:
                contents = _open_checked(path, key)
                _touch(path)
            except (DataError, OSError):  # truncated, flipped bits, deleted: fetch it again
                self.damaged_files += 1
                self._remove(path)
                return None
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
                return _open_checked(path, key).packed
            except (DataError, OSError):
                self.damaged_files += 1
                self._remove(path)
                return None

    def reserve(self, shard: ShardId, needed_bytes: int, keep: Collection[ShardId]) -> bool:
        """Set bytes aside for a download, removing the least recently used shards, but none of `keep`.

        False when they fit only after another reservation was released. Raises StorageError when they never fit.
        """
        with self._lock:
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
            return self._make_room(needed_bytes, keep)

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

    def store(self, shard: ShardId, key: bytes, record: TokenRecord, id_count: int) -> CachedShard:
        """Convert a checked shard file, whose ids are below `id_count`, into the cache.

        Raises DataError for other ids, DiskFullError or StorageError when it cannot be written.
        """
        path = self._path(shard, key)
        temporary = path.with_suffix(".writing.part")
        try:
            self._write(temporary, key, record, id_count)
            temporary.replace(path)
            _touch(path)
            contents = _opened(path, key)  # its digest is compared whenever it is opened later
        except OSError as error:
            raise storage_error(path, error) from error
        finally:
            temporary.unlink(missing_ok=True)
        with self._lock:
            self._sizes[path] = path.stat().st_size
        return CachedShard(shard, contents.tokens, contents.largest)

    def _write(self, path: Path, key: bytes, record: TokenRecord, id_count: int) -> None:
        digest = hashlib.blake2b(digest_size=32)
        largest = 0
        before, after = _around(record)
        with path.open("wb") as file:
            file.write(bytes(_HEADER_BYTES))
            for chunk in _converted(record, id_count):
                digest.update(chunk.data.cast("B"))
                largest = max(largest, int(chunk.max()))
                file.write(chunk.data.cast("B"))
            around = (before + after).ljust(_HEADER_BYTES - _HEADER.size, b"\0")
            head = (_MAGIC, _item_bytes(id_count), len(before), len(after), largest, record.token_count, key)
            digest.update(_summary(head) + around)
            file.seek(0)
            file.write(_HEADER.pack(*head, digest.digest()) + around)
            file.flush()
            os.fsync(file.fileno())

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
        """A file that the system does not let go (mapped, on Windows) stays counted."""
        try:
            path.unlink(missing_ok=True)
        except PermissionError:
            return
        self._sizes.pop(path, None)


@dataclass(frozen=True)
class _Contents:
    """What a cache file holds."""

    header: bytes
    tokens: TokenArray
    largest: int
    packed: PackedFile | None  # None: too much stood around the tokens in the shard's file


def _open_checked(path: Path, key: bytes) -> _Contents:
    """Map a cache file and compare all of it with its header. Raises DataError when it is not what was written."""
    contents = _opened(path, key)
    *head, digest = _HEADER.unpack_from(contents.header)
    found = hashlib.blake2b(contents.tokens.data, digest_size=32)
    found.update(_summary(tuple(head)) + contents.header[_HEADER.size :])
    if found.digest() != digest:
        raise DataError(f"{path.name} is damaged.")
    return contents


def _opened(path: Path, key: bytes) -> _Contents:
    """Map a cache file whose header fits it."""
    with path.open("rb") as file:
        header = file.read(_HEADER_BYTES)
    if len(header) != _HEADER_BYTES:
        raise DataError(f"{path.name} is truncated.")
    magic, item_bytes, before, after, largest, count, stored_key, _digest = _HEADER.unpack_from(header)
    if magic != _MAGIC or item_bytes not in (2, 4) or stored_key != key or not count:
        raise DataError(f"{path.name} has a damaged header.")
    if path.stat().st_size != _HEADER_BYTES + count * item_bytes:
        raise DataError(f"{path.name} has the wrong length.")
    dtype = np.dtype("<u2") if item_bytes == 2 else np.dtype("<u4")
    tokens: TokenArray = np.memmap(path, dtype=dtype, mode="r", offset=_HEADER_BYTES, shape=(count,))
    if not before:
        return _Contents(header, tokens, largest, None)
    segments = (
        Segment(_HEADER.size, before),
        Segment(_HEADER_BYTES, count * item_bytes),
        Segment(_HEADER.size + before, after),
    )
    return _Contents(
        header, tokens, largest, PackedFile(path, PackedLayout(before, count, item_bytes, after), segments)
    )


def _item_bytes(id_count: int) -> int:
    """2 when every id fits, else 4."""
    return 2 if id_count <= 1 << 16 else 4


def _converted(record: TokenRecord, id_count: int) -> Iterator[TokenArray]:
    wide = record.map()
    dtype = np.dtype(f"<u{_item_bytes(id_count)}")
    for start in range(0, record.token_count, _CHUNK_TOKENS):
        chunk = wide[start : start + _CHUNK_TOKENS]
        lowest, largest = int(chunk.min()), int(chunk.max())
        if lowest < 0 or largest >= id_count:
            del wide, chunk  # Windows cannot remove or shorten a file while an error's traceback keeps it mapped
            wrong = lowest if lowest < 0 else largest
            raise DataError(f"{record.path.name} has the token id {wrong}, outside its vocabulary of {id_count}.")
        yield chunk.astype(dtype)


def _around(record: TokenRecord) -> tuple[bytes, bytes]:
    """What a shard's file has before and after its tokens; nothing when that is more than a cache file has room for."""
    after_at = record.offset + record.token_count * WIDE_BYTES
    if record.offset + record.path.stat().st_size - after_at > MAX_AROUND_BYTES:
        return b"", b""
    with record.path.open("rb") as file:
        before = file.read(record.offset)
        file.seek(after_at)
        return before, file.read()


def _touch(path: Path) -> None:
    """Note the time of use; the file system's own stamp is coarser than two uses may be apart."""
    now = time.time_ns()
    os.utime(path, ns=(now, now))


def _summary(head: tuple[object, ...]) -> bytes:
    """The part of the header that the digest covers beside the tokens: all before it."""
    return _HEADER.pack(*head, b"")


def _shard_of(path: Path) -> int:
    match = _FILE_NAME.fullmatch(path.name)
    return int(match[1]) if match else -1


def _mb(size: int) -> str:
    return f"{size / 1e6:.1f} MB"
