"""Data set files exchanged with other nodes: the two messages, the local store, the server and the client.

A file travels in parts. The client knows the digest of the file it requests, so a part carries no proof of its own: the
client checks the whole file. The server serves a few clients at once and uses a share of the upload limit.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Annotated, Protocol

import anyio
import anyio.to_thread
from msgspec import Meta, Struct, structs

from neuroshard.data.digest_check import DigestCheck
from neuroshard.data.manifest import MANIFEST_NAME, TOKENIZER_NAME, shard_of
from neuroshard.data.shard_cache import ShardCache
from neuroshard.data.storage import manifest_copy, page_copy, tokenizer_copy
from neuroshard.data.transfer import FileDamagedError, FileMissingError, OpenedFile
from neuroshard.errors import DataUnavailableError
from neuroshard.membership.download_rights import DATA_OF_READER, Readers
from neuroshard.messages import (
    Frame,
    FrameLimits,
    TensorPart,
    TensorSpec,
    UnexpectedTensorError,
    WireError,
)
from neuroshard.network import (
    PeerRefusedError,
    PeerUnreachableError,
    RequestRefusedError,
    ScoreReason,
    Transport,
    TransportClosedError,
)
from neuroshard.network.blocking import BlockingRunner
from neuroshard.network.limits import UploadPacer
from neuroshard.types import HexDigest, NamedRun, NodeId, RunId

DATA = "data/part"
PART_BYTES = 256 * 1024
MAX_HEADER_BYTES = 1024
_Size = Annotated[int, Meta(ge=0, le=1 << 40)]  # bytes


class DataPartRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """Requests the part of a file that begins at `start`; `address` names the exact contents of the file."""

    run_id: NamedRun
    name: Annotated[str, Meta(max_length=100)]  # in the Genesis folder
    address: HexDigest
    start: _Size = 0


class DataPartAnswer(Struct, frozen=True, forbid_unknown_fields=True):
    """The size of the whole file; the part itself is the frame's only tensor."""

    file_bytes: _Size


REQUEST_LIMITS = FrameLimits(MAX_HEADER_BYTES, message=DataPartRequest)
ANSWER_LIMITS = FrameLimits(MAX_HEADER_BYTES, PART_BYTES, message=DataPartAnswer)


@dataclass(frozen=True)
class DataPart:
    """A part of a file, and the size of the whole file."""

    file_bytes: int
    data: bytes


def part_size(file_bytes: int, start: int) -> int:
    """Return the number of bytes in the part that begins at `start`."""
    return max(0, min(PART_BYTES, file_bytes - start))


def file_answer_frame(given: DataPart) -> Frame:
    """Encode a part as the answer's frame."""
    part = TensorPart(TensorSpec("part", "uint8", (len(given.data),)), given.data)
    return Frame(DATA, DataPartAnswer(given.file_bytes), (part,))


def read_file_answer(frame: Frame, start: int) -> DataPart:
    """Decode the part that begins at `start`. Raises UnexpectedTensorError."""
    file_bytes = frame.read(DataPartAnswer).file_bytes
    expected = TensorSpec("part", "uint8", (part_size(file_bytes, start),))
    if not expected.byte_count or [part.spec for part in frame.tensors] != [expected]:
        raise UnexpectedTensorError("A part of the data has the wrong size.")
    return DataPart(file_bytes, bytes(frame.tensors[0].data))


_PAGE = re.compile(r"pages/[0-9]{5}\.bin", re.ASCII)
_TABLE = re.compile(rf"{re.escape(TOKENIZER_NAME)}|tokenizers/[0-9a-f]{{64}}\.json", re.ASCII)


@dataclass(frozen=True)
class DataFile:
    """A file on this computer that can be sent to other nodes."""

    path: Path
    size: int

    @classmethod
    def at(cls, path: Path) -> DataFile:
        """Open a description of the file with its present size. Raises OSError."""
        return cls(path, path.stat().st_size)

    def read(self, start: int, size: int) -> bytes:
        """Read bytes of the file; blocks. Raises OSError, also when the file became shorter."""
        with self.path.open("rb") as file:
            file.seek(start)
            data = file.read(size)
        if len(data) != size:
            raise OSError(f"{self.path.name} ends too early")
        return data


@dataclass(frozen=True)
class DataStore:
    """Finds this node's data files: data set descriptions in `store`, and shards in `cache`."""

    store: Path
    cache: ShardCache

    def find(self, name: str, address: str) -> DataFile | None:
        """Return the file of this name with exactly these contents, or None when it is not stored here."""
        shard = shard_of(name)
        if shard is not None:
            path = self.cache.file(shard, bytes.fromhex(address))
        else:
            copy = _copy_of(name, address)
            path = None if copy is None else self.store / copy
        try:
            return None if path is None else DataFile.at(path)
        except OSError:
            return None


def _copy_of(name: str, address: str) -> str | None:
    if name == MANIFEST_NAME:
        return manifest_copy(address)
    if _PAGE.fullmatch(name):
        return page_copy(address)
    return tokenizer_copy(address) if _TABLE.fullmatch(name) else None


UPLOAD_SHARE = 0.5  # of the owner's limit: activations and rounds come first
LONGEST_QUEUE_SECONDS = 10.0  # of promised uploads; later requests are refused
PARTS_AT_ONCE = 4


@dataclass(frozen=True)
class DataServerLimits:
    """Resources that other nodes may use on this node."""

    receivers: int = 4  # nodes that download at the same time
    idle_seconds: float = 20.0  # after that a receiver is considered gone
    open_files: int = 8


@dataclass
class DataServer:
    """Serves data files of one run. Belongs to the event loop; `find` and reading run where blocking is allowed."""

    run_id: RunId
    find: Callable[[str, str], DataFile | None]
    is_of_run: Callable[[NodeId], bool]
    limits: DataServerLimits = field(default_factory=DataServerLimits)
    offload: BlockingRunner = anyio.to_thread.run_sync
    report: Callable[[NodeId, ScoreReason], None] = lambda _peer, _reason: None
    readers: Readers | None = None  # nodes that wait for a place in the run and may download already

    def __post_init__(self) -> None:
        self.bytes_given = 0
        self._pacer = UploadPacer()
        self._receivers: dict[NodeId, float] = {}  # time when each receiver's place expires
        self._found: OrderedDict[tuple[str, str], DataFile] = OrderedDict()

    def limit_upload(self, bytes_per_second: float | None) -> None:
        """Set the owner's limit for everything that this node sends; data use a share of it."""
        self._pacer.limit(None if bytes_per_second is None else bytes_per_second * UPLOAD_SHARE)

    def serve(self, transport: Transport) -> None:
        """Register the request handler."""
        transport.serve(DATA, self.give, REQUEST_LIMITS, max_concurrent=PARTS_AT_ONCE)

    async def give(self, sender: NodeId, frame: Frame) -> Frame:
        """Answer with a part. Raises RequestRefusedError."""
        is_reader = self.readers is not None and self.readers.may_read(sender)
        if not is_reader and not self.is_of_run(sender):
            self.report(sender, ScoreReason.STRANGER)
            raise RequestRefusedError("This node serves only members of the run, and does not know you as a member.")
        wanted = frame.read(DataPartRequest)
        if wanted.run_id != self.run_id:
            raise RequestRefusedError("This node is not of that run.")
        if self._pacer.seconds_behind() > LONGEST_QUEUE_SECONDS:
            raise RequestRefusedError("This node's line is busy; ask another one.")
        file = await self._file(wanted)
        size = part_size(file.size, wanted.start)
        if not size:
            raise RequestRefusedError("The file has no such part.")
        if is_reader and self.readers is not None:
            if self._receiving():
                raise RequestRefusedError("Members of the run fetch from this node; ask another one.")
            await self.readers.spend(sender, "data", size, DATA_OF_READER)
        else:
            self._admit(sender)
        try:
            data = await self.offload(lambda: file.read(wanted.start, size))
        except OSError:  # the cache removed it to free space
            self._found.pop((wanted.name, wanted.address), None)
            raise RequestRefusedError(f"{wanted.name} is no longer here.") from None
        await self._pacer.spend(size)
        self.bytes_given += size
        return file_answer_frame(DataPart(file.size, data))

    def _admit(self, receiver: NodeId) -> None:
        """Reserve a place for a receiver. Raises RequestRefusedError when all places are taken."""
        if receiver not in self._receiving() and len(self._receivers) >= self.limits.receivers:
            raise RequestRefusedError("Others fetch from this node; ask another one.")
        self._receivers[receiver] = anyio.current_time() + self.limits.idle_seconds

    def _receiving(self) -> dict[NodeId, float]:
        """The members that fetch now, with the time when the place of each expires."""
        now = anyio.current_time()
        self._receivers = {node: until for node, until in self._receivers.items() if until > now}
        return self._receivers

    async def _file(self, wanted: DataPartRequest) -> DataFile:
        """Return the file, checked at its first request only; the receiver checks the bytes it gets."""
        key = wanted.name, wanted.address
        file = self._found.get(key) or await self.offload(lambda: self.find(*key))
        if file is None:
            raise RequestRefusedError(f"{wanted.name} is not here.")
        self._found[key] = file
        self._found.move_to_end(key)
        while len(self._found) > self.limits.open_files:
            self._found.popitem(last=False)
        return file


PART_SECONDS = 60.0
MOST_ASKED = 8  # nodes asked for one file at a time
LIAR_SECONDS = 3600.0


class PeerRequests(Protocol):
    """Transport.request, which first dials a peer that is not connected."""

    async def request(
        self, peer: NodeId, frame: Frame, *, reply: FrameLimits | None = None, timeout_seconds: float
    ) -> Frame: ...


class _LyingError(Exception):
    """A node sent bytes that are not those of the file."""

    def __init__(self, message: str, reason: ScoreReason) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass
class DataClient:
    """Downloads data files from other nodes (an AlternativeSource); `holders` finds nodes that may have a file.

    It belongs to one event loop.
    """

    run_id: RunId
    requester: PeerRequests
    holders: Callable[[str], Sequence[NodeId]]
    random: Random
    report: Callable[[NodeId, ScoreReason], None] = lambda _peer, _reason: None
    bytes_received: int = 0
    _liars: dict[NodeId, float] = field(default_factory=dict[NodeId, float])  # time until which each is avoided

    def may_have(self, name: str, address: str) -> bool:
        """Return whether a known node may have the file."""
        return bool(self._candidates(name))

    @asynccontextmanager
    async def open(self, name: str, address: str) -> AsyncGenerator[OpenedFile]:
        """Open the file at the first node that sends its first part.

        Raises FileMissingError when no node has it, DataUnavailableError when the node is lost, FileDamagedError when
        the node sent wrong bytes.
        """
        candidates = list(self._candidates(name))
        self.random.shuffle(candidates)
        wanted, trouble = DataPartRequest(self.run_id, name, address), ""
        for peer in candidates[:MOST_ASKED]:
            try:
                first = await self.part(peer, wanted)
            except DataUnavailableError as error:
                trouble = f" {error}"
                continue
            except _LyingError as error:
                self.accuse(peer, error)
                continue
            yield OpenedFile(0, first.file_bytes, None, _Chunks(self, peer, wanted, first))
            return
        raise FileMissingError(f"No node of the run sends {name}.{trouble}")

    def _candidates(self, name: str) -> Sequence[NodeId]:
        now = anyio.current_time()
        self._liars = {node: until for node, until in self._liars.items() if until > now}
        return [node for node in self.holders(name) if node not in self._liars]

    async def part(self, peer: NodeId, wanted: DataPartRequest) -> DataPart:
        """Request one part from one node. Raises DataUnavailableError, _LyingError."""
        try:
            with anyio.move_on_after(PART_SECONDS):  # the node may have to be dialled first
                answer = await self.requester.request(
                    peer, Frame(DATA, wanted), reply=ANSWER_LIMITS, timeout_seconds=PART_SECONDS
                )
                given = read_file_answer(answer, wanted.start)
                self.bytes_received += len(given.data)
                return given
        except (PeerUnreachableError, PeerRefusedError, TransportClosedError) as error:
            raise DataUnavailableError(error.message) from None
        except WireError as error:
            raise _LyingError(error.message, ScoreReason.UNEXPECTED_TENSOR) from None
        raise DataUnavailableError(f"Node {peer} did not answer within {PART_SECONDS:g} s.")

    def accuse(self, peer: NodeId, error: _LyingError) -> None:
        """Avoid a node for a while, and lower its reputation."""
        self._liars[peer] = anyio.current_time() + LIAR_SECONDS
        self.report(peer, error.reason)


class _Chunks:
    """A file from one node, which ends only when all of it has its digest.

    It is not a generator: one abandoned half-way would be closed by the garbage collector outside its task.
    """

    def __init__(self, client: DataClient, peer: NodeId, wanted: DataPartRequest, first: DataPart) -> None:
        self._client = client
        self._peer = peer
        self._wanted = wanted
        self._file_bytes = first.file_bytes
        self._digest = DigestCheck()
        self._start = 0
        self._next: DataPart | None = first

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        if self._start == self._file_bytes:
            raise StopAsyncIteration
        try:
            given = self._next or await self._client.part(self._peer, structs.replace(self._wanted, start=self._start))
            return self._checked(given)
        except _LyingError as error:
            self._client.accuse(self._peer, error)
            raise FileDamagedError(f"{self._wanted.name} from node {self._peer} is refused: {error}") from None

    def _checked(self, given: DataPart) -> bytes:
        if given.file_bytes != self._file_bytes:
            raise _LyingError("It gave parts of different files.", ScoreReason.UNEXPECTED_TENSOR)
        self._digest.add(given.data)
        self._next, self._start = None, self._start + len(given.data)
        # The address is the digest, except for a manifest, which its reader checks.
        is_checked = self._start == self._file_bytes and self._wanted.name != MANIFEST_NAME
        if is_checked and not self._digest.matches(self._wanted.address):
            raise _LyingError("It does not match its digest.", ScoreReason.DIGEST_MISMATCH)
        return given.data
