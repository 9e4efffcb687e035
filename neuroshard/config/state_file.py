"""Small state files: read one within its limit, replace one atomically, set a damaged one aside, lock one.

A reader, and a start after a kill at any moment, sees the old content or the new content, never a mix of both."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import sys
import time
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Literal, TypeVar, cast

import msgspec

from neuroshard.decoders import json_decoder
from neuroshard.errors import DamagedFileError, StorageError

_LOG = logging.getLogger(__name__)

T = TypeVar("T")

TEMPORARY_PREFIX = ".tmp-"
LOCK_NAME = ".lock"
LOCK_SECONDS = 10.0
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


@dataclass(frozen=True)
class StateFile(Generic[T]):
    """A small JSON file of type `T` in a data folder, written atomically.

    A file is damaged if it could be read but is too long or is not JSON of type `T`. A file that cannot be read is
    not damaged: its disk may come back, and until then nothing may be moved or replaced.
    """

    path: Path
    type: type[T]
    on_damage: Literal["set_aside", "ignore", "fail"]
    if_damaged: str  # the consequence, which ends a sentence; with "fail", a sentence that says what the owner can do
    max_bytes: int = 10_000
    data_dir: Path | None = None  # must exist for a write: a moved data folder must not be created again, empty

    def read(self, warn: Callable[[str], None] = _LOG.warning) -> T | None:
        """Read the value. Returns None if the file is missing, or if it is damaged, after a call of `warn`.

        Raises StorageError if the file cannot be read, and DamagedFileError if it is damaged and `on_damage` is "fail".
        """
        content = read_bounded(self.path, self.max_bytes)
        if content is None:
            return None
        try:
            return self._decode(content)
        except (ValueError, RecursionError) as error:
            self._handle_damage(str(error), warn)
            return None

    def write(self, value: T) -> None:
        """Replace the file. Raises StorageError; the old file is then unchanged."""
        try:
            make_folder(self.path.parent, self.data_dir)
            write_atomically(self.path, msgspec.json.encode(value))
        except OSError as error:
            reason = error.strerror or str(error)
            raise StorageError(f"{self.path} cannot be written ({reason}).", "Check the disk.") from error

    def alone(self) -> contextlib.AbstractContextManager[None]:
        """Change the file without another thread or process: `alone_in` for its folder."""
        return alone_in(self.path.parent, self.data_dir)

    def remove(self) -> None:
        """Delete the file if it exists. Raises StorageError."""
        try:
            self.path.unlink(missing_ok=True)
        except OSError as error:
            raise StorageError(f"{self.path} cannot be removed ({error.strerror}).", "Check the disk.") from error

    def _decode(self, content: bytes) -> T:
        if len(content) > self.max_bytes:
            raise ValueError(f"it is longer than {self.max_bytes:,} bytes")
        return cast("T", json_decoder(self.type).decode(content))

    def _handle_damage(self, reason: str, warn: Callable[[str], None]) -> None:
        match self.on_damage:
            case "set_aside":
                warn(set_damaged_aside(self.path, reason, self.if_damaged))
            case "ignore":
                warn(f"{self.path} is damaged ({reason}): {self.if_damaged}.")
            case "fail":
                raise DamagedFileError(f"{self.path} is damaged ({reason}).", self.if_damaged)


def read_bounded(path: Path, max_bytes: int) -> bytes | None:
    """Read a file's content, or None if it is missing. Raises StorageError if it cannot be read.

    A file longer than `max_bytes` gives `max_bytes` + 1 bytes: the caller must check the length and reject it.
    """
    try:
        with path.open("rb") as file:
            return file.read(max_bytes + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        reason = error.strerror or str(error)
        raise StorageError(f"{path} cannot be read ({reason}).", "Check the disk and the file's owner.") from error


def make_folder(folder: Path, data_dir: Path | None) -> None:
    """Create a folder, with its parents, inside `data_dir`, which must exist unless it is None.

    A data folder that was moved must not be created again, empty, at its old place. Raises OSError; its strerror
    describes what to do.
    """
    if data_dir is not None and not data_dir.is_dir():
        raise FileNotFoundError(errno.ENOENT, _moved_hint(data_dir))
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


@contextlib.contextmanager
def alone_in(folder: Path, data_dir: Path | None) -> Generator[None]:
    """Keep the other threads and processes that call this for the same folder waiting, while a file in it is read and
    then changed. Not to be nested for one folder. Raises StorageError if the wait takes LOCK_SECONDS.
    """
    path = folder / LOCK_NAME
    try:
        make_folder(folder, data_dir)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise StorageError(
            f"{path} cannot be opened ({failure_reason(error, data_dir)}).", "Check the disk."
        ) from error
    try:
        latest = time.monotonic() + LOCK_SECONDS
        while not _is_locked(path, descriptor):
            if time.monotonic() > latest:
                raise StorageError(
                    f"Another NeuroShard process has been changing the files in {folder} for {LOCK_SECONDS:g} seconds.",
                    "Try again when it has ended.",
                )
            time.sleep(0.02)
        yield
    finally:
        os.close(descriptor)  # releases the lock; the file stays: unlinking it would race with others that wait


def _is_locked(path: Path, descriptor: int) -> bool:
    try:
        return try_lock(descriptor)
    except OSError as error:
        raise StorageError(
            f"{path} cannot be locked: {error.strerror or error}.", "Use a folder on a local disk."
        ) from error


def failure_reason(error: OSError, data_dir: Path | None) -> str:
    """Reason why a write in a data folder failed, in words that end a sentence."""
    if data_dir is not None and not data_dir.is_dir():
        return _moved_hint(data_dir)
    return error.strerror or str(error)


def _moved_hint(data_dir: Path) -> str:
    return f"the data folder {data_dir} no longer exists: restore it, or start the node with its new path"


def is_disk_full(error: OSError) -> bool:
    """Whether a write failed because the disk or a quota is full, or the file would be too large."""
    return error.errno in _FULL


def write_atomically(path: Path, data: bytes | Iterable[bytes | memoryview], mode: int = 0o600) -> None:
    """Write `data`, in one piece or several, to a file next to `path`, flush it to disk and rename it over `path`.

    Raises OSError; `path` is then unchanged, unless only the final flush of its folder failed.
    """
    temporary = path.with_name(f"{TEMPORARY_PREFIX}{path.name}-{secrets.token_hex(4)}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.writelines((data,) if isinstance(data, bytes) else data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):  # the first error is the one to report
            temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)  # without it, a power failure can undo the rename


def sync_folder(folder: Path) -> None:
    """Flush the folder's entries to disk, so that renames survive a power failure. Windows does not need it."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def set_damaged_aside(path: Path, reason: str, then: str) -> str:
    """Rename `path` to NAME.damaged, NAME.damaged-2, ..., and return a warning that ends with `then`.

    Earlier damaged files stay. If the rename fails, the warning reports it, and the next write replaces the file.
    """
    number, aside = 1, path.with_name(f"{path.name}.damaged")
    while aside.exists():
        number += 1
        aside = path.with_name(f"{path.name}.damaged-{number}")
    try:
        path.rename(aside)
    except OSError as error:
        return f"{path} cannot be read ({reason}), nor be renamed ({error.strerror}); {then}."
    return f"{path} cannot be read ({reason}): it is now {aside.name}; {then}."


# Both versions of try_lock take a lock that the operating system releases when the descriptor or the process ends.
if sys.platform == "win32":
    import msvcrt

    _LOCKED_BYTE = 1 << 30  # far beyond the content: on Windows no other process can read locked bytes

    def try_lock(descriptor: int) -> bool:
        """Try to lock the file without waiting; False if it is locked already. Raises OSError if locking fails."""
        os.lseek(descriptor, _LOCKED_BYTE, os.SEEK_SET)
        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True
else:
    import fcntl

    def try_lock(descriptor: int) -> bool:
        """Try to lock the file without waiting; False if it is locked already. Raises OSError if locking fails."""
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
