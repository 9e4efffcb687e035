"""Reads a published data set over HTTP, one file at a time, with the data client of a node."""

from __future__ import annotations

from contextlib import ExitStack
from hashlib import sha256
from random import SystemRandom

import anyio
from anyio.from_thread import start_blocking_portal

from neuroshard.data.http_source import HttpSource
from neuroshard.data.transfer import FileMissingError, FileRequest, MemorySink, RetryPolicy, Transfer, retry_delay
from neuroshard.dataset.object_store import StoredObject, Version
from neuroshard.errors import DataUnavailableError

_ATTEMPTS = 5  # without progress
_POLICY = RetryPolicy(longest_seconds=10.0)


class HttpReader:
    """An ObjectReader that resumes broken transfers. Versions are the SHA-256 of the content."""

    def __init__(self, url: str, *, policy: RetryPolicy = _POLICY) -> None:
        """Raises UsageError for an invalid URL. The reader has a thread until it is closed."""
        self._source = HttpSource(url)
        self._policy = policy
        self._rng = SystemRandom()
        self._stack = ExitStack()
        self._portal = self._stack.enter_context(start_blocking_portal("trio"))

    @property
    def description(self) -> str:
        return self._source.description

    def read(self, name: str, max_bytes: int) -> StoredObject | None:
        return self._portal.call(self._read, name, max_bytes)

    def close(self) -> None:
        """Close the connections and the thread; a second call does nothing."""
        with self._stack:
            self._portal.call(self._source.aclose)

    async def _read(self, name: str, max_bytes: int) -> StoredObject | None:
        sink = MemorySink()
        transfer = Transfer(FileRequest(name, 0, max_bytes), sink)
        failures = 0
        while True:
            size = transfer.size
            try:
                await self._attempt(transfer)
            except FileMissingError:
                return None
            except DataUnavailableError as error:
                failures = failures + 1 if transfer.size <= size else 0
                if failures == _ATTEMPTS:
                    action = error.action or "Check the address and the internet connection, or try again later."
                    raise DataUnavailableError(error.message, action) from error
                await anyio.sleep(retry_delay(self._policy, failures, self._rng))
            else:
                content = bytes(sink.data)
                return StoredObject(content, Version(sha256(content).hexdigest()))

    async def _attempt(self, transfer: Transfer) -> None:
        async with self._source.open(transfer.request.name, transfer.size, transfer.validator) as opened:
            transfer.begin(opened.offset, opened.total_bytes, opened.validator)
            async for chunk in opened.chunks:
                transfer.add(chunk)
        transfer.end()
