"""Copies of what describes data sets: manifests, digest pages and tokenizer tables, named by their contents."""

from __future__ import annotations

import logging
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

from neuroshard.data.storage import write_atomically
from neuroshard.errors import StorageError

_LOG = logging.getLogger(__name__)

FOLDER = "descriptions"  # in the data cache of a node


def manifest_copy(root: str) -> str:
    """Where the manifest of this root is kept."""
    return f"manifest-{root}.json"


def page_copy(digest: str) -> str:
    """Where the page of this digest is kept."""
    return f"page-{digest}.bin"


def tokenizer_copy(digest: str) -> str:
    """Where the table of this digest is kept."""
    return f"tokenizer-{digest}.json"


class Descriptions:
    """The copies in one folder. They are a convenience: a full disk or a storage limit costs them, not the run.

    `make_room` is asked before so many bytes are kept; they are not when it says no. `keeps` False: nothing is written.
    """

    def __init__(self, folder: Path, *, keeps: bool = True) -> None:
        self.folder = folder
        self.make_room: Callable[[int], bool] = _always
        self._keeps = keeps

    def only_read(self) -> Descriptions:
        """The same folder, for what is looked at and not needed again."""
        return Descriptions(self.folder, keeps=False)

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
