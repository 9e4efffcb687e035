"""The folder of the file at which the ranks of a site meet. Folders of nodes that were killed are removed later."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from pathlib import Path

import psutil

PREFIX = "neuroshard-site-"
_CLOCK_SECONDS = 10.0  # tolerance between the clocks of the file system and of the system's processes


def make_meeting_folder() -> Path:
    """Make a folder that only this user can open, named after this process, and remove those of ended processes."""
    remove_abandoned_folders(Path(tempfile.gettempdir()))
    return Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-"))


def remove_abandoned_folders(parent: Path) -> None:
    """Remove the meeting folders whose process has ended. Folders of other users stay: they cannot be removed."""
    for folder in parent.glob(f"{PREFIX}*"):
        named = re.match(rf"{PREFIX}(\d{{1,9}})-", folder.name)
        try:
            if named and not _lives(int(named[1]), folder.lstat().st_mtime):
                shutil.rmtree(folder, ignore_errors=True)  # which removes no link
        except OSError:  # another start removes it at the same time
            continue


def _lives(pid: int, made_at: float) -> bool:
    """Whether a process of this number runs that existed when a folder was made. Numbers are used again."""
    try:
        return psutil.Process(pid).create_time() <= made_at + _CLOCK_SECONDS
    except psutil.NoSuchProcess:
        return False
    except psutil.Error:
        return True
