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
    """Return the error for a failed write: DiskFullError for used-up space or quota, otherwise UnwritableError."""
    if atomic_write.is_disk_full(error):
        return DiskFullError(f"There is no space left to write {path}.", "Free some space; nothing was lost.")
    return UnwritableError(f"{path} cannot be written: {error.strerror or error}.")


def write_shared_file(path: Path, data: bytes) -> None:
    """Write a file that others may read, with its folder and parent: a reader sees the old content or the new.

    Folders above those are not created: the data folder may have been moved. Raises DiskFullError or StorageError.
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
    """Return the file name of the stored manifest with this root."""
    return f"manifest-{root}.json"


def page_copy(digest: str) -> str:
    """Return the file name of the stored page with this digest."""
    return f"page-{digest}.bin"


def tokenizer_copy(digest: str) -> str:
    """Return the file name of the stored table with this digest."""
    return f"tokenizer-{digest}.json"


class MetadataStore:
    """The copies in one folder. They are optional: a full disk or a storage limit affects them, not the run.

    `make_room` is called with the size before a copy is written; if it returns False, the copy is not written. With
    `keeps` False, nothing is written.
    """

    def __init__(self, folder: Path, *, keeps: bool = True) -> None:
        self.folder = folder
        self.make_room: Callable[[int], bool] = _always
        self._keeps = keeps

    def only_read(self) -> MetadataStore:
        """Return a read-only view of the same folder, for files that are not needed again."""
        return MetadataStore(self.folder, keeps=False)

    def find(self, name: str) -> bytes | None:
        """Return an unchecked copy, or None when it is not stored."""
        try:
            return (self.folder / name).read_bytes()
        except OSError:
            return None  # not stored: the source has it

    def read(self, name: str, digest: str) -> bytes | None:
        """Return a copy with exactly these contents, or None when it is not stored or damaged."""
        data = self.find(name)
        return data if data is not None and sha256(data).hexdigest() == digest else None

    def keep(self, name: str, data: bytes) -> None:
        """Write a copy unless it is stored already."""
        if not self._keeps or self.read(name, sha256(data).hexdigest()) is not None:
            return
        if not self.make_room(len(data)):
            _LOG.warning("The storage limit leaves no room for a copy of %s. It will be downloaded again.", name)
            return
        try:
            write_shared_file(self.folder / name, data)
        except StorageError as error:
            _LOG.warning("A copy of the data set's description was not kept: %s", error)


def _always(_needed_bytes: int) -> bool:
    return True
