"""The shard cache: shard files as downloaded, a storage limit, and least-recently-used eviction."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Self

from neuroshard.config.state_file import TEMPORARY_PREFIX
from neuroshard.data.digest_check import check_file, file_sha256
from neuroshard.data.shard_file import ShardForm, TokenArray, map_shard
from neuroshard.data.storage import storage_error
from neuroshard.errors import DataError, StorageError, UnwritableError
from neuroshard.types import ShardId

_FILE_NAME = re.compile(r"shard_(\d+)-([0-9a-f]{16})-([0-9a-f]{64})\.(?:bin|pt)")


@dataclass(frozen=True)
class CachedShard:
    """A verified shard, mapped from the cache."""

    shard: ShardId
    tokens: TokenArray  # (n,) read-only
    largest: int  # the largest id among them


@dataclass(frozen=True)
class _CacheFile:
    """A file of the cache. Its name contains the shard, the beginning of its key, and the SHA-256 of its bytes."""

    path: Path
    size: int

    @property
    def digest(self) -> str:
        return self._name[3]

    @property
    def shard(self) -> ShardId:
        return ShardId(int(self._name[1]))

    @property
    def place(self) -> _Place:
        return self.shard, self._name[2]

    @property
    def _name(self) -> re.Match[str]:
        match = _FILE_NAME.fullmatch(self.path.name)
        if match is None:
            raise ValueError(f"{self.path.name} is not a name of the cache")
        return match


_Place = tuple[ShardId, str]  # a shard and the beginning of its key


class CacheFileWriter:
    """Writes a shard's file while it arrives (a Sink). All methods block on the disk."""

    def __init__(self, path: Path) -> None:
        """Raises DiskFullError or StorageError."""
        self.path = path
        self._open()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the file unless it was renamed; if that fails, the next start removes it."""
        self._file.close()
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)

    def _open(self) -> None:
        try:
            self._file = self.path.open("wb", buffering=0)
        except OSError as error:
            raise storage_error(self.path, error) from error

    def restart(self) -> None:
        """Discard everything written. Raises DiskFullError or StorageError."""
        self._file.close()
        self._open()

    def write(self, data: bytes) -> None:
        """Append bytes. Raises DiskFullError or StorageError."""
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]  # a raw write may be partial
        except OSError as error:
            raise storage_error(self.path, error) from error

    def finish(self) -> None:
        """Close the file without a sync: after a crash it does not match its digest and is downloaded again."""
        self._file.close()


class ShardCache:
    """Keeps shards under `folder`, together never above `limit_bytes`, including a download in progress.

    Files in the folder `descriptions` (of data sets) count towards the limit too.

    A shard is found by its id and a 32-byte key that names its exact contents (its digest). All methods block on the
    disk: call them from a worker thread. Several threads may call them. A file has the bytes that were downloaded, so
    another run or another node can use it too.
    """

    def __init__(self, folder: Path, *, limit_bytes: int, descriptions: Path | None = None) -> None:
        self.folder = folder
        self.limit_bytes = limit_bytes
        self._descriptions = descriptions
        self.damaged_files = 0  # cache files found damaged and removed
        self._lock = Lock()
        self._files: dict[_Place, _CacheFile] = {}  # least recently used first
        self._reserved: dict[ShardId, int] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for leftover in (*folder.glob("*.part"), *folder.glob(f"{TEMPORARY_PREFIX}*")):
                leftover.unlink()
            found = [path for path in folder.iterdir() if _FILE_NAME.fullmatch(path.name)]
            for path in sorted(found, key=lambda path: (path.stat().st_mtime_ns, path)):
                file = _CacheFile(path, path.stat().st_size)
                self._files[file.place] = file
        except OSError as error:
            raise storage_error(folder, error) from error

    def usage(self) -> tuple[int, int]:
        """Return the number of cached shards, and the bytes that they and the descriptions take."""
        with self._lock:
            return len(self._files), self._shard_bytes() + self._description_bytes()

    def contains(self, shard: ShardId, key: bytes) -> bool:
        """Return whether the shard is cached; only `get` checks its contents."""
        with self._lock:
            return _place(shard, key) in self._files

    def get(self, shard: ShardId, key: bytes, form: ShardForm) -> CachedShard | None:
        """Return the shard after checking its digest, or None. A damaged file is removed.

        Raises UnwritableError without a folder.
        """
        with self._lock:
            file = self._files.get(_place(shard, key))
            if file is None:
                return None
            try:
                check_file(file.path, file.digest)
                tokens = map_shard(file.path, form)
            except (DataError, OSError):  # truncated, flipped bits, deleted: fetch it again
                self._check_folder()
                self.damaged_files += 1
                self._remove(file)
                return None
            _touch(file.path)
            self._files[file.place] = self._files.pop(file.place)  # now the most recently used
        return CachedShard(shard, tokens, int(tokens.max()))

    def size_of(self, shard: ShardId, key: bytes) -> int | None:
        """Return the bytes that the shard takes, or None when it is not cached."""
        with self._lock:
            file = self._files.get(_place(shard, key))
            return None if file is None else file.size

    def shards(self) -> tuple[ShardId, ...]:
        """Return the ids of the cached shards of any data set, in ascending order."""
        with self._lock:
            return tuple(sorted({file.shard for file in self._files.values()}))

    def file(self, shard: ShardId, key: bytes) -> Path | None:
        """Return the checked file of a shard, to send to other nodes; None when it is not cached."""
        with self._lock:
            file = self._files.get(_place(shard, key))
            if file is None:
                return None
            try:
                check_file(file.path, file.digest)
            except (DataError, OSError):
                if self.folder.is_dir():
                    self.damaged_files += 1
                    self._remove(file)
                return None
            return file.path

    def reserve(self, shard: ShardId, needed_bytes: int, keep: Collection[ShardId]) -> bool:
        """Reserve bytes for a download: remove the least recently used shards, but none of `keep`.

        Returns False when the bytes fit only after another reservation is released. Raises StorageError when they can
        never fit, UnwritableError without a folder.
        """
        with self._lock:
            self._check_folder()
            kept = self._kept_bytes(keep) + self._description_bytes()
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
        """Remove least recently used shards, but none of `keep`, until the bytes fit; False if they never fit."""
        with self._lock:
            return self.folder.is_dir() and self._make_room(needed_bytes, keep)

    def release(self, shard: ShardId, keep: Collection[ShardId]) -> None:
        """End a reservation; shards are removed if they exceed the limit, which may have been lowered meanwhile."""
        with self._lock:
            self._reserved.pop(shard, None)
            self._shrink(self._room(), {*keep, shard})

    def change_limit(self, limit_bytes: int, keep: Collection[ShardId]) -> None:
        """Apply another limit at once: remove the least recently used shards, but none of `keep`."""
        with self._lock:
            self.limit_bytes = limit_bytes
            self._shrink(self._room(), keep)

    def release_all(self, keep: Collection[ShardId]) -> None:
        """Remove every shard except those in `keep`, because the disk is full."""
        with self._lock:
            for file in self._removable(keep):
                self._remove(file)

    def writer(self, shard: ShardId, key: bytes) -> CacheFileWriter:
        """Open a writer for a shard's file. Raises DiskFullError or StorageError."""
        number, beginning = _place(shard, key)
        return CacheFileWriter(self.folder / f"shard_{number}-{beginning}.part")

    def take(self, shard: ShardId, key: bytes, form: ShardForm, writer: CacheFileWriter) -> CachedShard:
        """Add the written file to the cache. With a digest in the form, the caller has already compared the bytes.

        Raises DataError for a file that is not a shard or has other ids, DiskFullError or StorageError when it cannot
        be written.
        """
        number, beginning = _place(shard, key)
        writer.finish()
        try:
            digest = key.hex() if form.has_digest else file_sha256(writer.path)
            path = self.folder / f"shard_{number}-{beginning}-{digest}.{form.shard_format}"
            writer.path.replace(path)
            try:
                tokens = map_shard(path, form)
                largest = form.largest_id(tokens)
            except DataError:
                path.unlink()
                raise
            size = path.stat().st_size
        except OSError as error:
            raise storage_error(writer.path, error) from error
        _touch(path)
        with self._lock:
            self._files[number, beginning] = _CacheFile(path, size)
        return CachedShard(shard, tokens, largest)

    def _check_folder(self) -> None:
        """Raise UnwritableError when the folder was moved away: its files still count and may come back."""
        if not self.folder.is_dir():
            raise UnwritableError(f"The data cache {self.folder} no longer exists.", "Restore the folder.")

    def _room(self) -> int:
        """Return the bytes that shards may take at present."""
        return self.limit_bytes - sum(self._reserved.values()) - self._description_bytes()

    def _make_room(self, needed_bytes: int, keep: Collection[ShardId]) -> bool:
        room = self._room() - needed_bytes
        if self._kept_bytes(keep) > room:
            return False
        self._shrink(room, keep)
        return True

    def _shard_bytes(self) -> int:
        return sum(file.size for file in self._files.values())

    def _kept_bytes(self, keep: Collection[ShardId]) -> int:
        return sum(file.size for file in self._files.values() if file.shard in keep)

    def _removable(self, keep: Collection[ShardId]) -> list[_CacheFile]:
        return [file for file in self._files.values() if file.shard not in keep]

    def _description_bytes(self) -> int:
        size = 0
        if self._descriptions is not None:
            with contextlib.suppress(OSError), os.scandir(self._descriptions) as found:  # no folder yet
                for entry in found:
                    with contextlib.suppress(OSError):  # it was just replaced
                        size += entry.stat().st_size if entry.is_file() else 0
        return size

    def _shrink(self, most_bytes: int, keep: Collection[ShardId]) -> None:
        """Remove least recently used shards, but none of `keep`, until the others take at most `most_bytes`."""
        for file in self._removable(keep):
            if self._shard_bytes() <= most_bytes:
                break
            self._remove(file)

    def _remove(self, file: _CacheFile) -> None:
        """Remove a file; one that the system does not release (mapped on Windows, read-only disk) stays counted."""
        try:
            file.path.unlink(missing_ok=True)
        except OSError:
            return
        self._files.pop(file.place, None)


def _place(shard: ShardId, key: bytes) -> _Place:
    return shard, key.hex()[:16]


def _touch(path: Path) -> None:
    """Record the time of use, because two uses may be closer than the file system's own time resolution."""
    now = time.time_ns()
    with contextlib.suppress(OSError):  # shards on a read-only disk are still usable
        os.utime(path, ns=(now, now))


def _mb(size: int) -> str:
    return f"{size / 1e6:.1f} MB"
