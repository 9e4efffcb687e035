"""Gives members of the run the files of its data set that lie here, a few at once and within a share of the line."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import anyio
import anyio.to_thread

from neuroshard.data.packed import PackedFile
from neuroshard.network import RequestRefusedError, ScoreReason, Transport
from neuroshard.network.pacing import UploadPacer
from neuroshard.swarm.data_sharing.frames import (
    DATA,
    REQUEST_LIMITS,
    Given,
    Wanted,
    answer_frame,
    part_size,
    read_request,
)
from neuroshard.swarm.offload import Offload
from neuroshard.types import NodeId, RunId
from neuroshard.wire import Frame

UPLOAD_SHARE = 0.5  # of the owner's limit: activations and rounds come first
LONGEST_QUEUE_SECONDS = 10.0  # of what was promised; whoever asks then is sent to another node
PARTS_AT_ONCE = 4


@dataclass(frozen=True)
class GivingLimits:
    """What others may cost this node."""

    receivers: int = 4  # nodes that fetch at the same time
    idle_seconds: float = 20.0  # after that a receiver is gone
    open_files: int = 8


@dataclass
class DataGiver:
    """For one run. Belongs to the event loop; `find` and reading run where blocking is allowed."""

    run_id: RunId
    find: Callable[[str, str], PackedFile | None]
    is_of_run: Callable[[NodeId], bool]
    limits: GivingLimits = field(default_factory=GivingLimits)
    offload: Offload = anyio.to_thread.run_sync
    report: Callable[[NodeId, ScoreReason], None] = lambda _peer, _reason: None

    def __post_init__(self) -> None:
        self.bytes_given = 0
        self._pacer = UploadPacer()
        self._receivers: dict[NodeId, float] = {}  # until when they have their places
        self._found: OrderedDict[tuple[str, str], PackedFile] = OrderedDict()

    def limit_upload(self, bytes_per_second: float | None) -> None:
        """What the owner allows for everything that this node sends; a share of it is for data."""
        self._pacer.limit(None if bytes_per_second is None else bytes_per_second * UPLOAD_SHARE)

    def serve(self, transport: Transport) -> None:
        """Answer from now on."""
        transport.serve(DATA, self.give, REQUEST_LIMITS, max_concurrent=PARTS_AT_ONCE)

    async def give(self, sender: NodeId, frame: Frame) -> Frame:
        """Answer with a part. Raises RequestRefusedError."""
        if not self.is_of_run(sender):
            self.report(sender, ScoreReason.STRANGER)
            raise RequestRefusedError("Only members of the run get this, and this node has not heard of you.")
        wanted = read_request(frame)
        if wanted.run_id != self.run_id:
            raise RequestRefusedError("This node is not of that run.")
        if self._pacer.seconds_behind() > LONGEST_QUEUE_SECONDS:
            raise RequestRefusedError("This node's line is busy; ask another one.")
        file = await self._file(wanted)
        self._admit(sender)
        size = part_size(file.layout, wanted.start)
        if not size:
            raise RequestRefusedError("The file has no such part.")
        try:
            data = await self.offload(lambda: file.read(wanted.start, size))
        except OSError:  # removed to make room
            self._found.pop((wanted.name, wanted.address), None)
            raise RequestRefusedError(f"{wanted.name} is not here any more.") from None
        await self._pacer.spend(size)
        self.bytes_given += size
        return answer_frame(Given(file.layout, data))

    def _admit(self, receiver: NodeId) -> None:
        """Raises RequestRefusedError when all places are taken."""
        now = anyio.current_time()
        self._receivers = {node: until for node, until in self._receivers.items() if until > now}
        if receiver not in self._receivers and len(self._receivers) >= self.limits.receivers:
            raise RequestRefusedError("Others fetch from this node; ask another one.")
        self._receivers[receiver] = now + self.limits.idle_seconds

    async def _file(self, wanted: Wanted) -> PackedFile:
        """The file, checked when it was first asked for; what comes of it the receiver checks."""
        key = wanted.name, wanted.address
        file = self._found.get(key) or await self.offload(lambda: self.find(*key))
        if file is None:
            raise RequestRefusedError(f"{wanted.name} is not here.")
        self._found[key] = file
        self._found.move_to_end(key)
        while len(self._found) > self.limits.open_files:
            self._found.popitem(last=False)
        return file
