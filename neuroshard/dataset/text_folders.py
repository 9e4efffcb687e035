"""The folders of this computer as its owner chooses one with text: subfolders, and how much text is in each.

Whatever a disk contains, one answer reads a bounded number of names, and no file. Links are neither shown nor followed:
what is listed is below the folder that was asked for, and the system decides what of it this process may read.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from neuroshard.dataset.file_source import TEXT_SUFFIXES, is_data_set, is_searched
from neuroshard.errors import DataError

MAX_FOLDERS = 200  # listed
MAX_NAMES = 5_000  # read for the list itself
MAX_NAMES_EACH = 3_000  # read in one listed folder and all folders below it
MAX_NAMES_BELOW = 60_000  # read in all of them together


@dataclass(frozen=True)
class ListedFolder:
    """A folder, and the text files in it and its subfolders."""

    path: str
    files: int
    bytes: int
    is_complete: bool  # false: there are at least this many, or a part cannot be read


@dataclass(frozen=True)
class FolderList:
    """A folder and its subfolders, in order of their names."""

    folder: ListedFolder
    parent: str | None  # None: there is nothing above it
    folders: tuple[ListedFolder, ...]
    has_more: bool  # more folders than are listed
    drives: tuple[str, ...]  # of Windows; empty elsewhere


def drives_of(mask: int) -> tuple[str, ...]:
    """The drives in the bit mask of Windows' GetLogicalDrives, in which bit 0 is A:."""
    return tuple(f"{chr(ord('A') + bit)}:\\" for bit in range(26) if mask >> bit & 1)


def present_drives() -> tuple[str, ...]:
    """The drives of this computer on Windows; nothing elsewhere. No drive is touched: an empty one may take long."""
    if sys.platform != "win32":
        return ()
    import ctypes

    return drives_of(ctypes.windll.kernel32.GetLogicalDrives())


def list_text_folders(folder: Path) -> FolderList:
    """List a folder; a link to it is resolved first. Raises DataError if it cannot be read."""
    try:
        real = folder.resolve(strict=True)
        with os.scandir(real) as entries:
            names = list(islice(entries, MAX_NAMES + 1))
    except (OSError, RuntimeError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise DataError(f"{folder} cannot be opened: {reason}.", "Choose another folder.") from error
    shown = sorted((one for one in names[:MAX_NAMES] if _is_shown(one)), key=lambda one: (one.name.lower(), one.name))
    counts = [_Count(1, _size(one)) for one in names[:MAX_NAMES] if _is_text(one)]
    left, rows = MAX_NAMES_BELOW, list[ListedFolder]()
    for entry in shown[:MAX_FOLDERS]:
        count = _counted(Path(entry.path), min(left, MAX_NAMES_EACH))
        left -= count.names
        counts.append(count)
        rows.append(ListedFolder(entry.path, count.files, count.bytes, count.is_complete))
    has_more = len(shown) > MAX_FOLDERS or len(names) > MAX_NAMES
    files, size = sum(one.files for one in counts), sum(one.bytes for one in counts)
    whole = ListedFolder(str(real), files, size, not has_more and all(one.is_complete for one in counts))
    return FolderList(whole, None if real.parent == real else str(real.parent), tuple(rows), has_more, present_drives())


@dataclass
class _Count:
    files: int = 0
    bytes: int = 0
    names: int = 0  # that were read
    is_complete: bool = True


def _counted(folder: Path, most: int) -> _Count:
    """Count the text files that training on `folder` reads, after at most `most` names."""
    count, waiting = _Count(), [folder]
    while waiting:
        here, left = waiting.pop(), most - count.names
        try:
            with os.scandir(here) as entries:
                found = list(islice(entries, left + 1))
        except OSError:  # another user's, or gone meanwhile: the rest counts
            count.is_complete, found = False, list[os.DirEntry[str]]()
        is_over, found = len(found) > left, found[:left]
        count.names += len(found)
        if here != folder and is_data_set(here.name, (one.name for one in found)):
            continue
        for entry in found:
            if _is_text(entry):
                count.files += 1
                count.bytes += _size(entry)
        if is_over:
            count.is_complete = False
            break
        waiting += (Path(one.path) for one in found if _is_shown(one))
    return count


def _is_shown(entry: os.DirEntry[str]) -> bool:
    """Whether a folder is one that training searches, with a name that can be sent."""
    return is_searched(entry.name) and entry.name.isprintable() and entry.is_dir(follow_symlinks=False)


def _is_text(entry: os.DirEntry[str]) -> bool:
    is_named_so = not entry.name.startswith(".") and entry.name.lower().endswith(TEXT_SUFFIXES)
    return is_named_so and entry.is_file(follow_symlinks=False)


def _size(entry: os.DirEntry[str]) -> int:
    try:
        return entry.stat(follow_symlinks=False).st_size
    except OSError:  # deleted meanwhile
        return 0
