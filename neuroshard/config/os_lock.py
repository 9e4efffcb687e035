"""A lock on an open file that the operating system drops with its process, however that ends."""

from __future__ import annotations

import os
import sys

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
