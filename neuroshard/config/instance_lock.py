"""One node per data folder: a lock that the operating system releases with the process, and the node's address."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from neuroshard.config.state_file import try_lock
from neuroshard.errors import NeuroShardError, StorageError
from neuroshard.types import LOOPBACK

if TYPE_CHECKING:
    from pathlib import Path


FILE_NAME = "instance.lock"
_MAX_NOTE_BYTES = 4096


@dataclass(frozen=True)
class LockOwner:
    """The node that holds a data folder. The port is None until the node has bound one at `host`."""

    pid: int | None
    port: int | None
    host: str = LOOPBACK  # a note from an older version does not contain it
    is_setup: bool = False  # the node has no token yet and shows the set-up wizard
    page_folder: str = ""  # folder whose secret opens its page, if that is another one: a demo of the wizard


class AlreadyRunningError(NeuroShardError):
    """Another node holds the data folder; `owner` describes it."""

    def __init__(self, folder: Path, owner: LockOwner) -> None:
        super().__init__(f"A node already runs on {folder} (process {owner.pid}, port {owner.port}).")
        self.owner = owner


class InstanceLock:
    """Lock of a data folder, held from acquire() to release() or to the end of the process, even after a kill."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor

    @classmethod
    def acquire(cls, data_dir: Path) -> InstanceLock:
        """Lock the folder; create it if it is missing. Raises AlreadyRunningError with the owner, or StorageError."""
        path = data_dir / FILE_NAME
        try:
            data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise StorageError(
                f"The data folder {data_dir} cannot be used: {error.strerror or error}.",
                "Make it writable for this user, or name another one with --data-dir FOLDER.",
            ) from error
        try:
            if not _lock_patiently(descriptor):
                owner = _read_note(path)
                os.close(descriptor)
            else:
                lock = cls(descriptor)
                lock._write_note(LockOwner(os.getpid(), None))
                return lock
        except OSError as error:
            os.close(descriptor)
            raise StorageError(
                f"{path} cannot be locked: {error.strerror or error}.", "Use a folder on a local disk."
            ) from error
        raise AlreadyRunningError(data_dir, owner)

    def announce(self, host: str, port: int, *, is_setup: bool = False, page_folder: Path | None = None) -> None:
        """Store the address of this node's API for later starts and commands. Raises OSError."""
        self._write_note(LockOwner(os.getpid(), port, host, is_setup, str(page_folder or "")))

    def release(self) -> None:
        """Release the folder. A second call does nothing."""
        if self._descriptor is None:
            return
        os.ftruncate(self._descriptor, 0)  # the file stays: unlinking it would race with a start that has it open
        os.close(self._descriptor)
        self._descriptor = None

    def _write_note(self, owner: LockOwner) -> None:
        if self._descriptor is None:
            raise ValueError("the lock was released")
        note = json.dumps(asdict(owner)).encode()
        os.lseek(self._descriptor, 0, os.SEEK_SET)
        os.write(self._descriptor, note)
        os.ftruncate(self._descriptor, len(note))


def _lock_patiently(descriptor: int) -> bool:
    """Try up to 5 times in 50 ms: `read_lock_owner` holds the lock for an instant, but a node keeps it."""
    for _ in range(5):
        if try_lock(descriptor):
            return True
        time.sleep(0.01)
    return False


def read_lock_owner(data_dir: Path) -> LockOwner | None:
    """The node that holds the folder, or None if no live process does. Raises StorageError if it cannot be read."""
    path = data_dir / FILE_NAME
    try:
        descriptor = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror}.", "Run as the user of that node.") from error
    try:
        if try_lock(descriptor):  # no process holds it; closing the file releases the lock again
            return None
        return _read_note(path)
    finally:
        os.close(descriptor)


def last_used(data_dir: Path) -> float:
    """Time at which a node last locked or released the folder, in seconds since the epoch; 0 if none ever did."""
    try:
        return (data_dir / FILE_NAME).stat().st_mtime
    except OSError:
        return 0.0


def _read_note(path: Path) -> LockOwner:
    """The holder's note; an empty or half-written note gives an owner without pid and port."""
    with path.open("rb") as file:
        raw = file.read(_MAX_NOTE_BYTES)
    try:
        note = json.loads(raw)
        pid, port, host = note["pid"], note["port"], note.get("host")
    except (ValueError, KeyError, TypeError, RecursionError):
        return LockOwner(None, None)
    return LockOwner(
        pid if type(pid) is int else None,
        port if type(port) is int and 0 < port < 65536 else None,
        host if isinstance(host, str) else LOOPBACK,
        note.get("is_setup") is True,
        str(note.get("page_folder") or ""),
    )
