"""Brings files from a source until they are complete and right: resume, back-off, size and digest checks, progress."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import BinaryIO, Protocol, TypeVar

import anyio
import anyio.to_thread

from neuroshard.data.opened_file import OpenedFile
from neuroshard.data.other_givers import OtherGivers, SourceChoice
from neuroshard.data.retry import (
    DEFAULT_RETRY_POLICY,
    FileDamagedError,
    FileMissingError,
    RetryPolicy,
    SourceBusyError,
    retry_delay,
)
from neuroshard.data.source import ShardSource
from neuroshard.data.storage import storage_error
from neuroshard.errors import DataError, DataUnavailableError, StorageError
from neuroshard.status.data import DownloadStatus

_LOG = logging.getLogger(__name__)
_T = TypeVar("_T")
_ORIGINS_KEPT = 64  # whoever fetched a file asks at once


@dataclass(frozen=True)
class FileRequest:
    """A file and what is known about it before it comes."""

    name: str
    least_bytes: int
    most_bytes: int
    digest: str | None = None  # SHA-256, hex
    give_up_after: int | None = None  # refusals (missing or damaged); an unreachable source is always asked again
    address: str = ""  # names the exact contents to others that may have them, see OtherGivers; "": only the source has


class Sink(Protocol):
    """Where the bytes of a transfer go."""

    def write(self, data: bytes) -> None:
        """Append."""
        ...

    def restart(self) -> None:
        """Forget everything written."""
        ...


class MemorySink:
    """Collects a small file."""

    def __init__(self) -> None:
        self.data = bytearray()

    def write(self, data: bytes) -> None:
        """Append."""
        self.data += data

    def restart(self) -> None:
        """Forget everything written."""
        self.data.clear()


class FileSink:
    """Collects a large file on disk. Raises DiskFullError or StorageError."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path = path
        self._file = file

    def write(self, data: bytes) -> None:
        """Append; a raw write may take a part only."""
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            raise storage_error(self._path, error) from error

    def restart(self) -> None:
        """Forget everything written."""
        try:
            self._file.seek(0)
            self._file.truncate()
        except OSError as error:
            raise storage_error(self._path, error) from error


class Transfer:
    """The state of one file on its way: it survives broken attempts."""

    def __init__(self, request: FileRequest, sink: Sink) -> None:
        self.request = request
        self.size = 0
        self.farthest = 0  # the largest size ever reached: only what lies beyond it is progress
        self.total: int | None = None
        self.validator: str | None = None
        self._sink = sink
        self._hash = hashlib.sha256()

    def begin(self, offset: int, total: int | None, validator: str | None) -> None:
        """A source starts to deliver from `offset`. Raises FileDamagedError when its claims cannot be true."""
        request = self.request
        if total is not None and not request.least_bytes <= total <= request.most_bytes:
            raise FileDamagedError(
                f"{request.name} would have {total} bytes, expected {request.least_bytes} to {request.most_bytes}."
            )
        other_total = self.total is not None and total != self.total
        has_changed = offset > 0 and (offset != self.size or validator != self.validator or other_total)
        if offset == 0 or has_changed:
            self.restart()
        if has_changed:
            raise FileDamagedError(f"{request.name} changed at its source while it was being fetched.")
        self.total, self.validator = total, validator

    def add(self, data: bytes) -> None:
        """Take the next bytes. Raises FileDamagedError when more come than were announced or allowed."""
        limit = self.request.most_bytes if self.total is None else self.total
        if self.size + len(data) > limit:
            raise FileDamagedError(f"{self.request.name} is longer than the {limit} bytes announced for it.")
        self._sink.write(data)
        self._hash.update(data)
        self.size += len(data)

    def end(self) -> None:
        """The source says that is all. Raises DataUnavailableError or FileDamagedError when it is not."""
        name = self.request.name
        if self.total is not None and self.size < self.total:
            raise DataUnavailableError(f"{name} broke off after {self.size} of {self.total} bytes.")
        if self.size < self.request.least_bytes:
            raise FileDamagedError(f"{name} has {self.size} bytes, expected at least {self.request.least_bytes}.")
        if self.request.digest is not None and self._hash.hexdigest() != self.request.digest:
            raise FileDamagedError(f"{name} does not match its digest: it is damaged or was replaced.")

    def restart(self) -> None:
        """Begin again with nothing."""
        self._sink.restart()
        self._hash = hashlib.sha256()
        self.size = 0
        self.total = self.validator = None


class Fetcher:
    """Fetches from one source; its attempts, errors and waiting times are visible in `active()`.

    `others` are asked for files with an address while the source fails. `rng` spreads the retries; `wall_clock`
    (seconds since the epoch) is for display only: waiting uses the event loop's monotonic clock, so a clock that jumps
    neither shortens nor prolongs it.
    """

    def __init__(
        self,
        source: ShardSource,
        *,
        others: OtherGivers | None = None,
        rng: Random | None = None,
        policy: RetryPolicy = DEFAULT_RETRY_POLICY,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.source = source
        self.refused_files = 0  # damaged or wrong files that were thrown away
        self.files_from_others = 0
        self._others = others
        self._choice = SourceChoice()
        self._rng = rng if rng is not None else Random()  # noqa: S311 - jitter, not a secret
        self._policy = policy
        self._wall_clock = wall_clock
        self._active: dict[str, DownloadStatus] = {}
        self._given_by_others: dict[str, bool] = {}  # the newest files last

    def active(self) -> tuple[DownloadStatus, ...]:
        """Files on their way, oldest first; `retry_at` is set while one waits."""
        return tuple(self._active.values())

    def is_from_others(self, name: str) -> bool:
        """Whether others gave a file that was fetched lately, because the source failed."""
        return self._given_by_others.get(name, False)

    async def fetch_bytes(self, request: FileRequest, check: Callable[[bytes], _T]) -> _T:
        """Fetch a small file into memory; the answer is that of `check`, which raises DataError to refuse it."""
        sink = MemorySink()

        async def accept() -> _T:
            return check(bytes(sink.data))

        return await self._fetch(Transfer(request, sink), accept)

    async def fetch_file(self, request: FileRequest, path: Path, check: Callable[[Path], _T]) -> _T:
        """Fetch into a temporary file at `path`, run `check` on it in a worker thread, and remove it.

        Raises what `fetch_bytes` does, and DiskFullError or StorageError when the file cannot be written.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = path.open("w+b", buffering=0)
        except OSError as error:
            raise storage_error(path, error) from error

        async def accept() -> _T:
            return await anyio.to_thread.run_sync(check, path)

        try:
            with file:
                return await self._fetch(Transfer(request, FileSink(path, file)), accept)
        finally:
            path.unlink(missing_ok=True)

    async def wait(self, name: str, error: DataError | StorageError, failures: int) -> None:
        """Show a failure and wait before the next attempt."""
        asked = error.retry_after_seconds if isinstance(error, SourceBusyError) else None
        delay = retry_delay(self._policy, failures, self._rng, asked or 0.0)
        shown = self._active.get(name) or DownloadStatus(name, 0, None, 0.0, failures)
        self._active[name] = replace(
            shown, attempt=max(1, failures), error=str(error), retry_at=self._wall_clock() + delay, bytes_per_second=0.0
        )
        if failures == 1 or failures % 10 == 0:
            _LOG.warning("%s: %s Trying again in %.1f s.", name, error, delay)
        await anyio.sleep(delay)

    def finished(self, name: str) -> None:
        """Take a file off the list."""
        self._active.pop(name, None)

    async def _fetch(self, transfer: Transfer, accept: Callable[[], Awaitable[_T]]) -> _T:
        request = transfer.request
        failures = refusals = 0
        asked_others: bool | None = None
        shown: DataError | None = None
        try:
            while True:
                asked_others = self._asks_others(request, asked_others)
                failure: DataError
                try:
                    await self._attempt(transfer, failures + 1, from_others=asked_others)
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
                refusals += is_refusal and not asked_others  # what others do says nothing about the data set
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
                        asked_others = None  # the rest of it comes by Range
                    elif self._asks_others(request, asked_others):
                        continue
                await self.wait(request.name, failure, failures)
        finally:
            self.finished(request.name)

    def _asks_others(self, request: FileRequest, asked_others: bool | None) -> bool:
        """Whether the next attempt goes to the others."""
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

    async def _attempt(self, transfer: Transfer, attempt: int, *, from_others: bool) -> None:
        """One try to get the rest of a file. Every `progress_bytes` must come within `stall_seconds`."""
        name = transfer.request.name
        stall = self._policy.stall_seconds
        began = anyio.current_time()
        offset_then = gained_then = transfer.size
        self._show(transfer, attempt, 0.0)
        with anyio.move_on_after(stall) as scope:
            async with self._open(transfer, from_others=from_others) as opened:
                transfer.begin(opened.offset, opened.total_bytes, opened.validator)
                offset_then = gained_then = transfer.size
                async for chunk in opened.chunks:
                    transfer.add(chunk)
                    now = anyio.current_time()
                    if transfer.size - gained_then >= self._policy.progress_bytes:
                        gained_then = transfer.size
                        scope.deadline = now + stall
                        self._show(transfer, attempt, (transfer.size - offset_then) / max(now - began, 1e-3))
            transfer.end()
            return
        raise DataUnavailableError(f"{name} came slower than {self._policy.progress_bytes} bytes in {stall:g} s.")

    def _show(self, transfer: Transfer, attempt: int, bytes_per_second: float) -> None:
        name = transfer.request.name
        shown = self._active.get(name)
        self._active[name] = DownloadStatus(
            name, transfer.size, transfer.total, bytes_per_second, attempt, shown.error if shown else None
        )
