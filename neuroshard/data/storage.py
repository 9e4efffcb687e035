"""Atomic writing of small files, and telling a full disk from other trouble."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

from neuroshard.errors import DiskFullError, StorageError

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def storage_error(path: Path, error: OSError) -> StorageError:
    """The error to raise for a failed write: DiskFullError when space or a quota is used up."""
    if error.errno in _FULL:
        return DiskFullError(f"There is no space left to write {path}.", "Free some space; nothing was lost.")
    return StorageError(f"{path} cannot be written: {error.strerror or error}.")


def write_atomically(path: Path, data: bytes) -> None:
    """Temporary file, fsync, rename: a reader sees the old file or the new one. Raises DiskFullError, StorageError."""
    temporary: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".writing-", delete=False) as file:
            temporary = Path(file.name)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(0o644)
        temporary.replace(path)
        _sync_folder(path.parent)
    except OSError as error:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        raise storage_error(path, error) from error


def _sync_folder(folder: Path) -> None:
    """Make renames durable in the order in which they were done; Windows has no such call."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
