"""A source whose bytes are counted, and which stops when the owner lets nothing large pass any more."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

from neuroshard.data.opened_file import OpenedFile
from neuroshard.data.source import ShardSource
from neuroshard.errors import DataUnavailableError


class MeteredSource:
    """Like the source within; see ShardSource. A file that was stopped is continued when it may be."""

    def __init__(self, source: ShardSource, obstacle: Callable[[], str], count: Callable[[int], None]) -> None:
        """`obstacle` says why nothing may be fetched now, "" while it may; `count` is told every byte."""
        self._source = source
        self._obstacle = obstacle
        self._count = count

    @property
    def description(self) -> str:
        """Of the source within."""
        return self._source.description

    @asynccontextmanager
    async def open(
        self, name: str, offset: int = 0, validator: str | None = None, known: str | None = None
    ) -> AsyncGenerator[OpenedFile]:
        """See ShardSource."""
        self._check()
        async with self._source.open(name, offset, validator, known) as opened:
            yield replace(opened, chunks=_Metered(opened.chunks, self._check, self._count))

    async def aclose(self) -> None:
        """See ShardSource."""
        await self._source.aclose()

    def _check(self) -> None:
        if reason := self._obstacle():
            raise DataUnavailableError(reason)


class _Metered(AsyncIterator[bytes]):
    """Pieces that are counted as they come."""

    def __init__(self, chunks: AsyncIterator[bytes], check: Callable[[], None], count: Callable[[int], None]) -> None:
        self._chunks = chunks
        self._check = check
        self._count = count

    async def __anext__(self) -> bytes:
        chunk = await anext(self._chunks)
        self._count(len(chunk))
        self._check()
        return chunk
