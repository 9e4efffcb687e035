"""Shards on this computer as uint16 or uint32, within a storage limit; the least recently used ones go first."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from neuroshard.config.atomic_write import TEMPORARY_PREFIX
from neuroshard.data.cache_file import HEADER_BYTES, CacheFileWriter, item_bytes, open_checked, open_written
from neuroshard.data.genesis.shard_stream import ShardForm
from neuroshard.data.packed import PackedFile
from neuroshard.data.storage import storage_error
from neuroshard.data.windows import TokenArray
from neuroshard.errors import DataError, StorageError, UnwritableError
from neuroshard.types import ShardId

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
        return HEADER_BYTES + token_count * item_bytes(id_count)

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
