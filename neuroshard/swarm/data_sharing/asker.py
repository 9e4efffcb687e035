"""Files of the data set from other nodes of the run: one node gives a file, and all of it is checked."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from hashlib import sha256
from random import Random
from typing import Protocol

import anyio

from neuroshard.data.genesis.layout import MANIFEST_NAME
from neuroshard.data.opened_file import OpenedFile
from neuroshard.data.packed import Unpacker
from neuroshard.data.retry import FileDamagedError, FileMissingError
from neuroshard.errors import DataUnavailableError
from neuroshard.network import PeerRefusedError, PeerUnreachableError, ScoreReason, TransportClosedError
from neuroshard.swarm.data_sharing.frames import ANSWER_LIMITS, Given, Wanted, read_answer, request_frame
from neuroshard.types import NodeId, RunId
from neuroshard.wire import Frame, FrameLimits, WireError

PART_SECONDS = 60.0
MOST_ASKED = 8  # nodes for one file at a time
LIAR_SECONDS = 3600.0


class Requester(Protocol):
    """Transport.request, to a peer that is dialled first when it must be."""

    async def request(
        self, peer: NodeId, frame: Frame, *, reply: FrameLimits | None = None, timeout_seconds: float
    ) -> Frame:
        """See Transport."""
        ...


class _LyingError(Exception):
    """A node gave what is not the file."""

    def __init__(self, message: str, reason: ScoreReason) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass
class DataAsker:
    """The other nodes as OtherGivers; `holders` tells who may have a file. Belongs to one event loop."""

    run_id: RunId
    requester: Requester
    holders: Callable[[str], Sequence[NodeId]]
    random: Random
    report: Callable[[NodeId, ScoreReason], None] = lambda _peer, _reason: None
    bytes_received: int = 0
    _liars: dict[NodeId, float] = field(default_factory=dict[NodeId, float])  # until when they are left alone

    def may_have(self, name: str, address: str) -> bool:
        """Whether somebody is known who may have it."""
        return bool(self._candidates(name))

    @asynccontextmanager
    async def open(self, name: str, address: str) -> AsyncGenerator[OpenedFile]:
        """The file from the first node that gives its first part.

        Raises FileMissingError when nobody has it, DataUnavailableError when the giver is lost, FileDamagedError when
        it lied.
        """
        candidates = list(self._candidates(name))
        self.random.shuffle(candidates)
        wanted, trouble = Wanted(self.run_id, name, address), ""
        for peer in candidates[:MOST_ASKED]:
            try:
                first = await self.part(peer, wanted)
            except DataUnavailableError as error:
                trouble = f" {error}"
                continue
            except _LyingError as error:
                self.accuse(peer, error)
                continue
            yield OpenedFile(0, first.layout.file_bytes, None, _Chunks(self, peer, wanted, first))
            return
        raise FileMissingError(f"No node of the run gives {name}.{trouble}")

    def _candidates(self, name: str) -> Sequence[NodeId]:
        now = anyio.current_time()
        self._liars = {node: until for node, until in self._liars.items() if until > now}
        return [node for node in self.holders(name) if node not in self._liars]

    async def part(self, peer: NodeId, wanted: Wanted) -> Given:
        """One part from one node. Raises DataUnavailableError, _LyingError."""
        try:
            with anyio.move_on_after(PART_SECONDS):  # it may have to be dialled first
                answer = await self.requester.request(
                    peer, request_frame(wanted), reply=ANSWER_LIMITS, timeout_seconds=PART_SECONDS
                )
                given = read_answer(answer, wanted.start)
                self.bytes_received += len(given.data)
                return given
        except (PeerUnreachableError, PeerRefusedError, TransportClosedError) as error:
            raise DataUnavailableError(error.message) from None
        except WireError as error:
            raise _LyingError(error.message, ScoreReason.UNEXPECTED_TENSOR) from None
        raise DataUnavailableError(f"Node {peer} did not answer within {PART_SECONDS:g} s.")

    def accuse(self, peer: NodeId, error: _LyingError) -> None:
        """Leave a node alone for a while, and let its reputation fall."""
        self._liars[peer] = anyio.current_time() + LIAR_SECONDS
        self.report(peer, error.reason)


class _Chunks:
    """A file from one node, whose end comes only when all of it has its digest.

    No generator: one left half-way would be collected uncleanly.
    """

    def __init__(self, asker: DataAsker, peer: NodeId, wanted: Wanted, first: Given) -> None:
        self._asker = asker
        self._peer = peer
        self._wanted = wanted
        self._layout = first.layout
        self._unpacker = Unpacker(first.layout)
        self._digest = sha256()
        self._start = 0
        self._next: Given | None = first

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        if self._unpacker.is_done:
            raise StopAsyncIteration
        try:
            given = self._next or await self._asker.part(self._peer, replace(self._wanted, start=self._start))
            return self._checked(given)
        except _LyingError as error:
            self._asker.accuse(self._peer, error)
            raise FileDamagedError(f"{self._wanted.name} from node {self._peer} is refused: {error}") from None

    def _checked(self, given: Given) -> bytes:
        if given.layout != self._layout:
            raise _LyingError("It gave parts of different files.", ScoreReason.UNEXPECTED_TENSOR)
        chunk = self._unpacker.feed(given.data)
        self._digest.update(chunk)
        self._next, self._start = None, self._start + len(given.data)
        # the address of all but a manifest is its digest; a manifest's is checked by whoever reads it
        is_checked = self._unpacker.is_done and self._wanted.name != MANIFEST_NAME
        if is_checked and self._digest.hexdigest() != self._wanted.address:
            raise _LyingError("It does not match its digest.", ScoreReason.DIGEST_MISMATCH)
        return chunk
