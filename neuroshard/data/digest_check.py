"""The digest check of a file: its SHA-256 is compared while the bytes arrive, and again when it is read from the disk.

No byte of a shard is used before its digest was compared. `Transfer` checks what arrives from a source, the exchange
room what arrives from a peer, and the shard cache what is on the disk."""

from __future__ import annotations

from hashlib import file_digest, sha256
from pathlib import Path

from neuroshard.errors import DataError


class DigestCheck:
    """The SHA-256 of bytes that arrive in order, and the comparison with the expected one at the end."""

    def __init__(self) -> None:
        self._hash = sha256()

    def add(self, data: bytes) -> None:
        """Include the next bytes."""
        self._hash.update(data)

    def matches(self, expected: str) -> bool:
        """Whether the bytes so far have this digest (hex)."""
        return self._hash.hexdigest() == expected


def file_sha256(path: Path) -> str:
    """SHA-256 of a file (hex). Raises OSError when it cannot be read."""
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()


def check_file(path: Path, expected: str) -> None:
    """Compare a file with its digest (hex). Raises DataError for another one, or OSError when it cannot be read."""
    if file_sha256(path) != expected:
        raise DataError(f"{path.name} is damaged.")
