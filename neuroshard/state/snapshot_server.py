"""Serves snapshots of the stages that this node trains or keeps a copy of to members of the run, a few at once."""

from __future__ import annotations

import contextlib
import time
from collections import OrderedDict
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from threading import Lock
from typing import IO, Protocol

import anyio
import anyio.to_thread

from neuroshard.errors import StorageError
from neuroshard.messages import Frame
from neuroshard.network import RequestRefusedError, ScoreReason, Transport
from neuroshard.network.blocking import BlockingRunner
from neuroshard.state.checkpoint_manifest import MAX_META_BYTES, decode_manifest
from neuroshard.state.replica_status import STANDING, STATUS_REQUEST, ReplicaStatus, StatusRequest, standing_answer
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


@dataclass(frozen=True)
class DonorLimits:
    """What others may cost this node."""

    receivers: int = 4  # nodes that fetch at the same time
    snapshots: int = 3  # that stay readable though newer ones exist; each holds its place on the disk
    idle_seconds: float = 180.0  # after that a receiver is gone, and a snapshot is let go
    asked_seconds: float = 30.0  # the same for a receiver that has asked for no chunk yet
    wait_seconds: float = 15.0  # for a snapshot that is wished for
    youngest_seconds: float = 20.0  # nobody gets snapshots made more often than so ...
    round_seconds: float = 5.0  # ... or than so when a round ended since


class SnapshotSource(Protocol):
    """The states of one stage that lie on this node's disk."""

    def standing(self) -> ReplicaStatus | None:
        """How far it is now; None when there is nothing of it."""
        ...

    def newest(self) -> CheckpointGeneration | None:
        """The newest one; blocks, for a worker thread."""
        ...

    def want(self) -> float:
        """A new one is wished for as soon as possible: at the next step after so many seconds."""
        ...

    def may_be_taken(self, waited_seconds: float) -> bool:
        """Whether somebody may begin to fetch it now who was put off for so long."""
        ...

    def copied(self, peer: NodeId, taken_at: float) -> None:
        """A node says that it keeps a copy of the state of this time (seconds since the epoch)."""
        ...


@dataclass(eq=False)
class _Opened:
    """A snapshot that others read: its file stays readable when it is deleted."""

    manifest: SnapshotManifest
    file: IO[bytes]
    used_at: float = 0.0
    lock: Lock = field(default_factory=Lock)

    def read(self, index: int) -> bytes:
        """One chunk; blocks."""
        place = chunk_range(index, self.manifest.file_bytes)
        with self.lock:
            self.file.seek(place.start)
            return self.file.read(len(place))

    def close(self) -> None:
        """Let the file go; waits for a read."""
        with self.lock:
            self.file.close()


class SnapshotServer:
    """One for a node. Belongs to the event loop."""

    def __init__(
        self,
        is_of_run: Callable[[NodeId], bool],
        limits: DonorLimits | None = None,
        *,
        now: Callable[[], float] = time.time,
        offload: BlockingRunner = anyio.to_thread.run_sync,
        report: Callable[[NodeId, ScoreReason], None] = lambda _peer, _reason: None,
    ) -> None:
        """`is_of_run` tells members of the run and joiners from strangers, which get nothing.

        `now` in seconds since the epoch, for ages; `offload` runs what reads the disk; `report` is told of strangers.
        """
        self._limits = limits or DonorLimits()
        self._is_of_run = is_of_run
        self._report = report
        self._now = now
        self._offload = offload
        self._stages: dict[StageName, SnapshotSource] = {}  # trained here
        self._copies: dict[StageName, SnapshotSource] = {}  # of others
        self._opened: OrderedDict[str, _Opened] = OrderedDict()
        self._receivers: dict[NodeId, float] = {}  # until when they have their places
        self._have_all: dict[NodeId, float] = {}  # who gave its place back, and until when it is waited for
        self._put_off: dict[tuple[NodeId, StageName], float] = {}  # who with what, and since when
        self._opening = anyio.Lock()

    def offer(self, stage: StageName, snapshots: SnapshotSource) -> None:
        """Let others have the state of a stage that is trained here from now on."""
        self._stages[stage] = snapshots

    def withdraw(self, stage: StageName) -> None:
        """This stage is not trained here any more; what is being read stays readable."""
        self._stages.pop(stage, None)

    def keep(self, stage: StageName, copy: SnapshotSource) -> None:
        """Let others have a copy, while the stage is not trained here."""
        self._copies[stage] = copy

    def drop(self, stage: StageName) -> None:
        """There is no copy any more."""
        self._copies.pop(stage, None)

    def local(self, stage: StageName) -> SnapshotSource | None:
        """What lies here of a stage."""
        return self._stages.get(stage) or self._copies.get(stage)

    def standing(self, stage: StageName) -> ReplicaStatus | None:
        """How far this node's own state of a stage is."""
        snapshots = self.local(stage)
        return None if snapshots is None else snapshots.standing()

    async def own_manifest(self, stage: StageName) -> SnapshotManifest:
        """Of the newest state that lies here. Raises DonorError."""
        try:
            opened = await self._newest(self._of(stage), inf)
        except RequestRefusedError as error:
            raise DonorError(error.message) from None
        self._use(opened)
        return opened.manifest

    @property
    def receivers(self) -> frozenset[NodeId]:
        """Who fetches a state from here, or did so lately and has said nothing of it since."""
        now = anyio.current_time()
        self._have_all = {node: until for node, until in self._have_all.items() if until > now}
        return frozenset(node for node, until in self._receivers.items() if until > now) | self._have_all.keys()

    def serve(self, transport: Transport) -> None:
        """Answer from now on. Raises ValueError when this transport has a donor already."""
        transport.serve(STANDING, self.tell_standing, STATUS_REQUEST, max_concurrent=QUESTIONS_AT_ONCE)
        transport.serve(MANIFEST, self.give_manifest, MANIFEST_REQUEST, max_concurrent=QUESTIONS_AT_ONCE)
        transport.serve(CHUNK, self.give_chunk, CHUNK_REQUEST, max_concurrent=CHUNKS_AT_ONCE)
        transport.serve(RECEIVED, self.note_received, RECEIVED_NOTICE, max_concurrent=QUESTIONS_AT_ONCE)
        transport.serve(COPIED, self.note_copy, COPY_REPORT, max_concurrent=QUESTIONS_AT_ONCE)

    def close(self) -> None:
        """Let all files go."""
        for opened in self._opened.values():
            opened.close()
        self._opened.clear()

    async def tell_standing(self, _sender: NodeId, frame: Frame) -> Frame:
        """Answer the question how far a stage is here."""
        return standing_answer(self.standing(frame.read(StatusRequest).stage))

    async def give_manifest(self, sender: NodeId, frame: Frame) -> Frame:
        """Answer with a snapshot's manifest. Raises RequestRefusedError."""
        self._refuse_stranger(sender)
        asked = frame.read(ManifestRequest)
        stage, max_age = asked.stage, max(asked.max_age_seconds, self._limits.youngest_seconds)
        snapshots, begun = self._of(stage), self._opened.get(asked.preferred)
        if begun is None:
            self._refuse_late(sender, stage)
        self._admit(sender, self._limits.asked_seconds)
        opened = begun or await self._newest(snapshots, max_age)
        self._use(opened)
        manifest = opened.manifest
        age = max(0.0, self._now() - manifest.meta.time)
        return await self._offload(lambda: manifest_frame(SnapshotManifest(manifest.document, manifest.digests, age)))

    async def give_chunk(self, sender: NodeId, frame: Frame) -> Frame:
        """Answer with one chunk. Raises RequestRefusedError."""
        self._refuse_stranger(sender)
        asked = frame.read(ChunkRequest)
        opened, index = self._opened.get(asked.snapshot), asked.index
        if opened is None:
            raise RequestRefusedError("This snapshot is not kept any more; ask for a newer one.")
        if index >= len(opened.manifest.digests):
            raise RequestRefusedError("The snapshot has no such chunk.")
        self._admit(sender, self._limits.idle_seconds)
        self._use(opened)
        try:
            data = await self._offload(lambda: opened.read(index))
        except (OSError, ValueError):  # ValueError: it was let go just now
            raise RequestRefusedError("This snapshot cannot be read any more; ask for a newer one.") from None
        return chunk_frame(data)

    async def note_received(self, sender: NodeId, frame: Frame) -> Frame:
        """Give the place of a node that has fetched what it wanted to others. Raises RequestRefusedError."""
        frame.read(ReceivedNotice)
        if self._receivers.pop(sender, None) is not None:
            self._have_all[sender] = anyio.current_time() + self._limits.idle_seconds
        return Frame(RECEIVED)

    def keep_only(self, nodes: Container[NodeId]) -> None:
        """Give the places of all other nodes to others, and wait for none of them: they are gone."""
        self._receivers = {node: until for node, until in self._receivers.items() if node in nodes}
        self._have_all = {node: until for node, until in self._have_all.items() if node in nodes}

    async def note_copy(self, sender: NodeId, frame: Frame) -> Frame:
        """Learn that a node keeps a copy. Raises RequestRefusedError."""
        self._refuse_stranger(sender)
        report = frame.read(CopyReport)
        self._of(report.stage).copied(sender, report.taken_at)
        self._receivers.pop(sender, None)  # it has all, and only keeps it
        self._have_all.pop(sender, None)
        return Frame(COPIED)

    def _refuse_stranger(self, sender: NodeId) -> None:
        """Raises RequestRefusedError for a node that has not shown that it is of the run; a joiner may be early."""
        if not self._is_of_run(sender):
            self._report(sender, ScoreReason.STRANGER)
            raise RequestRefusedError("Only members of the run get this, and this node has not heard of you.")

    def _of(self, stage: StageName) -> SnapshotSource:
        snapshots = self.local(stage)
        if snapshots is None:
            raise RequestRefusedError("This node has nothing of these layers.")
        return snapshots

    def _refuse_late(self, receiver: NodeId, stage: StageName) -> None:
        """Raises RequestRefusedError for who would have to fetch while the stage makes a step; it asks again."""
        now, wish = anyio.current_time(), (receiver, stage)
        self._put_off = {one: at for one, at in self._put_off.items() if at > now - self._limits.idle_seconds}
        if not self._of(stage).may_be_taken(now - self._put_off.setdefault(wish, now)):
            raise RequestRefusedError("The replicas of these layers step soon; try again after that.")
        del self._put_off[wish]

    def _admit(self, receiver: NodeId, seconds: float) -> None:
        """Give a receiver its place for so long. Raises RequestRefusedError when all are taken."""
        now = anyio.current_time()
        self._receivers = {node: until for node, until in self._receivers.items() if until > now}
        if receiver not in self._receivers and len(self._receivers) >= self._limits.receivers:
            raise RequestRefusedError("Others fetch from this node; try again a little later.")
        self._receivers[receiver] = max(now + seconds, self._receivers.get(receiver, now))

    async def _newest(self, snapshots: SnapshotSource, max_age_seconds: float) -> _Opened:
        """A snapshot that is young enough, or the youngest there is once a newer one is not worth waiting for."""
        found = None
        with anyio.move_on_after(self._limits.wait_seconds):
            while True:
                found = await self._offload(snapshots.newest)
                if found is not None and not self._is_outdated(found, snapshots.standing(), max_age_seconds):
                    break
                if snapshots.want() > self._limits.wait_seconds and found is not None:
                    break
                await anyio.sleep(LOOK_SECONDS)
        if found is None:
            raise RequestRefusedError("There is no snapshot of this stage yet; try again a little later.")
        async with self._opening:  # digests cost a second: one at a time, each once
            return await self._open(Path(found.path))

    def _is_outdated(self, found: CheckpointGeneration, standing: ReplicaStatus | None, max_age_seconds: float) -> bool:
        """Whether a newer snapshot is worth waiting for: a round since makes this one useless to who joins the line."""
        if standing is None or not standing.is_live:
            return False  # nobody makes a newer one
        age = self._now() - found.time
        if found.outer_step < standing.outer_step and max_age_seconds < ANY_AGE:
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
        """Keep it open, and let those go that nobody has used for long, or that are too many."""
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
    """The tensor file of a generation with the digests of its chunks. Raises OSError, CheckpointError."""
    tensors = decode_manifest(document).tensors
    file = path.with_name(tensors.file).open("rb")
    with contextlib.ExitStack() as closing:
        closing.enter_context(file)
        places = [chunk_range(index, tensors.bytes) for index in range(chunk_count(tensors.bytes))]
        digests = tuple(chunk_digest(file.read(len(place))) for place in places)
        closing.pop_all()
    return _Opened(SnapshotManifest(document, digests, 0.0), file)
