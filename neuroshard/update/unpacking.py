"""Unpacks an archive whose digest was checked: still bounded, and nothing outside its folder."""

from __future__ import annotations

import os
import shutil
import tarfile
from pathlib import Path, PurePosixPath

from neuroshard.update.errors import UpdateRefusedError

MAX_FILES = 100_000


def unpack(archive: Path, folder: Path, most_bytes: int) -> None:
    """Unpack a .tar.gz into a new `folder`. Raises UpdateRefusedError for one that is damaged, too large or escapes."""
    folder.mkdir(parents=True)
    left, files = most_bytes, 0
    try:
        with tarfile.open(archive, "r:gz") as content:
            for member in content:
                files, left = files + 1, left - member.size
                if left < 0 or files > MAX_FILES:
                    raise UpdateRefusedError("The archive unpacks to more than was signed.")
                _extract(content, member, folder)
    except (tarfile.TarError, EOFError, FileExistsError) as error:
        raise UpdateRefusedError(f"The archive of the update cannot be unpacked: {error}.") from error


def flush_to_disk(folder: Path) -> None:
    """Wait until everything below the folder would survive a power cut. Raises OSError."""
    if hasattr(os, "sync"):
        os.sync()
        return
    for path in folder.rglob("*"):  # Windows: file by file, of those that may be written
        if path.is_file() and os.access(path, os.W_OK):
            with path.open("r+b") as file:
                os.fsync(file.fileno())


def _extract(content: tarfile.TarFile, member: tarfile.TarInfo, folder: Path) -> None:
    """One member: a folder, a file or a link, within the folder. tarfile's own filter came with Python 3.11.4 only."""
    name, target = PurePosixPath(member.name), folder / member.name
    if name.is_absolute() or ".." in name.parts or not _is_inside(target.parent, folder):
        raise tarfile.TarError(f"{member.name!r} is outside of its folder")
    target.parent.mkdir(parents=True, exist_ok=True)
    source = content.extractfile(member) if member.isreg() else None
    if member.isdir():
        target.mkdir(exist_ok=True)
    elif member.issym() and _is_inside(target.parent / member.linkname, folder):
        target.symlink_to(member.linkname)
    elif member.islnk() and _is_inside(folder / member.linkname, folder):
        os.link(folder / member.linkname, target)
    elif source is not None:
        with source, target.open("xb") as file:
            shutil.copyfileobj(source, file)
        target.chmod(0o755 if member.mode & 0o100 else 0o644)
    else:
        raise tarfile.TarError(f"{member.name!r} is no file, no folder and no link within it")


def _is_inside(path: Path, folder: Path) -> bool:
    return path.resolve().is_relative_to(folder.resolve())
