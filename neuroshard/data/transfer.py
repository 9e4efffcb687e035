"""The transfer of one file: request, size and digest checks on arriving bytes, failures, and retry delays."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import AsyncIterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from random import Random
from typing import Protocol, Self

import anyio.to_thread

from neuroshard.errors import DataError, DataUnavailableError


@dataclass(frozen=True)
class OpenedFile:
    """Bytes from `offset` on: the offset asked for, or 0 when the source starts over."""

    offset: int
    total_bytes: int | None  # of the whole file, as the source claims it
    validator: str | None  # names this version of the file; without it a transfer cannot be continued
    chunks: AsyncIterator[bytes]


class FileMissingError(DataUnavailableError):
    """The source answers, but does not have this file."""


class FileUnchangedError(DataError):
    """The file still is the one that was known already: nothing to fetch."""


class FileDamagedError(DataError):
    """The source gave something that is not the file it should be."""


class SourceBusyError(DataUnavailableError):
    """The source asks for patience."""

    def __init__(self, message: str, retry_after_seconds: float | None) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


@dataclass(frozen=True)
class RetryPolicy:
    """Times of the data client, in seconds unless the name says otherwise."""

    first_seconds: float = 0.5
    longest_seconds: float = 60.0
    stall_seconds: float = 30.0  # an attempt must gain `progress_bytes` in this time
    progress_bytes: int = 16 * 1024


DEFAULT_RETRY_POLICY = RetryPolicy()


def retry_delay(policy: RetryPolicy, failures: int, rng: Random, at_least: float = 0.0) -> float:
    """Seconds to wait after `failures` failures in a row without progress; 0 means that the last attempt gained bytes.

    Half of min(longest, first * 2**(failures - 1)) plus a random share of the other half, so that nodes which lost the
    source together do not return together; never shorter than what the source asked for, within the longest.
    """
    exponent = min(failures - 1, 30)
    bound = min(policy.longest_seconds, policy.first_seconds * 2**exponent) if failures else policy.first_seconds / 8
    return max(bound * (0.5 + 0.5 * rng.random()), min(at_least, policy.longest_seconds))


_BLOCK_BYTES = 1 << 20
_BLOCKS_UNDER_WAY = 2


@dataclass(frozen=True)
class FileRequest:
    """A file and what is known about it before it comes."""

    name: str
    least_bytes: int
    most_bytes: int
    digest: str | None = None  # SHA-256, hex
    give_up_after: int | None = None  # refusals (missing or damaged); an unreachable source is always asked again
    address: str = (
        ""  # names the exact contents to others that may have them, see AlternativeSource; "": only the source has
    )


class Sink(Protocol):
    """Where the bytes of a transfer go. Raises DiskFullError or StorageError when it is on a disk."""

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
        self.announce(len(data))
        self.write(data)
        self.hash(data)

    def announce(self, byte_count: int) -> None:
        """So many bytes are here, and will be written and hashed. Raises FileDamagedError as `add`."""
        limit = self.request.most_bytes if self.total is None else self.total
        if self.size + byte_count > limit:
            raise FileDamagedError(f"{self.request.name} is longer than the {limit} bytes announced for it.")
        self.size += byte_count

    def write(self, data: bytes) -> None:
        """Give announced bytes to the sink."""
        self._sink.write(data)

    def hash(self, data: bytes) -> None:
        """Take announced bytes into the digest."""
        self._hash.update(data)

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


class TransferThreads:
    """Two threads, in which the blocks of a large transfer are hashed and written while more of it comes."""

    def __init__(self) -> None:
        self._hashing = ThreadPoolExecutor(1, "shard-hash")
        self._writing = ThreadPoolExecutor(1, "shard-write")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._hashing.shutdown()
        self._writing.shutdown()

    def begin(self, transfer: Transfer, block: bytes) -> tuple[Future[None], Future[None]]:
        """Blocks are taken in their order."""
        return self._hashing.submit(transfer.hash, block), self._writing.submit(transfer.write, block)


class ChunkWriter:
    """Takes the chunks of one attempt.

    All that was taken is written and hashed when the context ends, however it ends: a later attempt goes on from there.
    """

    def __init__(self, transfer: Transfer, threads: TransferThreads | None = None) -> None:
        self.transfer = transfer
        self._threads = threads
        self._chunks: list[bytes] = []
        self._collected = 0  # bytes of these
        self._under_way: deque[Future[None]] = deque()  # two for each block

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._settle()

    async def add(self, chunk: bytes) -> None:
        """Take the next bytes. Raises FileDamagedError when more come than were announced or allowed."""
        if self._threads is None:
            self.transfer.add(chunk)
            return
        self.transfer.announce(len(chunk))
        self._chunks.append(chunk)
        self._collected += len(chunk)
        if self._collected >= _BLOCK_BYTES:
            await self._wait(2 * (_BLOCKS_UNDER_WAY - 1))
            self._under_way.extend(self._threads.begin(self.transfer, self._taken()))

    async def end(self) -> None:
        """The source says that is all. Raises DataUnavailableError or FileDamagedError when it is not."""
        if self._threads is not None and self._under_way:
            self._under_way.extend(self._threads.begin(self.transfer, self._taken()))
            await self._wait(0)
        self._settle()
        self.transfer.end()

    async def _wait(self, most: int) -> None:
        """Until no more than so many halves of blocks are under way."""
        while len(self._under_way) > most:
            future = self._under_way[0]
            if not future.done():
                await anyio.to_thread.run_sync(wait, [future])
            self._under_way.popleft().result()

    def _settle(self) -> None:
        """Wait for what is under way, and do what is left here: some milliseconds of work."""
        wait(self._under_way)
        while self._under_way:
            self._under_way.popleft().result()
        block = self._taken()
        self.transfer.write(block)
        self.transfer.hash(block)

    def _taken(self) -> bytes:
        block = b"".join(self._chunks)
        self._chunks.clear()
        self._collected = 0
        return block
