"""A local folder as the destination of a data set. Its claim is a lock of the operating system."""

from __future__ import annotations

import os
import stat
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

from neuroshard.config.state_file import TEMPORARY_PREFIX, try_lock
from neuroshard.data.storage import storage_error, write_shared_file
from neuroshard.dataset.object_store import Condition, ExpectedVersion, StoredObject, Version, checked_name, holder_name
from neuroshard.errors import ConflictError, DataError, StorageError

LOCK_NAME = ".populator.lock"
_MAX_NOTE_BYTES = 1024
_COMPARED_BYTES = 1 << 18  # at a time, so they stay in the processor's cache


class FolderDestination:
    """A Destination whose claim is a lock of the operating system. A file that is replaced has another version."""

    def __init__(self, folder: Path) -> None:
        """The first write creates the folder."""
        self._folder = folder
        self._lock: int | None = None  # descriptor

    @property
    def description(self) -> str:
        return str(self._folder)

    def read(self, name: str, max_bytes: int) -> StoredObject | None:
        path = self._folder / checked_name(name)
        try:
            if not stat.S_ISREG(path.stat().st_mode):  # a pipe would block
                raise DataError(f"{path} is not a file.")
            with path.open("rb") as file:
                status = os.fstat(file.fileno())
                if status.st_size > max_bytes:
                    raise DataError(f"{path} has {status.st_size} bytes, at most {max_bytes} were expected.")
                content = file.read(status.st_size)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise _cannot_be_read(path, error) from error
        return StoredObject(content, _version(status))

    def write(self, name: str, content: bytes, *, expected: ExpectedVersion = Condition.ANY) -> Version:
        """Write the file and read it back. Without a claim, it takes one for this write."""
        if self._lock is None:
            with self.claim("a write"):
                return self.write(name, content, expected=expected)
        path = self._folder / checked_name(name)
        if expected is not Condition.ANY and _version_of(path) != expected:
            raise ConflictError(f"Another process changed {path}.", "Start again to continue from what is there.")
        write_shared_file(path, content)
        return _checked(path, content)

    def names(self, prefix: str = "") -> Iterator[str]:
        try:
            paths = [path.relative_to(self._folder) for path in self._folder.rglob("*") if path.is_file()]
        except OSError as error:
            raise _cannot_be_read(self._folder, error) from error
        visible = [path.as_posix() for path in paths if not any(part.startswith(".") for part in path.parts)]
        yield from sorted(name for name in visible if name.startswith(prefix))

    @contextmanager
    def claim(self, purpose: str) -> Generator[None]:
        """Lock the folder until the context ends. Raises ConflictError or StorageError."""
        if self._lock is not None:
            raise ValueError("this destination holds its claim already")
        self._lock = _locked(self._folder, purpose)
        try:
            _remove_temporaries(self._folder)
            yield
        finally:
            descriptor, self._lock = self._lock, None
            os.ftruncate(descriptor, 0)  # the file stays: unlinking it would race with processes that have it open
            os.close(descriptor)

    def close(self) -> None:
        """A folder needs no cleanup."""


def _version(status: os.stat_result) -> Version:
    """Return inode, time and size: a replacement exists before the old file is removed, so its inode differs."""
    return Version(f"{status.st_ino}-{status.st_mtime_ns}-{status.st_size}")


def _remove_temporaries(folder: Path) -> None:
    """Remove a killed writer's files, each as large as a shard; the claim excludes other writers."""
    try:
        for path in folder.rglob(f"{TEMPORARY_PREFIX}*"):
            if path.is_file() and not path.is_symlink():
                path.unlink(missing_ok=True)
    except OSError as error:
        raise storage_error(folder, error) from error


def _version_of(path: Path) -> Version | Condition:
    try:
        return _version(path.stat())
    except FileNotFoundError:
        return Condition.ABSENT
    except OSError as error:
        raise _cannot_be_read(path, error) from error


def _checked(path: Path, content: bytes) -> Version:
    """Return the version after reading the file back; a direct comparison is faster than a digest."""
    try:
        with path.open("rb", buffering=0) as file:
            for start in range(0, len(content) + 1, _COMPARED_BYTES):
                if file.read(_COMPARED_BYTES) != content[start : start + _COMPARED_BYTES]:
                    raise StorageError(f"{path} does not contain the bytes that were written.", "Check the disk.")
            return _version(os.fstat(file.fileno()))
    except OSError as error:
        raise _cannot_be_read(path, error) from error


def _cannot_be_read(path: Path, error: OSError) -> StorageError:
    return StorageError(f"{path} cannot be read: {error.strerror or error}.")


def _locked(folder: Path, purpose: str) -> int:
    """Lock the folder's lock file and return its descriptor. Raises ConflictError or StorageError."""
    path = folder / LOCK_NAME
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise storage_error(path, error) from error
    try:
        if try_lock(descriptor):
            os.ftruncate(descriptor, 0)
            os.write(descriptor, holder_name(purpose).encode()[:_MAX_NOTE_BYTES])
            return descriptor
        holder = os.read(descriptor, _MAX_NOTE_BYTES).decode("utf-8", "replace")
    except OSError as error:
        os.close(descriptor)
        raise StorageError(
            f"{path} cannot be locked: {error.strerror or error}.", "Use a folder on a local disk."
        ) from error
    os.close(descriptor)
    raise ConflictError(
        f"{folder} is being written by {holder or 'another process'}.", "Wait until it finishes, or stop it."
    )
