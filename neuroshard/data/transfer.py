"""The transfer of one file: request, size and digest checks on arriving bytes, failures, and retry delays."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from random import Random
from typing import Protocol, Self

import anyio.to_thread

from neuroshard.data.digest_check import DigestCheck
from neuroshard.errors import DataError, DataUnavailableError


@dataclass(frozen=True)
class OpenedFile:
    """The bytes of a file from `offset` on: the requested offset, or 0 when the source starts over."""

    offset: int
    total_bytes: int | None  # of the whole file, according to the source
    validator: str | None  # names this version of the file; without it a transfer cannot resume
    chunks: AsyncIterator[bytes]


class FileMissingError(DataUnavailableError):
    """The source answers, but does not have this file."""


class FileUnchangedError(DataError):
    """The file still has the known version, so there is nothing to download."""


class FileDamagedError(DataError):
    """The source sent something that is not the expected file."""


class SourceBusyError(DataUnavailableError):
    """The source asks the client to wait."""

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
    """Return the seconds to wait after `failures` attempts in a row without progress; 0: the last one gained bytes.

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
    """A requested file and the facts about it that are known in advance."""

    name: str
    least_bytes: int
    most_bytes: int
    digest: str | None = None  # SHA-256, hex
    give_up_after: int | None = None  # refusals (missing or damaged); an unreachable source is always asked again
    address: str = (
        ""  # names the exact contents to others that may have them, see AlternativeSource; "": only the source has
    )


class Sink(Protocol):
    """Destination for the bytes of a transfer. Raises DiskFullError or StorageError when it is on a disk."""

    def write(self, data: bytes) -> None: ...

    def restart(self) -> None:
        """Discard everything written."""
        ...


class MemorySink:
    """Collects a small file."""

    def __init__(self) -> None:
        self.data = bytearray()

    def write(self, data: bytes) -> None:
        self.data += data

    def restart(self) -> None:
        self.data.clear()


class Transfer:
    """The state of one file's transfer, which survives broken attempts."""

    def __init__(self, request: FileRequest, sink: Sink) -> None:
        self.request = request
        self.size = 0
        self.farthest = 0  # the largest size reached so far: only bytes beyond it are progress
        self.total: int | None = None
        self.validator: str | None = None
        self._sink = sink
        self._digest = DigestCheck()

    def begin(self, offset: int, total: int | None, validator: str | None) -> None:
        """Start to receive from `offset`. Raises FileDamagedError when the source's claims cannot be true."""
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
        """Count bytes that will be written and hashed later. Raises FileDamagedError under the conditions of `add`."""
        limit = self.request.most_bytes if self.total is None else self.total
        if self.size + byte_count > limit:
            raise FileDamagedError(f"{self.request.name} is longer than the {limit} bytes announced for it.")
        self.size += byte_count

    def write(self, data: bytes) -> None:
        """Write announced bytes to the sink."""
        self._sink.write(data)

    def hash(self, data: bytes) -> None:
        """Add announced bytes to the digest."""
        self._digest.add(data)

    def end(self) -> None:
        """Check the end of the file. Raises DataUnavailableError if it is short, FileDamagedError if it is wrong."""
        name = self.request.name
        if self.total is not None and self.size < self.total:
            raise DataUnavailableError(f"The download of {name} stopped after {self.size} of {self.total} bytes.")
        if self.size < self.request.least_bytes:
            raise FileDamagedError(f"{name} has {self.size} bytes, expected at least {self.request.least_bytes}.")
        if self.request.digest is not None and not self._digest.matches(self.request.digest):
            raise FileDamagedError(f"{name} does not match its digest: it is damaged or was replaced.")

    def restart(self) -> None:
        """Discard all bytes and begin again."""
        self._sink.restart()
        self._digest = DigestCheck()
        self.size = 0
        self.total = self.validator = None


class TransferThreads:
    """Two threads that hash and write the blocks of a large transfer while more of it arrives."""

    def __init__(self) -> None:
        self._hashing = ThreadPoolExecutor(1, "shard-hash")
        self._writing = ThreadPoolExecutor(1, "shard-write")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._hashing.shutdown()
        self._writing.shutdown()

    def begin(self, transfer: Transfer, block: bytes) -> tuple[Future[None], Future[None]]:
        """Start to write and hash a block; each thread processes blocks in order."""
        return self._hashing.submit(transfer.hash, block), self._writing.submit(transfer.write, block)


class ChunkWriter:
    """Takes the chunks of one attempt.

    When the context ends, for whatever reason, all chunks have been written and hashed: a later attempt resumes from
    there.
    """

    def __init__(self, transfer: Transfer, threads: TransferThreads | None = None) -> None:
        self.transfer = transfer
        self._threads = threads
        self._chunks: list[bytes] = []
        self._collected = 0  # total size of `_chunks`
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
        """Finish the file. Raises DataUnavailableError or FileDamagedError when it is not complete and correct."""
        if self._threads is not None and self._under_way:
            self._under_way.extend(self._threads.begin(self.transfer, self._taken()))
            await self._wait(0)
        self._settle()
        self.transfer.end()

    async def _wait(self, most: int) -> None:
        """Wait until at most `most` operations (two per block) are pending."""
        while len(self._under_way) > most:
            future = self._under_way[0]
            if not future.done():
                await anyio.to_thread.run_sync(wait, [future])
            self._under_way.popleft().result()

    def _settle(self) -> None:
        """Wait for pending blocks, then write and hash the rest here: a few milliseconds of work."""
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
