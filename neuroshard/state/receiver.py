"""Downloads a stage's state from its holders, and computes the layout and the root of a state file."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from neuroshard.network import ScoreReason
from neuroshard.state.download import (
    ChunkBoard,
    Download,
    DownloadProgress,
    PartialFile,
    ReceivingOptions,
    ReplicaClient,
    StageFile,
    ask_replicas,
    held_bytes,
)
from neuroshard.state.outer_state import line_from_json, outer_root
from neuroshard.state.stage_tensors import OUTER_TENSORS
from neuroshard.state.transfer_messages import (
    ACKNOWLEDGEMENT,
    ANY,
    CHUNK_BYTES,
    LyingDonorError,
    SnapshotManifest,
    copy_report_frame,
    manifest_limits,
    manifest_request,
    read_snapshot_manifest,
    received_frame,
)
from neuroshard.types import NodeId

REPORT_SECONDS = 5.0
RECEIVED_SECONDS = 1.0  # limit for reporting to a donor that its place is free
MANIFEST_SECONDS = 60.0  # a donor may wait for its next step


@dataclass(frozen=True)
class ReceivedState:
    """A complete and checked state."""

    manifest: SnapshotManifest
    path: Path  # of its tensor file
    root: str  # of its outer state


@dataclass
class StateReceiver:
    """Downloads the state of one stage."""

    asking: ReplicaClient
    file: StageFile
    options: ReceivingOptions = field(default_factory=ReceivingOptions)
    progress: DownloadProgress = field(default_factory=DownloadProgress)

    async def manifest(
        self, donor: NodeId, max_age_seconds: float, preferred: str = ANY, root: str = ""
    ) -> SnapshotManifest:
        """Request a donor's newest snapshot, or that of an older state, or the preferred one while the donor has it.

        Raises DonorError.
        """
        request = manifest_request(self.file.stage, max_age_seconds, preferred, root)
        expected = self.file.expected
        with self.asking.blaming(donor):
            answer = await self.asking.ask(donor, request, manifest_limits(expected), MANIFEST_SECONDS)
            return await self.asking.offload(lambda: read_snapshot_manifest(answer, expected))

    async def fetch(
        self, first: NodeId, manifests: Mapping[NodeId, SnapshotManifest], into: PartialFile, reuse: Sequence[Path] = ()
    ) -> ReceivedState:
        """Download the first donor's snapshot, with equal chunks from the other donors.

        `reuse` are files that may contain some of the chunks. Raises DonorError when the download cannot be completed;
        the received chunks stay in the file. Raises StorageError.
        """
        manifest, offload = manifests[first], self.asking.offload
        held = await offload(lambda: _held(into, manifest.digests, reuse))
        board = ChunkBoard(manifest.digests, {donor: one.digests for donor, one in manifests.items()}, held)
        self.progress.bytes_total = into.file_bytes
        self.progress.bytes_done = held_bytes(held, into.file_bytes)
        download = Download(self.asking, self.file, manifests, first, into, board, self.options, self.progress)
        await download.run()
        with self.asking.blaming(first):
            return await offload(lambda: self._finished(manifest, into))

    async def fetch_outer(
        self, first: NodeId, manifests: Mapping[NodeId, SnapshotManifest], into: PartialFile
    ) -> ReceivedState:
        """Download only the outer state of the first donor's snapshot. Its root proves these chunks, nothing else.

        The rest of the file is undefined. Raises like `fetch`.
        """
        manifest, offload = manifests[first], self.asking.offload
        wanted = self.file.layout.chunks_of(OUTER_TENSORS, CHUNK_BYTES)
        held = await offload(lambda: _held(into, manifest.digests, (), wanted))
        self.progress.bytes_total = held_bytes(wanted, into.file_bytes)
        self.progress.bytes_done = held_bytes(held, into.file_bytes)
        held |= set(range(len(manifest.digests))) - wanted
        board = ChunkBoard(manifest.digests, {donor: one.digests for donor, one in manifests.items()}, held)
        download = Download(self.asking, self.file, manifests, first, into, board, self.options, self.progress)
        await download.run()
        return await offload(lambda: self._received(manifest, into))

    async def report_received(self, donors: Iterable[NodeId]) -> None:
        """Report to donors that the state is here and will be trained. Each would otherwise keep this node's place."""
        notice = received_frame(self.file.stage)
        await ask_replicas(donors, lambda donor: self.asking.ask(donor, notice, ACKNOWLEDGEMENT, RECEIVED_SECONDS))

    async def report_copied(self, donor: NodeId, taken_at: float | None) -> None:
        """Report to a donor that its state of this time is stored here as a copy. Raises DonorError.

        None: the copy failed. In both cases the donor frees this node's place.
        """
        await self.asking.ask(donor, copy_report_frame(self.file.stage, taken_at), ACKNOWLEDGEMENT, REPORT_SECONDS)

    def _finished(self, manifest: SnapshotManifest, into: PartialFile) -> ReceivedState:
        if into.finish() != manifest.checkpoint.tensors.sha256:
            into.remove()
            raise LyingDonorError("Its snapshot is not the one that its checkpoint names.", ScoreReason.DIGEST_MISMATCH)
        return self._received(manifest, into)

    def _received(self, manifest: SnapshotManifest, into: PartialFile) -> ReceivedState:
        meta = manifest.meta
        line = line_from_json(meta.extra.get("outer"))
        return ReceivedState(manifest, into.path, outer_root(into.path, self.file.layout, meta.outer_step, line))


def _held(
    into: PartialFile, digests: Sequence[bytes], reuse: Sequence[Path], wanted: Collection[int] | None = None
) -> set[int]:
    """Return the chunks that need no download, of those that are wanted (None: all); blocks. Raises StorageError."""
    into.open()
    held = into.held(digests, wanted)
    for path in reuse:
        held |= into.take_from(path, digests, set(range(len(digests))) - held)
    return held
