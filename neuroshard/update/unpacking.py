"""Unpacks an archive whose digest was checked: still bounded, and nothing outside its folder."""

from __future__ import annotations

import tarfile
from pathlib import Path

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
                content.extract(member, folder, filter="data")
    except (tarfile.TarError, EOFError) as error:
        raise UpdateRefusedError(f"The archive of the update cannot be unpacked: {error}.") from error
