"""Serves snapshots of the stages that this node trains or keeps a copy of to members of the run, a few at once."""

from __future__ import annotations

import contextlib
import time
from collections import OrderedDict
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import inf
from pathlib import Path
from threading import Lock
from typing import IO, Protocol

import anyio
import anyio.to_thread

from neuroshard.errors import StorageError
from neuroshard.membership.download_rights import STATES_OF_READER, Readers
from neuroshard.messages import Frame
from neuroshard.network import RequestRefusedError, ScoreReason, Transport
from neuroshard.network.blocking import BlockingRunner
from neuroshard.state.checkpoint_manifest import MAX_META_BYTES, decode_manifest
from neuroshard.state.kept_states import (
    STATES,
    STATES_REQUEST,
    KeptState,
    StageArchive,
    StatesRequest,
    chosen_states,
    states_frame,
)
from neuroshard.state.replica_status import REPLICA_STATUS, STATUS_REQUEST, ReplicaStatus, StatusAnswer, StatusRequest
from neuroshard.state.transfer_messages import (
    ANY_AGE,
    CHUNK,
    CHUNK_REQUEST,
    COPIED,
    COPY_REPORT,
    MANIFEST,
    MANIFEST_REQUEST,
    RECEIVED,
    RECEIVED_NOTICE,
    ChunkRequest,
    CopyReport,
    DonorError,
    ManifestRequest,
    ReceivedNotice,
    SnapshotManifest,
    StageName,
    chunk_count,
    chunk_digest,
    chunk_frame,
    chunk_range,
    manifest_frame,
)
from neuroshard.status.snapshot import CheckpointGeneration
from neuroshard.types import NodeId

CHUNKS_AT_ONCE = 4
QUESTIONS_AT_ONCE = 16
LOOK_SECONDS = 0.1
READER_SNAPSHOT_SECONDS = 300.0  # shortest time between snapshots that are made for readers


@dataclass(frozen=True)
class DonorLimits:
    """Resources that other nodes may use on this node."""

    receivers: int = 4  # nodes that download at the same time
    snapshots: int = 3  # kept readable after newer ones exist; each takes disk space
    idle_seconds: float = 180.0  # after that a receiver is considered gone, and a snapshot is closed
    asked_seconds: float = 30.0  # the same for a receiver that has asked for no chunk yet
    wait_seconds: float = 15.0  # longest wait for a requested snapshot
    youngest_seconds: float = 20.0  # shortest time between snapshots made on request ...
    round_seconds: float = 5.0  # ... or this when a round ended since


class SnapshotSource(Protocol):
    """The states of one stage on this node's disk."""

    def replica_status(self) -> ReplicaStatus | None:
        """Return the present status; None when there is no state."""
        ...

    def newest(self) -> CheckpointGeneration | None:
        """Return the newest state; blocks, for a worker thread."""
        ...

    def states(self) -> Sequence[KeptState]:
        """Return the newest state of each outer step; blocks, for a worker thread."""
        ...

    def want(self) -> float:
        """Request a new state as soon as possible; returns the seconds after which the next step saves it."""
        ...

    def may_be_taken(self, waited_seconds: float) -> bool:
        """Return whether a node that was refused for this time may start a download now."""
        ...

    def copied(self, peer: NodeId, taken_at: float) -> None:
        """Record that a node keeps a copy of the state of this time (seconds since the epoch)."""
        ...


@dataclass(eq=False)
class _Opened:
    """A snapshot that others read: its file stays readable after it is deleted."""

    manifest: SnapshotManifest
    file: IO[bytes]
    used_at: float = 0.0
    lock: Lock = field(default_factory=Lock)

    def read(self, index: int) -> bytes:
        """Read one chunk; blocks."""
        place = chunk_range(index, self.manifest.file_bytes)
        with self.lock:
            self.file.seek(place.start)
            return self.file.read(len(place))

    def close(self) -> None:
        """Close the file; waits for a read in progress."""
        with self.lock:
            self.file.close()


class SnapshotServer:
    """Serves this node's snapshots; one instance per node. Belongs to the event loop."""

    def __init__(
        self,
        is_of_run: Callable[[NodeId], bool],
        limits: DonorLimits | None = None,
        *,
        now: Callable[[], float] = time.time,
        offload: BlockingRunner = anyio.to_thread.run_sync,
        report: Callable[[NodeId, ScoreReason], None] = lambda _peer, _reason: None,
        readers: Readers | None = None,
    ) -> None:
        """`is_of_run` separates members of the run and joiners from strangers, which are refused.

        `readers` are nodes that wait for a place and may download one stage already. No step waits for them.
        `now` returns seconds since the epoch, for ages; `offload` runs disk reads; `report` is called with strangers.
        """
        self._limits = limits or DonorLimits()
        self._is_of_run = is_of_run
        self._report = report
        self._readers = readers
        self._made_for_reader = -inf  # time of the last snapshot that a reader caused
        self._now = now
        self._offload = offload
        self._stages: dict[StageName, SnapshotSource] = {}  # trained here
        self._copies: dict[StageName, SnapshotSource] = {}  # of others
        self._archives: dict[StageName, StageArchive] = {}
        self._opened: OrderedDict[str, _Opened] = OrderedDict()
        self._receivers: dict[NodeId, float] = {}  # time when each receiver's place expires
        self._have_all: dict[NodeId, float] = {}  # receivers about to train, and how long to wait for each
        self._put_off: dict[tuple[NodeId, StageName], float] = {}  # refused requests, with the time of the first one
        self._opening = anyio.Lock()

    def offer(self, stage: StageName, snapshots: SnapshotSource) -> None:
        """Serve the state of a stage that is trained here."""
        self._stages[stage] = snapshots

    def withdraw(self, stage: StageName) -> None:
        """Stop serving a stage that is no longer trained here; opened snapshots stay readable."""
        self._stages.pop(stage, None)

    def keep(self, stage: StageName, copy: SnapshotSource) -> None:
        """Serve a copy while the stage is not trained here."""
        self._copies[stage] = copy

    def drop(self, stage: StageName) -> None:
        """Stop serving a copy."""
        self._copies.pop(stage, None)

    def archive(self, stage: StageName, archive: StageArchive) -> None:
        """Serve the archived states of a stage, whether or not it is trained here."""
        self._archives[stage] = archive

    def local(self, stage: StageName) -> SnapshotSource | None:
        """Return the local source of a stage's states."""
        return self._stages.get(stage) or self._copies.get(stage)

    def replica_status(self, stage: StageName) -> ReplicaStatus | None:
        """Return the status of this node's own state of a stage."""
        snapshots = self.local(stage)
        return None if snapshots is None else snapshots.replica_status()

    async def own_manifest(self, stage: StageName) -> SnapshotManifest:
        """Return the manifest of the newest local state. Raises DonorError."""
        try:
            opened = await self._newest(self._of(stage), inf)
        except RequestRefusedError as error:
            raise DonorError(error.message) from None
        self._use(opened)
        return opened.manifest

    @property
    def receivers(self) -> frozenset[NodeId]:
        """Nodes that download a state from here, or did recently without reporting the end."""
        now = anyio.current_time()
        self._have_all = {node: until for node, until in self._have_all.items() if until > now}
        return frozenset(node for node, until in self._receivers.items() if until > now) | self._have_all.keys()

    def serve(self, transport: Transport) -> None:
        """Register the request handlers. Raises ValueError when this transport has a donor already."""
        transport.serve(REPLICA_STATUS, self.give_status, STATUS_REQUEST, max_concurrent=QUESTIONS_AT_ONCE)
        transport.serve(STATES, self.give_states, STATES_REQUEST, max_concurrent=QUESTIONS_AT_ONCE)
        transport.serve(MANIFEST, self.give_manifest, MANIFEST_REQUEST, max_concurrent=QUESTIONS_AT_ONCE)
        transport.serve(CHUNK, self.give_chunk, CHUNK_REQUEST, max_concurrent=CHUNKS_AT_ONCE)
        transport.serve(RECEIVED, self.note_received, RECEIVED_NOTICE, max_concurrent=QUESTIONS_AT_ONCE)
        transport.serve(COPIED, self.note_copy, COPY_REPORT, max_concurrent=QUESTIONS_AT_ONCE)

    def close(self) -> None:
        """Close all files."""
        for opened in self._opened.values():
            opened.close()
        self._opened.clear()

    async def give_status(self, _sender: NodeId, frame: Frame) -> Frame:
        """Answer with the status of a stage on this node."""
        return Frame(REPLICA_STATUS, StatusAnswer(self.replica_status(frame.read(StatusRequest).stage)))

    async def give_states(self, sender: NodeId, frame: Frame) -> Frame:
        """Answer with the states of a stage that this node keeps. Raises RequestRefusedError."""
        self._refuse_stranger(sender)
        asked = frame.read(StatesRequest)
        return await self._offload(lambda: states_frame(self._kept(asked)))

    def _kept(self, asked: StatesRequest) -> list[KeptState]:
        snapshots, archive = self.local(asked.stage), self._archives.get(asked.stage)
        present = () if snapshots is None else snapshots.states()
        return chosen_states(asked, present, () if archive is None else archive.states())

    async def give_manifest(self, sender: NodeId, frame: Frame) -> Frame:
        """Answer with a snapshot's manifest. Raises RequestRefusedError."""
        asked = frame.read(ManifestRequest)
        if self._is_reader(sender, asked.stage):
            return await self._manifest_frame(await self._for_reader(asked))
        self._refuse_stranger(sender)
        stage, max_age = asked.stage, max(asked.max_age_seconds, self._limits.youngest_seconds)
        begun = self._opened.get(asked.preferred)
        if begun is None and not asked.root:
            self._refuse_late(sender, stage)
        self._admit(sender, self._limits.asked_seconds)
        if begun is not None:
            opened = begun
        elif asked.root:
            opened = await self._with_root(stage, asked.root)
        else:
            opened = await self._newest(self._of(stage), max_age)
        return await self._manifest_frame(opened)

    async def _manifest_frame(self, opened: _Opened) -> Frame:
        self._use(opened)
        manifest = opened.manifest
        age = max(0.0, self._now() - manifest.meta.time)
        return await self._offload(lambda: manifest_frame(SnapshotManifest(manifest.document, manifest.digests, age)))

    def _is_reader(self, sender: NodeId, stage: StageName) -> bool:
        """Whether a node downloads before it is a member. Raises RequestRefusedError if it may not do so now."""
        right = None if self._readers is None else self._readers.right_of(sender)
        if right is None:
            return False
        if right.layers != stage.layers:
            raise RequestRefusedError("Your right to download is for other layers.")
        if self.receivers:
            raise RequestRefusedError("Members of the run fetch from this node; ask again later.")
        return True

    async def _for_reader(self, asked: ManifestRequest) -> _Opened:
        """The snapshot for a reader: the one that it has begun, or the newest. Few new ones are made for readers."""
        begun = self._opened.get(asked.preferred)
        if begun is not None and begun.manifest.meta.layers == asked.stage.layers:
            return begun
        now, max_age = anyio.current_time(), ANY_AGE
        if now - self._made_for_reader >= READER_SNAPSHOT_SECONDS:
            self._made_for_reader, max_age = now, max(asked.max_age_seconds, self._limits.youngest_seconds)
        return await self._newest(self._of(asked.stage), max_age)

    async def give_chunk(self, sender: NodeId, frame: Frame) -> Frame:
        """Answer with one chunk. Raises RequestRefusedError."""
        asked = frame.read(ChunkRequest)
        is_reader = self._is_reader(sender, asked.stage)
        if not is_reader:
            self._refuse_stranger(sender)
        opened, index = self._opened.get(asked.snapshot), asked.index
        if opened is None:
            raise RequestRefusedError("This snapshot was deleted; ask for a newer one.")
        if index >= len(opened.manifest.digests):
            raise RequestRefusedError("The snapshot has no such chunk.")
        if is_reader and self._readers is not None:
            if opened.manifest.meta.layers != asked.stage.layers:
                raise RequestRefusedError("Your right to download is for other layers.")
            file_bytes = opened.manifest.file_bytes
            size = len(chunk_range(index, file_bytes))
            await self._readers.spend(sender, "state", size, STATES_OF_READER * file_bytes)
        else:
            self._admit(sender, self._limits.idle_seconds)
        self._use(opened)
        try:
            data = await self._offload(lambda: opened.read(index))
        except (OSError, ValueError):  # ValueError: it was closed meanwhile
            raise RequestRefusedError("This snapshot cannot be read any more; ask for a newer one.") from None
        return chunk_frame(data)

    async def note_received(self, sender: NodeId, frame: Frame) -> Frame:
        """Free the place of a node that has the state and is about to train it. Raises RequestRefusedError."""
        frame.read(ReceivedNotice)
        if self._receivers.pop(sender, None) is not None:
            self._have_all[sender] = anyio.current_time() + self._limits.idle_seconds
        return Frame(RECEIVED)

    def keep_only(self, nodes: Container[NodeId]) -> None:
        """Free the places of all other nodes and stop waiting for them, because they are gone."""
        self._receivers = {node: until for node, until in self._receivers.items() if node in nodes}
        self._have_all = {node: until for node, until in self._have_all.items() if node in nodes}

    async def note_copy(self, sender: NodeId, frame: Frame) -> Frame:
        """Record that a node keeps a copy, or gave it up, and free its place. Raises RequestRefusedError."""
        self._refuse_stranger(sender)
        report = frame.read(CopyReport)
        self._receivers.pop(sender, None)  # the download has ended; the node may have another one to train
        if report.taken_at is not None:
            self._of(report.stage).copied(sender, report.taken_at)
        return Frame(COPIED)

    def _refuse_stranger(self, sender: NodeId) -> None:
        """Raise RequestRefusedError for a node that has not proved it is of the run; a joiner may be early."""
        if not self._is_of_run(sender):
            self._report(sender, ScoreReason.STRANGER)
            raise RequestRefusedError("This node serves only members of the run, and does not know you as a member.")

    def _of(self, stage: StageName) -> SnapshotSource:
        snapshots = self.local(stage)
        if snapshots is None:
            raise RequestRefusedError("This node has nothing of these layers.")
        return snapshots

    def _refuse_late(self, receiver: NodeId, stage: StageName) -> None:
        """Raise RequestRefusedError when the download would overlap the stage's step; the receiver asks again."""
        now, download = anyio.current_time(), (receiver, stage)
        self._put_off = {one: at for one, at in self._put_off.items() if at > now - self._limits.idle_seconds}
        if not self._of(stage).may_be_taken(now - self._put_off.setdefault(download, now)):
            raise RequestRefusedError("The replicas of these layers step soon; try again after that.")
        del self._put_off[download]

    def _admit(self, receiver: NodeId, seconds: float) -> None:
        """Reserve a receiver's place for this time. Raises RequestRefusedError when all are taken."""
        now = anyio.current_time()
        self._receivers = {node: until for node, until in self._receivers.items() if until > now}
        if receiver not in self._receivers and len(self._receivers) >= self._limits.receivers:
            raise RequestRefusedError("Others fetch from this node; try again a little later.")
        self._receivers[receiver] = max(now + seconds, self._receivers.get(receiver, now))

    async def _newest(self, snapshots: SnapshotSource, max_age_seconds: float) -> _Opened:
        """Return a snapshot that is young enough, or the newest one when a newer one is not worth waiting for."""
        found = None
        with anyio.move_on_after(self._limits.wait_seconds):
            while True:
                found = await self._offload(snapshots.newest)
                if found is not None and not self._is_outdated(found, snapshots.replica_status(), max_age_seconds):
                    break
                if snapshots.want() > self._limits.wait_seconds and found is not None:
                    break
                await anyio.sleep(LOOK_SECONDS)
        if found is None:
            raise RequestRefusedError("There is no snapshot of this stage yet; try again a little later.")
        async with self._opening:  # digests take a second: open one snapshot at a time, each only once
            return await self._open(Path(found.path))

    async def _with_root(self, stage: StageName, root: str) -> _Opened:
        """Return the snapshot of a state that this node keeps. Raises RequestRefusedError."""
        path = await self._offload(lambda: self._path_of(stage, root))
        if path is None:
            raise RequestRefusedError("This node does not keep that state any more.")
        async with self._opening:
            return await self._open(path)

    def _path_of(self, stage: StageName, root: str) -> Path | None:
        snapshots, archive = self.local(stage), self._archives.get(stage)
        kept = chain(() if snapshots is None else snapshots.states(), () if archive is None else archive.states())
        return next((Path(one.generation.path) for one in kept if one.root == root), None)

    def _is_outdated(self, found: CheckpointGeneration, status: ReplicaStatus | None, max_age_seconds: float) -> bool:
        """Return whether to wait for a newer snapshot: after a later round this one is useless to a joining replica."""
        if status is None or not status.is_live:
            return False  # no node makes a newer one
        age = self._now() - found.time
        if found.outer_step < status.outer_step and max_age_seconds < ANY_AGE:
            return age > self._limits.round_seconds
        return age > max_age_seconds

    async def _open(self, path: Path) -> _Opened:
        try:
            document = await self._offload(lambda: _document_in(path))
            known = next((one for one in self._opened.values() if one.manifest.document == document), None)
            return known or await self._offload(lambda: _opened_file(path, document))
        except (OSError, StorageError) as error:
            raise RequestRefusedError(f"The snapshot cannot be read here: {error}") from None

    def _use(self, opened: _Opened) -> None:
        """Keep a snapshot open, and close those unused for long or beyond the limit."""
        now = opened.used_at = anyio.current_time()
        self._opened[opened.manifest.snapshot] = opened
        self._opened.move_to_end(opened.manifest.snapshot)
        idle = [one for one in self._opened.values() if one.used_at < now - self._limits.idle_seconds]
        surplus = list(self._opened.values())[: max(0, len(self._opened) - self._limits.snapshots)]
        for one in dict.fromkeys((*idle, *surplus)):
            del self._opened[one.manifest.snapshot]
            one.close()


def _document_in(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(MAX_META_BYTES + 1)


def _opened_file(path: Path, document: bytes) -> _Opened:
    """Open the tensor file of a generation with its chunk digests. Raises OSError, CheckpointError."""
    tensors = decode_manifest(document).tensors
    file = path.with_name(tensors.file).open("rb")
    with contextlib.ExitStack() as closing:
        closing.enter_context(file)
        places = [chunk_range(index, tensors.bytes) for index in range(chunk_count(tensors.bytes))]
        digests = tuple(chunk_digest(file.read(len(place))) for place in places)
        closing.pop_all()
    return _Opened(SnapshotManifest(document, digests, 0.0), file)
