"""Data sources: the `ShardSource` protocol, local folders, and a wrapper that counts and limits bytes."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit
from urllib.request import url2pathname

import anyio

from neuroshard.config.folders import expanded
from neuroshard.data.transfer import FileMissingError, FileUnchangedError, OpenedFile
from neuroshard.errors import DataError, DataUnavailableError, UsageError

_CHUNK_BYTES = 1024 * 1024


class ShardSource(Protocol):
    """A place that contains a Genesis folder. Names are relative, with forward slashes, and never come from outside."""

    @property
    def description(self) -> str:
        """The URL or folder, for people."""
        ...

    def open(
        self, name: str, offset: int = 0, validator: str | None = None, known: str | None = None
    ) -> AbstractAsyncContextManager[OpenedFile]:
        """Open a file, continuing at `offset` if its version still is `validator`.

        Raises FileUnchangedError when its version still is `known`, a validator of an earlier reading. Raises
        FileMissingError, SourceBusyError, FileDamagedError or DataUnavailableError, also while reading.
        """
        ...

    async def aclose(self) -> None:
        """Release connections."""
        ...


class FolderSource:
    """A Genesis folder on this computer."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def description(self) -> str:
        return str(self._folder)

    @asynccontextmanager
    async def open(
        self, name: str, offset: int = 0, validator: str | None = None, known: str | None = None
    ) -> AsyncGenerator[OpenedFile]:
        """Open a file of the folder; a file that changed starts over."""
        path = anyio.Path(self._folder / name)
        try:
            if not await path.is_file():  # a pipe would block, and a folder cannot be read
                raise FileMissingError(f"There is no file {path}.")
            state = await path.stat()
            current = f"{state.st_ino}-{state.st_mtime_ns}-{state.st_size}"
            if known == current:
                raise FileUnchangedError(f"{path} did not change.")
            start = offset if validator == current and offset <= state.st_size else 0
            async with await anyio.open_file(path, "rb") as file:
                await file.seek(start)
                yield OpenedFile(start, state.st_size, current, _Chunks(file))
        except OSError as error:
            raise DataUnavailableError(f"{path} cannot be read: {error.strerror or error}.") from error

    async def aclose(self) -> None:
        """A folder needs no cleanup."""


class NodesOnly:
    """No place of data: every file comes from the nodes of the run, which a Fetcher asks when this source fails."""

    description = "the nodes of the run"

    def open(
        self, name: str, offset: int = 0, validator: str | None = None, known: str | None = None
    ) -> AbstractAsyncContextManager[OpenedFile]:
        """Raises DataUnavailableError."""
        raise DataUnavailableError(f"No node of the run that is online has sent {name} yet.")

    async def aclose(self) -> None:
        """Nothing is open."""


def open_source(location: str) -> ShardSource:
    """Return the source for `https://`, `http://`, `file://` or a folder.

    Raises UsageError for an invalid location, DataError for a folder that does not exist.
    """
    parts = urlsplit(location)
    if parts.scheme in ("http", "https"):
        from neuroshard.data.http_source import HttpSource  # imported here: httpx takes a third of a second

        return HttpSource(location)
    if parts.scheme == "file":
        if parts.netloc not in ("", "localhost"):
            raise UsageError(f"{location} names another computer.", "Use file:///path/to/the/folder.")
        return _folder_source(Path(url2pathname(parts.path)))
    if "://" in location:
        raise UsageError(f"{location} is not a source of data.", "Use https://, http://, file:// or a folder.")
    return _folder_source(expanded(location))


def _folder_source(folder: Path) -> FolderSource:
    if not folder.is_dir():
        raise DataError(f"There is no Genesis folder {folder}.", "Check the path given with --genesis.")
    return FolderSource(folder.absolute())


class _Chunks:
    """The rest of an open file, in pieces."""

    def __init__(self, file: anyio.AsyncFile[bytes]) -> None:
        self._file = file

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        chunk = await self._file.read(_CHUNK_BYTES)
        if not chunk:
            raise StopAsyncIteration
        return chunk


class MeteredSource:
    """A ShardSource that counts and limits the bytes of another one. A stopped file resumes when allowed."""

    def __init__(self, source: ShardSource, obstacle: Callable[[], str], count: Callable[[int], None]) -> None:
        """`obstacle` returns why no download is allowed now, "" if allowed; `count` gets the bytes received."""
        self._source = source
        self._obstacle = obstacle
        self._count = count

    @property
    def description(self) -> str:
        return self._source.description

    @asynccontextmanager
    async def open(
        self, name: str, offset: int = 0, validator: str | None = None, known: str | None = None
    ) -> AsyncGenerator[OpenedFile]:
        self._check()
        async with self._source.open(name, offset, validator, known) as opened:
            yield replace(opened, chunks=_Metered(opened.chunks, self._check, self._count))

    async def aclose(self) -> None:
        await self._source.aclose()

    def _check(self) -> None:
        if reason := self._obstacle():
            raise DataUnavailableError(reason)


class _Metered(AsyncIterator[bytes]):
    """Pieces that are counted as they arrive."""

    def __init__(self, chunks: AsyncIterator[bytes], check: Callable[[], None], count: Callable[[int], None]) -> None:
        self._chunks = chunks
        self._check = check
        self._count = count

    async def __anext__(self) -> bytes:
        chunk = await anext(self._chunks)
        self._count(len(chunk))
        self._check()
        return chunk
