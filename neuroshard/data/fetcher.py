"""Downloads files from a source, or from peers while the source fails: resume, back-off, checks, progress."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from random import Random, SystemRandom
from typing import Protocol, TypeVar

import anyio
import anyio.to_thread

from neuroshard.data.source import ShardSource
from neuroshard.data.transfer import (
    DEFAULT_RETRY_POLICY,
    ChunkWriter,
    FileMissingError,
    FileRequest,
    MemorySink,
    OpenedFile,
    RetryPolicy,
    Sink,
    SourceBusyError,
    Transfer,
    TransferThreads,
    retry_delay,
)
from neuroshard.errors import DataError, DataUnavailableError, StorageError
from neuroshard.status.data import DownloadStatus

REST_SECONDS = 30.0  # an unreachable source is not asked first for this time


class AlternativeSource(Protocol):
    """Peers that may have a file, whose `address` names its exact contents by a digest known in advance.

    Nothing that they send is trusted: a peer that sends other bytes is detected and avoided.
    """

    def may_have(self, name: str, address: str) -> bool:
        """Return whether a request makes sense now."""
        ...

    def open(self, name: str, address: str) -> AbstractAsyncContextManager[OpenedFile]:
        """Begin to read a file from its start.

        Raises DataUnavailableError when no peer sends it, FileDamagedError when the bytes are not those of the file.
        """
        ...


class SourceChoice:
    """Selects the next place to ask: the source first, peers when the source fails, then the source again."""

    def __init__(self, rest_seconds: float = REST_SECONDS) -> None:
        self._rest_seconds = rest_seconds
        self._down_until = float("-inf")

    def note_source(self, now: float, *, is_down: bool) -> None:
        """Record the result of the last attempt at the source; `now` in seconds of the event loop's clock."""
        self._down_until = now + self._rest_seconds if is_down else float("-inf")

    def asks_others(self, now: float, *, asked_others: bool | None) -> bool:
        """Return whether the next attempt goes to peers; `asked_others` is whether the last one for this file did."""
        return now < self._down_until if asked_others is None else not asked_others


_LOG = logging.getLogger(__name__)
_T = TypeVar("_T")
_ORIGINS_KEPT = 64  # callers ask right after their download


class Fetcher:
    """Downloads from one source; attempts, errors and waiting times are visible in `active()`.

    `others` are asked for files with an address while the source fails. `rng` spreads the retries; `wall_clock`
    (seconds since the epoch) is for display only: waiting uses the event loop's monotonic clock, so a clock that jumps
    neither shortens nor prolongs it.
    """

    def __init__(
        self,
        source: ShardSource,
        *,
        others: AlternativeSource | None = None,
        rng: Random | None = None,
        policy: RetryPolicy = DEFAULT_RETRY_POLICY,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.source = source
        self.refused_files = 0  # damaged or wrong files that were discarded
        self.files_from_others = 0
        self._others = others
        self._choice = SourceChoice()
        self._rng = rng if rng is not None else SystemRandom()
        self._policy = policy
        self._wall_clock = wall_clock
        self._active: dict[str, DownloadStatus] = {}
        self._given_by_others: dict[str, bool] = {}  # insertion order: the newest files last

    def active(self) -> tuple[DownloadStatus, ...]:
        """Return the files being downloaded, oldest first; `retry_at` is set while one waits."""
        return tuple(self._active.values())

    def is_from_others(self, name: str) -> bool:
        """Return whether peers sent this recently downloaded file because the source failed."""
        return self._given_by_others.get(name, False)

    async def fetch_bytes(self, request: FileRequest, check: Callable[[bytes], _T]) -> _T:
        """Download a small file into memory and return the result of `check`, which raises DataError to refuse it."""
        sink = MemorySink()

        async def accept() -> _T:
            return check(bytes(sink.data))

        return await self._fetch(Transfer(request, sink), accept)

    async def fetch_into(self, request: FileRequest, sink: Sink, finish: Callable[[], _T]) -> _T:
        """Download a large file into a sink and return the result of `finish`, which runs in a worker thread.

        `finish` runs only after the bytes matched the digest of the request. It raises DataError to refuse them.
        """

        async def accept() -> _T:
            return await anyio.to_thread.run_sync(finish)

        with TransferThreads() as threads:
            return await self._fetch(Transfer(request, sink), accept, threads)

    async def wait(self, name: str, error: DataError | StorageError, failures: int) -> None:
        """Show a failure and wait before the next attempt."""
        asked = error.retry_after_seconds if isinstance(error, SourceBusyError) else None
        delay = retry_delay(self._policy, failures, self._rng, asked or 0.0)
        shown = self._active.get(name) or DownloadStatus(name, 0, None, 0.0, failures)
        self._active[name] = replace(
            shown, attempt=max(1, failures), error=str(error), retry_at=self._wall_clock() + delay, bytes_per_second=0.0
        )
        if failures == 1 or failures % 10 == 0:
            _LOG.warning("%s: %s Retrying in %.1f s.", name, error, delay)
        await anyio.sleep(delay)

    def finished(self, name: str) -> None:
        """Remove a file from the list of active downloads."""
        self._active.pop(name, None)

    async def _fetch(
        self, transfer: Transfer, accept: Callable[[], Awaitable[_T]], threads: TransferThreads | None = None
    ) -> _T:
        request = transfer.request
        failures = refusals = 0
        asked_others: bool | None = None
        shown: DataError | None = None
        try:
            while True:
                asked_others = self._asks_others(request, asked_others)
                failure: DataError
                try:
                    await self._attempt(ChunkWriter(transfer, threads), failures + 1, from_others=asked_others)
                    value = await accept()
                except DataUnavailableError as error:
                    failure = error
                except DataError as error:
                    transfer.restart()
                    self.refused_files += 1
                    failure = error
                else:
                    self._note_success(request.name, from_others=asked_others)
                    return value
                is_refusal = not isinstance(failure, DataUnavailableError) or isinstance(failure, FileMissingError)
                refusals += is_refusal and not asked_others  # a peer's failure says nothing about the data set
                if request.give_up_after is not None and refusals >= request.give_up_after:
                    raise failure
                gained = transfer.size - transfer.farthest
                transfer.farthest = max(transfer.farthest, transfer.size)
                has_gained = gained >= self._policy.progress_bytes
                failures = 0 if has_gained else failures + 1
                if asked_others:
                    failure = shown or failure
                else:
                    shown = failure
                    self._choice.note_source(anyio.current_time(), is_down=not is_refusal and not has_gained)
                    if has_gained:
                        asked_others = None  # resume the rest by Range
                    elif self._asks_others(request, asked_others):
                        continue
                await self.wait(request.name, failure, failures)
        finally:
            self.finished(request.name)

    def _asks_others(self, request: FileRequest, asked_others: bool | None) -> bool:
        if self._others is None or not request.address or not self._others.may_have(request.name, request.address):
            return False
        return self._choice.asks_others(anyio.current_time(), asked_others=asked_others)

    def _note_success(self, name: str, *, from_others: bool) -> None:
        self._given_by_others.pop(name, None)
        self._given_by_others[name] = from_others
        if len(self._given_by_others) > _ORIGINS_KEPT:
            self._given_by_others.pop(next(iter(self._given_by_others)))
        if from_others:
            self.files_from_others += 1
        else:
            self._choice.note_source(anyio.current_time(), is_down=False)

    def _open(self, transfer: Transfer, *, from_others: bool) -> AbstractAsyncContextManager[OpenedFile]:
        request = transfer.request
        if not from_others or self._others is None:
            return self.source.open(request.name, transfer.size, transfer.validator)
        transfer.restart()
        return self._others.open(request.name, request.address)

    async def _attempt(self, intake: ChunkWriter, attempt: int, *, from_others: bool) -> None:
        """Try once to get the rest of a file. Every `progress_bytes` must arrive within `stall_seconds`."""
        transfer = intake.transfer
        name = transfer.request.name
        stall = self._policy.stall_seconds
        began = anyio.current_time()
        offset_then = gained_then = transfer.size
        self._show(transfer, attempt, 0.0)
        with anyio.move_on_after(stall) as scope, intake:
            async with self._open(transfer, from_others=from_others) as opened:
                transfer.begin(opened.offset, opened.total_bytes, opened.validator)
                offset_then = gained_then = transfer.size
                async for chunk in opened.chunks:
                    await intake.add(chunk)
                    now = anyio.current_time()
                    if transfer.size - gained_then >= self._policy.progress_bytes:
                        gained_then = transfer.size
                        scope.deadline = now + stall
                        self._show(transfer, attempt, (transfer.size - offset_then) / max(now - began, 1e-3))
            await intake.end()
            return
        raise DataUnavailableError(
            f"{name} arrives too slowly: fewer than {self._policy.progress_bytes} bytes in {stall:g} s."
        )

    def _show(self, transfer: Transfer, attempt: int, bytes_per_second: float) -> None:
        name = transfer.request.name
        shown = self._active.get(name)
        self._active[name] = DownloadStatus(
            name, transfer.size, transfer.total, bytes_per_second, attempt, shown.error if shown else None
        )
