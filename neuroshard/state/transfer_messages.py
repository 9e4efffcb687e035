"""Messages of state transfer: requests about a stage, the manifest of a snapshot, its chunks, and the errors. Pure.

A snapshot travels as a manifest with the digest of every chunk, then the chunks. The bytes are those of a checkpoint:
its JSON file, and its tensor file cut into chunks. A receiver derives the layout of the tensor file from the run, so it
has every size before it sends a request."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

from blake3 import blake3
from msgspec import Meta, Struct

from neuroshard.errors import CheckpointError, NeuroShardError
from neuroshard.messages import Frame, FrameLimits, TensorPart, TensorSpec
from neuroshard.network import ScoreReason
from neuroshard.state.checkpoint_manifest import MAX_META_BYTES, CheckpointManifest, CheckpointMeta, decode_manifest
from neuroshard.types import Architecture, LayerRange, NamedRun, UnixSeconds


class DonorError(NeuroShardError):
    """A donor cannot send what was requested now; another donor may."""


class LyingDonorError(DonorError):
    """A donor's data differ from its announcement; the receiver uses nothing more of it."""

    def __init__(self, message: str, reason: ScoreReason = ScoreReason.UNEXPECTED_TENSOR) -> None:
        super().__init__(message)
        self.reason = reason  # determines the loss of reputation


class InvalidSnapshotError(LyingDonorError):
    """A snapshot matches its announcement but is invalid; the donor that announced it is at fault."""


LARGEST_NUMBER = 10**15
Count = Annotated[int, Meta(ge=0, le=LARGEST_NUMBER)]
Seconds = Annotated[float, Meta(ge=0, le=1e11)]


class StageName(Struct, frozen=True, forbid_unknown_fields=True):
    """A stage of a run, as named in messages."""

    run_id: NamedRun
    layers: LayerRange


class ManifestRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """Requests the newest snapshot, or the one of an older state, or the preferred one while the donor has it."""

    stage: StageName
    max_age_seconds: Seconds
    preferred: Annotated[str, Meta(max_length=64)]  # ANY, or a snapshot's name
    root: Annotated[str, Meta(pattern=r"\A([0-9a-f]{64})?\Z")] = ""  # of the outer state; "": that of the newest one


class ManifestAnswer(Struct, frozen=True, forbid_unknown_fields=True):
    """A manifest; its document and its digests are the frame's tensors."""

    age_seconds: Seconds


class ChunkRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """Requests one chunk of a snapshot."""

    stage: StageName
    snapshot: Annotated[str, Meta(max_length=64)]
    index: Count


class ReceivedNotice(Struct, frozen=True, forbid_unknown_fields=True):
    """Reports that the sender needs nothing more for now, so other nodes may have its place."""

    stage: StageName


class CopyReport(Struct, frozen=True, forbid_unknown_fields=True):
    """Reports that the sender keeps the donor's state of this time as a copy. None: it keeps none, for example because
    its disk is full.
    """

    stage: StageName
    taken_at: UnixSeconds | None


MANIFEST, CHUNK, RECEIVED, COPIED = "stage/manifest", "stage/chunk", "stage/received", "stage/copied"
CHUNK_BYTES = 1 << 20
DIGEST_BYTES = 32
MAX_HEADER_BYTES = 1024
MANIFEST_REQUEST = FrameLimits(MAX_HEADER_BYTES, message=ManifestRequest)
CHUNK_REQUEST = FrameLimits(MAX_HEADER_BYTES, message=ChunkRequest)
RECEIVED_NOTICE = FrameLimits(MAX_HEADER_BYTES, message=ReceivedNotice)
COPY_REPORT = FrameLimits(MAX_HEADER_BYTES, message=CopyReport)
ACKNOWLEDGEMENT = FrameLimits(MAX_HEADER_BYTES)
ANY = ""  # any snapshot
ANY_AGE = 1e9  # seconds: any snapshot is accepted, none is made for the request


def chunk_count(file_bytes: int) -> int:
    """Return the number of chunks in a file."""
    return -(-file_bytes // CHUNK_BYTES)


def chunk_range(index: int, file_bytes: int) -> range:
    """Return the byte range of a chunk."""
    return range(index * CHUNK_BYTES, min((index + 1) * CHUNK_BYTES, file_bytes))


def chunk_digest(data: bytes | memoryview) -> bytes:
    """Return the BLAKE3 digest of a chunk, 32 bytes."""
    return blake3(data).digest()


@dataclass(frozen=True)
class Expected:
    """Properties that a snapshot must have to be usable here."""

    stage: StageName
    architecture: Architecture
    header: bytes  # of the tensor file
    file_bytes: int


@dataclass(frozen=True)
class SnapshotManifest:
    """One state of one stage at one node."""

    document: bytes  # the checkpoint's JSON file
    digests: tuple[bytes, ...]
    age_seconds: float  # at the time of the answer

    @cached_property
    def snapshot(self) -> str:
        """Name of the snapshot in requests for its chunks: 64 hex digits."""
        return blake3(b"".join((self.document, *self.digests))).hexdigest()

    @cached_property
    def checkpoint(self) -> CheckpointManifest:
        """Parse the JSON document. Raises CheckpointError."""
        return decode_manifest(self.document)

    @property
    def meta(self) -> CheckpointMeta:
        """The state without its tensors."""
        return self.checkpoint.meta

    @property
    def file_bytes(self) -> int:
        """Length of the tensor file."""
        return self.checkpoint.tensors.bytes


def manifest_request(stage: StageName, max_age_seconds: float, preferred: str = ANY, root: str = "") -> Frame:
    """Build the request for the newest snapshot, or for that of a root, or for the preferred one while it is there."""
    return Frame(MANIFEST, ManifestRequest(stage, max_age_seconds, preferred, root))


def manifest_limits(expected: Expected) -> FrameLimits:
    """Return the limits of an answer with a manifest."""
    body = MAX_META_BYTES + DIGEST_BYTES * chunk_count(expected.file_bytes)
    return FrameLimits(MAX_HEADER_BYTES, body, message=ManifestAnswer)


def manifest_frame(manifest: SnapshotManifest) -> Frame:
    """Encode a manifest as the answer's frame."""
    parts = (
        _part("document", manifest.document, (len(manifest.document),)),
        _part("digests", b"".join(manifest.digests), (len(manifest.digests), DIGEST_BYTES)),
    )
    return Frame(MANIFEST, ManifestAnswer(manifest.age_seconds), parts)


def read_snapshot_manifest(frame: Frame, expected: Expected) -> SnapshotManifest:
    """Decode the manifest in an answer. Raises LyingDonorError for one that is not of the expected stage."""
    try:
        return _checked(_manifest_in(frame, expected.file_bytes), expected)
    except (ValueError, CheckpointError) as error:
        raise LyingDonorError(f"Its manifest is not acceptable: {error}") from None


def _manifest_in(frame: Frame, file_bytes: int) -> SnapshotManifest:
    age = frame.read(ManifestAnswer).age_seconds
    document, digests = _bytes_of(frame, "document", "digests")
    if len(digests) != DIGEST_BYTES * chunk_count(file_bytes):
        raise ValueError("it names other chunks than the stage has")
    split = tuple(digests[i : i + DIGEST_BYTES] for i in range(0, len(digests), DIGEST_BYTES))
    return SnapshotManifest(document, split, age)


def _checked(manifest: SnapshotManifest, expected: Expected) -> SnapshotManifest:
    meta = manifest.meta
    found = StageName(meta.run_id, meta.layers), meta.architecture, manifest.file_bytes
    if found != (expected.stage, expected.architecture, expected.file_bytes):
        raise ValueError("it is of another stage or another model")
    if not re.fullmatch(rf"step-{meta.step}(-\d{{1,9}})?\.safetensors", manifest.checkpoint.tensors.file):
        raise ValueError("its tensor file has an impossible name")
    if meta.step < 1 or min(meta.outer_step, meta.inner_step, meta.tokens, meta.sequences) < 0:
        raise ValueError("its counts are impossible")
    return manifest


def chunk_request(stage: StageName, snapshot: str, index: int) -> Frame:
    """Build the request for one chunk of a snapshot."""
    return Frame(CHUNK, ChunkRequest(stage, snapshot, index))


def chunk_frame(data: bytes) -> Frame:
    """Encode a chunk as the answer's frame."""
    return Frame(CHUNK, {}, (_part("chunk", data, (len(data),)),))


def chunk_limits(index: int, file_bytes: int) -> FrameLimits:
    """Return the limits of an answer with exactly this chunk."""
    size = len(chunk_range(index, file_bytes))
    return FrameLimits(MAX_HEADER_BYTES, size, (TensorSpec("chunk", "uint8", (size,)),))


def received_frame(stage: StageName) -> Frame:
    """Build the message that frees this node's place at a donor."""
    return Frame(RECEIVED, ReceivedNotice(stage))


def copy_report_frame(stage: StageName, taken_at: float | None) -> Frame:
    """Build the message that the donor's state of this time (seconds since the epoch) is stored here as a copy.

    None: the copy failed.
    """
    return Frame(COPIED, CopyReport(stage, taken_at))


def _part(name: str, data: bytes, shape: Sequence[int]) -> TensorPart:
    return TensorPart(TensorSpec(name, "uint8", tuple(shape)), data)


def _bytes_of(frame: Frame, *names: str) -> tuple[bytes, ...]:
    """Return the bytes of exactly these tensors. Raises ValueError."""
    if tuple(part.spec.name for part in frame.tensors) != names:
        raise ValueError("it does not have the parts that it should have")
    if any(part.spec.dtype != "uint8" for part in frame.tensors):
        raise ValueError("its parts are not bytes")
    return tuple(bytes(part.data) for part in frame.tensors)
