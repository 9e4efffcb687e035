"""Atomic writing of public files, and telling a full disk from other trouble."""

from __future__ import annotations

from pathlib import Path

from neuroshard.config import atomic_write
from neuroshard.errors import DiskFullError, StorageError, UnwritableError


def storage_error(path: Path, error: OSError) -> StorageError:
    """The error to raise for a failed write: DiskFullError when space or a quota is used up, else UnwritableError."""
    if atomic_write.is_disk_full(error):
        return DiskFullError(f"There is no space left to write {path}.", "Free some space; nothing was lost.")
    return UnwritableError(f"{path} cannot be written: {error.strerror or error}.")


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file that others may read, its folder and the one above too: a reader sees the old content or the new.

    A data folder above those is not made: it may have been moved.
    Raises DiskFullError or StorageError.
    """
    try:
        for folder in (path.parent.parent, path.parent):
            folder.mkdir(exist_ok=True)
        atomic_write.write_atomically(path, data, mode=0o644)
    except OSError as error:
        raise storage_error(path, error) from error
