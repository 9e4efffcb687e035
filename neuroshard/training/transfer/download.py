"""One snapshot on its way: several donors give chunks at the same time, each checked before it is kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import anyio
import anyio.to_thread
import numpy as np

from neuroshard.errors import StorageError
from neuroshard.network import PeerRefusedError, PeerUnreachableError, ScoreReason, TransportClosedError
from neuroshard.swarm.offload import Offload
from neuroshard.training.checkpoint.tensor_file import TensorLayout
from neuroshard.training.remote_hop import Requester
from neuroshard.training.transfer.chunk_board import ChunkBoard
from neuroshard.training.transfer.errors import DonorError, LyingDonorError, SpoiltSnapshotError
from neuroshard.training.transfer.fields import StageName
from neuroshard.training.transfer.manifest import (
    CHUNK_BYTES,
    Expected,
    SnapshotManifest,
    chunk_digest,
    chunk_limits,
    chunk_range,
    chunk_request,
)
from neuroshard.training.transfer.partial_file import PartialFile
from neuroshard.types import Architecture, NodeId
from neuroshard.wire import Frame, FrameLimits, WireError

CHUNK_SECONDS = 120.0  # a MiB at 70 kbit/s
RETRY_SECONDS = 0.5


@dataclass(frozen=True)
class StageFile:
    """What this node knows of a stage's state before it asks anybody."""

    stage: StageName
    architecture: Architecture
    layout: TensorLayout

    @cached_property
    def expected(self) -> Expected:
        """What a snapshot of it must be of."""
        return Expected(self.stage, self.architecture, self.layout.header(), self.layout.file_bytes)

    def check_content(self, index: int, data: memoryview) -> None:
        """Raises SpoiltSnapshotError for a chunk that cannot be part of this stage's state."""
        start = index * CHUNK_BYTES
        header = self.expected.header[start : start + len(data)]
        if bytes(data[: len(header)]) != header:
            raise SpoiltSnapshotError("Its snapshot holds other tensors.")
        values = np.frombuffer(data[len(header) :], dtype="<f4")  # header and chunks end at whole numbers
        if not bool(np.isfinite(values).all()):
            raise SpoiltSnapshotError("Its snapshot holds values that are not numbers.")


@dataclass(frozen=True)
class ReceivingOptions:
    """How a state is fetched."""

    chunks_at_once: int = 3  # from one donor
    share: float = 1.0  # of the donor's line: after every chunk this node waits so that it takes no more


@dataclass
class Progress:
    """How far a download is, for people."""

    bytes_total: int = 0
    bytes_done: int = 0


@dataclass(frozen=True)
class Asking:
    """The way to donors. `report` is told what they did wrong, `offload` runs what blocks."""

    requester: Requester
    report: Callable[[NodeId, ScoreReason], None] = lambda _peer, _reason: None
    offload: Offload = anyio.to_thread.run_sync

    async def ask(self, peer: NodeId, request: Frame, limits: FrameLimits, seconds: float) -> Frame:
        """The answer to a request. Raises DonorError; LyingDonorError for an answer that breaks the limits."""
        try:
            with anyio.move_on_after(seconds):  # a peer may have to be dialled first
                return await self.requester.request(peer, request, reply=limits, timeout_seconds=seconds)
        except (PeerUnreachableError, PeerRefusedError, TransportClosedError) as error:
            raise DonorError(error.message) from None
        except WireError as error:
            raise LyingDonorError(error.message) from None
        raise DonorError(f"Node {peer} did not answer within {seconds:g} s.")


@dataclass
class Download:
    """Used once."""

    asking: Asking
    file: StageFile
    manifests: Mapping[NodeId, SnapshotManifest]  # of all donors
    first: NodeId  # whose snapshot it is
    into: PartialFile
    board: ChunkBoard
    options: ReceivingOptions
    progress: Progress
    _changed: anyio.Event = field(default_factory=anyio.Event)
    _trouble: StorageError | LyingDonorError | None = None

    async def run(self) -> None:
        """Until all chunks are here. Raises DonorError when no donor has what is missing, StorageError."""
        async with anyio.create_task_group() as tasks:
            for donor in self.manifests:
                for _ in range(self.options.chunks_at_once):
                    tasks.start_soon(self._work, donor)
        if self._trouble is not None:
            raise self._trouble
        if not self.board.is_done:
            raise DonorError(f"The state did not come as a whole. {'; '.join(self.board.troubles)}".strip())

    async def _work(self, donor: NodeId) -> None:
        """One chunk after the other, as long as this donor has some that are missing."""
        board = self.board
        while self._trouble is None and board.has(donor) and not board.is_done and not board.is_hopeless:
            changed = self._changed
            index = board.take(donor)
            if index is None:
                await changed.wait()
                continue
            try:
                await self._fetch(donor, index)
            except (StorageError, SpoiltSnapshotError) as error:
                self._trouble = error
            waking, self._changed = self._changed, anyio.Event()
            waking.set()

    async def _fetch(self, donor: NodeId, index: int) -> None:
        began = anyio.current_time()
        request = chunk_request(self.file.stage, self.manifests[donor].snapshot, index)
        limits = chunk_limits(index, self.into.file_bytes)
        try:
            answer = await self.asking.ask(donor, request, limits, CHUNK_SECONDS)
            data = memoryview(answer.tensors[0].data)
            await self.asking.offload(lambda: self._keep(index, data))
        except SpoiltSnapshotError as error:
            self.asking.report(self.first, error.reason)  # whoever gave it: the digest is the first one's
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
    """How much these chunks are together."""
    return sum(len(chunk_range(index, file_bytes)) for index in held)
