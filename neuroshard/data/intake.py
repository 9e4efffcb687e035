"""One file on its way: what is asked for, where its bytes go, and checking them while they come."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass
from typing import Protocol, Self

import anyio.to_thread

from neuroshard.data.retry import FileDamagedError
from neuroshard.errors import DataUnavailableError

_BLOCK_BYTES = 1 << 20


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


class Intake:
    """Takes the chunks of one attempt. With threads, a block is hashed and written in two of them while the next comes.

    All that was taken is written and hashed when the context ends, however it ends: a later attempt goes on from there.
    """

    def __init__(self, transfer: Transfer, threads: Executor | None = None) -> None:
        self.transfer = transfer
        self._threads = threads
        self._chunks: list[bytes] = []
        self._collected = 0  # bytes of these
        self._under_way: Sequence[Future[None]] = ()

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
            await self._begin_block(self._threads)

    async def end(self) -> None:
        """The source says that is all. Raises DataUnavailableError or FileDamagedError when it is not."""
        if self._threads is not None and self._under_way:
            await self._begin_block(self._threads)
            await self._block_done()
        self._settle()
        self.transfer.end()

    async def _begin_block(self, threads: Executor) -> None:
        await self._block_done()
        block = self._taken()
        self._under_way = tuple(threads.submit(work, block) for work in (self.transfer.hash, self.transfer.write))

    async def _block_done(self) -> None:
        for future in self._under_way:
            await anyio.to_thread.run_sync(future.result)
        self._under_way = ()

    def _settle(self) -> None:
        """Wait for the block under way, and do what is left here: a millisecond of work each."""
        wait(self._under_way)
        for future in self._under_way:
            future.result()
        block = self._taken()
        self.transfer.write(block)
        self.transfer.hash(block)

    def _taken(self) -> bytes:
        block = b"".join(self._chunks)
        self._chunks.clear()
        self._collected = 0
        return block
