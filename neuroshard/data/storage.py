"""Small public files on disk: storage errors, atomic writes, and the local copies of data set metadata.

The copies of manifests, digest pages and tokenizer tables are named by their digests."""

from __future__ import annotations

import logging
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

from neuroshard.config import state_file as atomic_write
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


_LOG = logging.getLogger(__name__)

METADATA_FOLDER = "descriptions"  # in the data cache of a node


def manifest_copy(root: str) -> str:
    """Where the manifest of this root is kept."""
    return f"manifest-{root}.json"


def page_copy(digest: str) -> str:
    """Where the page of this digest is kept."""
    return f"page-{digest}.bin"


def tokenizer_copy(digest: str) -> str:
    """Where the table of this digest is kept."""
    return f"tokenizer-{digest}.json"


class MetadataStore:
    """The copies in one folder. They are a convenience: a full disk or a storage limit costs them, not the run.

    `make_room` is asked before so many bytes are kept; they are not when it says no. `keeps` False: nothing is written.
    """

    def __init__(self, folder: Path, *, keeps: bool = True) -> None:
        self.folder = folder
        self.make_room: Callable[[int], bool] = _always
        self._keeps = keeps

    def only_read(self) -> MetadataStore:
        """The same folder, for what is looked at and not needed again."""
        return MetadataStore(self.folder, keeps=False)

    def find(self, name: str) -> bytes | None:
        """A copy, unchecked; None when it is not here."""
        try:
            return (self.folder / name).read_bytes()
        except OSError:
            return None  # not there: the source has it

    def read(self, name: str, digest: str) -> bytes | None:
        """A copy with exactly these contents, None when it is not here or damaged."""
        data = self.find(name)
        return data if data is not None and sha256(data).hexdigest() == digest else None

    def keep(self, name: str, data: bytes) -> None:
        """Write a copy unless it is there already."""
        if not self._keeps or self.read(name, sha256(data).hexdigest()) is not None:
            return
        if not self.make_room(len(data)):
            _LOG.warning("The storage limit leaves no room for a copy of %s; it will be fetched again.", name)
            return
        try:
            write_atomically(self.folder / name, data)
        except StorageError as error:
            _LOG.warning("A copy of the data set's description was not kept: %s", error)


def _always(_needed_bytes: int) -> bool:
    return True
