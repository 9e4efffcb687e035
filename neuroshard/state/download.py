"""Download of one snapshot: several donors send chunks at the same time; each chunk is checked before it is stored.

ChunkBoard assigns chunks to donors, PartialFile is the file on the disk, and Download makes the requests.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import TypeVar

import anyio
import anyio.to_thread
import numpy as np

from neuroshard.config.state_file import is_disk_full
from neuroshard.errors import DiskFullError, StorageError
from neuroshard.messages import Frame, FrameLimits, WireError
from neuroshard.network import PeerRefusedError, PeerUnreachableError, ScoreReason, TransportClosedError
from neuroshard.network.blocking import BlockingRunner
from neuroshard.network.transport import Requester
from neuroshard.state.tensor_file import TensorLayout
from neuroshard.state.transfer_messages import (
    CHUNK_BYTES,
    DonorError,
    Expected,
    InvalidSnapshotError,
    LyingDonorError,
    SnapshotManifest,
    StageName,
    chunk_digest,
    chunk_limits,
    chunk_range,
    chunk_request,
)
from neuroshard.types import Architecture, NodeId
from neuroshard.waiting import Signal

_LOG = logging.getLogger(__name__)

T = TypeVar("T")

ASKED_AT_ONCE = 16
TRIES = 3  # consecutive failures before a donor is given up


class ChunkBoard:
    """Assigns missing chunks to donors. A donor can send those whose digests are the same in its own snapshot."""

    def __init__(
        self, digests: Sequence[bytes], donors: Mapping[NodeId, Sequence[bytes]], held: Iterable[int] = ()
    ) -> None:
        """`donors` has the digests of each donor's snapshot; `held` are the chunks that are stored already."""
        self.missing = set(range(len(digests))) - set(held)
        self._waiting = set(self.missing)  # missing chunks that are not requested at the moment
        self._can = {
            donor: {index for index in self.missing if index < len(own) and own[index] == digests[index]}
            for donor, own in donors.items()
        }
        self._donor_counts = Counter(index for can in self._can.values() for index in can)
        self._orphans = {index for index in self.missing if not self._donor_counts[index]}
        self._queues: dict[NodeId, deque[int]] = {}  # each donor's chunks, rarest first; some are already taken
        self._line_up()
        self._failures: dict[NodeId, int] = {}
        self.troubles: list[str] = []  # why donors were given up

    @property
    def is_done(self) -> bool:
        """Whether all chunks are here."""
        return not self.missing

    @property
    def is_hopeless(self) -> bool:
        """Whether a missing chunk is available from no donor."""
        return bool(self._orphans)

    def has(self, donor: NodeId) -> bool:
        """Return whether a donor is still in use."""
        return donor in self._can

    def take(self, donor: NodeId) -> int | None:
        """Return a chunk to request from this donor now, the rarest first; None when there is none at present."""
        queue = self._queues.get(donor, deque())
        while queue:
            index = queue.popleft()
            if index in self._waiting:
                self._waiting.discard(index)
                return index
        return None

    def arrived(self, donor: NodeId, index: int) -> None:
        """Mark a chunk as received."""
        self.missing.discard(index)
        self._orphans.discard(index)
        self._failures.pop(donor, None)

    def failed(self, donor: NodeId, index: int, trouble: str) -> None:
        """Record that a donor did not send a chunk; after TRIES failures in a row the donor is given up."""
        self._put_back(index)
        self._failures[donor] = self._failures.get(donor, 0) + 1
        if self._failures[donor] >= TRIES:
            self.give_up(donor, trouble)

    def give_up(self, donor: NodeId, trouble: str, index: int | None = None) -> None:
        """Request nothing more from a donor; `index` is the chunk it was asked for."""
        if index is not None:
            self._put_back(index)
        could = self._can.pop(donor, None)
        if could is not None:
            self.troubles.append(f"{donor}: {trouble}")
            self._donor_counts.subtract(could)
            self._orphans |= {index for index in could & self.missing if not self._donor_counts[index]}
            self._line_up()

    def _put_back(self, index: int) -> None:
        """Put a chunk at the front of the queue of every donor that has it."""
        self._waiting.add(index)
        for donor, can in self._can.items():
            if index in can:
                self._queues[donor].appendleft(index)

    def _line_up(self) -> None:
        """Rebuild each donor's queue in the order of `take`; needed again only when a donor is given up."""
        self._queues = {
            donor: deque(sorted(can & self._waiting, key=lambda index: (self._donor_counts[index], index)))
            for donor, can in self._can.items()
        }


_READ_BYTES = 4 << 20


class PartialFile:
    """The file that a download fills. Every call blocks (use a worker thread). Raises StorageError, DiskFullError."""

    def __init__(self, path: Path, file_bytes: int) -> None:
        self.path = path
        self.file_bytes = file_bytes

    def open(self) -> None:
        """Create the file, or keep one of this length that an earlier start left."""
        with self._trouble():
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self.path.exists() and self.path.stat().st_size != self.file_bytes:
                self.path.unlink()
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
            with os.fdopen(descriptor, "r+b") as file:
                file.truncate(self.file_bytes)  # sparse: space is used as chunks arrive

    def held(self, digests: Sequence[bytes], wanted: Collection[int] | None = None) -> set[int]:
        """Return the chunks that the file already contains, of those that are wanted (None: all)."""
        return {index for index, _ in _matching(self.path, digests, self.file_bytes, wanted)}

    def take_from(self, other: Path, digests: Sequence[bytes], wanted: Collection[int]) -> set[int]:
        """Copy the wanted chunks that are equal in another file of the same layout, and return their indices."""
        if not other.exists() or other.stat().st_size != self.file_bytes:
            return set()
        taken = set[int]()
        for index, data in _matching(other, digests, self.file_bytes, wanted):
            self.write(index, data)
            taken.add(index)
        return taken

    def write(self, index: int, data: bytes | memoryview) -> None:
        with self._trouble(), self.path.open("r+b") as file:
            file.seek(chunk_range(index, self.file_bytes).start)
            file.write(data)

    def finish(self) -> str:
        """Make the file durable and return the hex SHA-256 of all of it."""
        digest = sha256()
        with self._trouble(), self.path.open("r+b") as file:
            while piece := file.read(_READ_BYTES):
                digest.update(piece)
            os.fsync(file.fileno())
        return digest.hexdigest()

    def remove(self) -> None:
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
    """Yield a file's chunks that have these digests; none for a file that cannot be read."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        for index in range(len(digests)) if wanted is None else sorted(wanted):
            place = chunk_range(index, file_bytes)
            file.seek(place.start)
            data = file.read(len(place))
            if chunk_digest(data) == digests[index]:
                yield index, data


CHUNK_SECONDS = 120.0  # one MiB at 70 kbit/s
RETRY_SECONDS = 0.5


@dataclass(frozen=True)
class StageFile:
    """The facts about a stage's state that this node knows before it sends a request."""

    stage: StageName
    architecture: Architecture
    layout: TensorLayout

    @cached_property
    def expected(self) -> Expected:
        """Return the properties that a snapshot must have."""
        return Expected(self.stage, self.architecture, self.layout.header(), self.layout.file_bytes)

    def check_content(self, index: int, data: memoryview) -> None:
        """Raise InvalidSnapshotError for a chunk that cannot be part of this stage's state."""
        start = index * CHUNK_BYTES
        header = self.expected.header[start : start + len(data)]
        if bytes(data[: len(header)]) != header:
            raise InvalidSnapshotError("Its snapshot holds other tensors.")
        values = np.frombuffer(data[len(header) :], dtype="<f4")  # header and chunks end at whole numbers
        if not bool(np.isfinite(values).all()):
            raise InvalidSnapshotError("Its snapshot holds values that are not numbers.")


@dataclass(frozen=True)
class ReceivingOptions:
    """Limits for downloading a state."""

    chunks_at_once: int = 3  # from one donor
    share: float = 1.0  # of the donor's bandwidth: after every chunk this node waits to use no more


@dataclass
class DownloadProgress:
    """Progress of a download, for display."""

    bytes_total: int = 0
    bytes_done: int = 0


DONOR_PATIENCE_SECONDS = 180.0  # an honest donor may be busy
LONGEST_DOUBT_SECONDS = 3600.0


class FailedDonors:
    """Nodes that report a state and do not deliver it, so that a false report costs this node less and less time.

    A node that has failed for DONOR_PATIENCE_SECONDS is not believed for as long, and after each further failure for
    twice the time. A delivery ends this, and so does an hour without a failure.
    """

    def __init__(self) -> None:
        # by node: the first failure, the number of times that it was doubted, and the end of the last one
        self._failing: dict[NodeId, tuple[float, int, float]] = {}

    def note(self, donor: NodeId, now: float) -> None:
        """Record that a download from this donor has failed."""
        recent = {node: one for node, one in self._failing.items() if now - one[2] < LONGEST_DOUBT_SECONDS}
        since, times, until = recent.get(donor, (now, 0, now))
        if times > 0 or now - since >= DONOR_PATIENCE_SECONDS:
            until = now + min(DONOR_PATIENCE_SECONDS * 2.0 ** min(times, 10), LONGEST_DOUBT_SECONDS)
            times += 1
        self._failing = {**recent, donor: (since, times, max(now, until))}

    def forget(self, donor: NodeId) -> None:
        """Believe a donor again: it has delivered its state."""
        self._failing.pop(donor, None)

    def doubted(self, now: float) -> frozenset[NodeId]:
        """The nodes whose reports do not count now."""
        return frozenset(node for node, (_, _, until) in self._failing.items() if now < until)


@dataclass(frozen=True)
class ReplicaClient:
    """Sends requests to donors. `report` is called with their offences, `offload` runs blocking calls."""

    requester: Requester
    report: Callable[[NodeId, ScoreReason], None] = lambda _peer, _reason: None
    offload: BlockingRunner = anyio.to_thread.run_sync
    failed: FailedDonors = field(default_factory=FailedDonors)  # whatever the stage

    async def ask(self, peer: NodeId, request: Frame, limits: FrameLimits, seconds: float) -> Frame:
        """Return the answer to a request. Raises DonorError; LyingDonorError for an answer that breaks the limits."""
        try:
            with anyio.move_on_after(seconds):  # a peer may have to be dialled first
                return await self.requester.request(peer, request, reply=limits, timeout_seconds=seconds)
        except (PeerUnreachableError, PeerRefusedError, TransportClosedError) as error:
            raise DonorError(error.message) from None
        except WireError as error:
            raise LyingDonorError(error.message) from None
        raise DonorError(f"Node {peer} did not answer within {seconds:g} s.")

    @contextmanager
    def blaming(self, peer: NodeId) -> Generator[None]:
        """Report a peer whose answer proves false inside the block, and raise the error again."""
        try:
            yield
        except LyingDonorError as error:
            self.report(peer, error.reason)
            raise


async def ask_replicas(
    peers: Iterable[NodeId], ask: Callable[[NodeId], Awaitable[T]], *, at_once: int = ASKED_AT_ONCE
) -> dict[NodeId, T]:
    """Ask several replicas, `at_once` at a time, and return the answers.

    A peer for which `ask` raises DonorError (it is gone, refuses or lies) is left out: another peer may answer.
    """
    answers: dict[NodeId, T] = {}
    slots = anyio.CapacityLimiter(at_once)

    async def ask_one(peer: NodeId) -> None:
        try:
            async with slots:
                answers[peer] = await ask(peer)
        except DonorError as error:
            _LOG.debug("Node %s does not answer: %s", peer, error)

    async with anyio.create_task_group() as tasks:
        for peer in peers:
            tasks.start_soon(ask_one, peer)
    return answers


@dataclass
class Download:
    """One download of a snapshot; use an instance once."""

    asking: ReplicaClient
    file: StageFile
    manifests: Mapping[NodeId, SnapshotManifest]  # of all donors
    first: NodeId  # the donor whose snapshot is downloaded
    into: PartialFile
    board: ChunkBoard
    options: ReceivingOptions
    progress: DownloadProgress
    _changed: Signal = field(default_factory=Signal)
    _trouble: StorageError | LyingDonorError | None = None

    async def run(self) -> None:
        """Download until all chunks are here. Raises DonorError when no donor has a missing chunk, StorageError."""
        async with anyio.create_task_group() as tasks:
            for donor in self.manifests:
                for _ in range(self.options.chunks_at_once):
                    tasks.start_soon(self._work, donor)
        if self._trouble is not None:
            raise self._trouble
        if not self.board.is_done:
            raise DonorError(f"The state did not come as a whole. {'; '.join(self.board.troubles)}".strip())

    async def _work(self, donor: NodeId) -> None:
        """Download chunk after chunk from one donor while it has missing ones."""
        board = self.board
        while self._trouble is None and board.has(donor) and not board.is_done and not board.is_hopeless:
            count = self._changed.count
            index = board.take(donor)
            if index is None:
                await self._changed.wait(after=count)
                continue
            try:
                await self._fetch(donor, index)
            except (StorageError, InvalidSnapshotError) as error:
                self._trouble = error
            self._changed.notify()

    async def _fetch(self, donor: NodeId, index: int) -> None:
        began = anyio.current_time()
        request = chunk_request(self.file.stage, self.manifests[donor].snapshot, index)
        limits = chunk_limits(index, self.into.file_bytes)
        try:
            answer = await self.asking.ask(donor, request, limits, CHUNK_SECONDS)
            data = memoryview(answer.tensors[0].data)
            await self.asking.offload(lambda: self._keep(index, data))
        except InvalidSnapshotError as error:
            self.asking.report(self.first, error.reason)  # whichever donor sent it: the digest is the first one's
            raise
        except LyingDonorError as error:
            self.asking.report(donor, error.reason)
            self.board.give_up(donor, error.message, index)
        except DonorError as error:
            self.board.failed(donor, index, error.message)
            await anyio.sleep(RETRY_SECONDS)
        else:
            self.board.arrived(donor, index)
            self.progress.bytes_done += len(data)
            await anyio.sleep((anyio.current_time() - began) * (1 / self.options.share - 1))

    def _keep(self, index: int, data: memoryview) -> None:
        """Check a chunk and write it; blocks. Raises LyingDonorError, StorageError."""
        if chunk_digest(data) != self.manifests[self.first].digests[index]:
            raise LyingDonorError("A chunk does not match its digest.", ScoreReason.DIGEST_MISMATCH)
        self.file.check_content(index, data)
        self.into.write(index, data)


def held_bytes(held: set[int], file_bytes: int) -> int:
    """Return the total size of these chunks."""
    return sum(len(chunk_range(index, file_bytes)) for index in held)
