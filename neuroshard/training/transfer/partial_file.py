"""A tensor file that arrives chunk by chunk. What it holds is found by digests, so it survives a kill at any moment."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Generator, Iterator, Sequence
from hashlib import sha256
from pathlib import Path

from neuroshard.config.atomic_write import is_disk_full
from neuroshard.errors import DiskFullError, StorageError
from neuroshard.training.transfer.manifest import chunk_digest, chunk_range

_READ_BYTES = 4 << 20


class PartialFile:
    """Belongs to whoever fills it; every call blocks and is for a worker thread. Raises StorageError, DiskFullError."""

    def __init__(self, path: Path, file_bytes: int) -> None:
        self.path = path
        self.file_bytes = file_bytes

    def open(self) -> None:
        """Make the file, or keep what an earlier start left of one with this length."""
        with self._trouble():
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self.path.exists() and self.path.stat().st_size != self.file_bytes:
                self.path.unlink()
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
            with os.fdopen(descriptor, "r+b") as file:
                file.truncate(self.file_bytes)  # sparse: the space is taken as the chunks come

    def held(self, digests: Sequence[bytes]) -> set[int]:
        """The chunks that are in it already."""
        return {index for index, _ in _matching(self.path, digests, self.file_bytes)}

    def take_from(self, other: Path, digests: Sequence[bytes], wanted: Collection[int]) -> set[int]:
        """Copy chunks from another file of the same layout, where they are the same there; which ones."""
        if not other.exists() or other.stat().st_size != self.file_bytes:
            return set()
        taken = set[int]()
        for index, data in _matching(other, digests, self.file_bytes, wanted):
            self.write(index, data)
            taken.add(index)
        return taken

    def write(self, index: int, data: bytes | memoryview) -> None:
        """Put a chunk in its place."""
        with self._trouble(), self.path.open("r+b") as file:
            file.seek(chunk_range(index, self.file_bytes).start)
            file.write(data)

    def finish(self) -> str:
        """Make it durable; the hex SHA-256 of the whole file."""
        digest = sha256()
        with self._trouble(), self.path.open("r+b") as file:
            while piece := file.read(_READ_BYTES):
                digest.update(piece)
            os.fsync(file.fileno())
        return digest.hexdigest()

    def remove(self) -> None:
        """Forget it."""
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _trouble(self) -> Generator[None]:
        try:
            yield
        except OSError as error:
            if is_disk_full(error):
                need = self.file_bytes / 1e6
                raise DiskFullError(f"The disk of {self.path.parent} is full: {need:.0f} MB arrive.") from error
            raise StorageError(f"{self.path} cannot be written: {error.strerror or error}.") from error


def _matching(
    path: Path, digests: Sequence[bytes], file_bytes: int, wanted: Collection[int] | None = None
) -> Iterator[tuple[int, bytes]]:
    """The chunks of a file that have these digests. A file that cannot be read has none."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        for index in range(len(digests)) if wanted is None else sorted(wanted):
            place = chunk_range(index, file_bytes)
            file.seek(place.start)
            data = file.read(len(place))
            if chunk_digest(data) == digests[index]:
                yield index, data
