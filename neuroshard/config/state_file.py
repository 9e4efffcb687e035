"""Write small state files: replace one atomically, set a damaged one aside, lock one for this process.

A reader, or a kill at any moment, sees the old content or the new content, never half of either."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


TEMPORARY_PREFIX = ".tmp-"
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def is_disk_full(error: OSError) -> bool:
    """Whether a write failed because space or a quota is used up."""
    return error.errno in _FULL


def write_atomically(path: Path, data: bytes | Iterable[bytes | memoryview], mode: int = 0o600) -> None:
    """Write `data`, in one piece or several, beside `path`, flush it to the disk and rename it over `path`.

    Raises OSError; `path` is then untouched.
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
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` as durable as the files they point to; Windows has no such call and needs none."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def set_damaged_aside(path: Path, reason: str, then: str) -> str:
    """Rename `path` to NAME.damaged, NAME.damaged-2, ...; a warning that says so, and what happens `then`.

    Earlier damaged files stay. Where renaming fails the warning says that, too: the next write replaces the file.
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


if sys.platform == "win32":
    import msvcrt

    _LOCKED_BYTE = 1 << 30  # far behind what is written: Windows lets nobody read what is locked

    def try_lock(descriptor: int) -> bool:
        """Lock the file, or say at once that somebody else holds it. Raises OSError where files cannot be locked."""
        os.lseek(descriptor, _LOCKED_BYTE, os.SEEK_SET)
        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True
else:
    import fcntl

    def try_lock(descriptor: int) -> bool:
        """Lock the file, or say at once that somebody else holds it. Raises OSError where files cannot be locked."""
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
