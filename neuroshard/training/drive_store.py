"""Files of a driver: its data position, written before the data are used, its sessions, and a record without layers."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import anyio
import anyio.to_thread
import torch

from neuroshard.config.state_file import StateFile
from neuroshard.data.feed import HeldOut
from neuroshard.data.held_out_losses import PINNED_SEQUENCES, Evaluation
from neuroshard.data.windows import Batch
from neuroshard.errors import StorageError
from neuroshard.pipeline.driver import Feed
from neuroshard.status.data import DataStatus
from neuroshard.status.snapshot import LossPoint
from neuroshard.training.record import EvaluationRecord, LossCurve, Progress, TrainingRecord
from neuroshard.types import DataPosition, NodeId, RunId, WalletId

_LOG = logging.getLogger(__name__)

T = TypeVar("T")

MAX_FILE_BYTES = 4_000_000
POSITION_FILE = "position.json"
SESSIONS_FILE = "sessions.json"
SESSIONS_OF_A_START = 10**8  # more than one start opens if the clock never advances
RECORD_FILE = "record.json"
_ADVICE = "Move it away: the data then continue from the place in the other files of its folder, or from the beginning."


@dataclass(frozen=True)
class _StoredPosition:
    node_id: NodeId  # node whose data assignment contains the position
    position: DataPosition  # everything before it was sent or was about to be sent


@dataclass(frozen=True)
class _StoredSessions:
    first: int  # first session of the last start


@dataclass(frozen=True)
class DriverRecord:
    """Contents of record.json."""

    node_id: NodeId
    progress: Progress
    history: tuple[LossPoint, ...]
    evaluations: tuple[Evaluation, ...]
    evaluation_seconds: float | None
    pinned_digest: str


class DriveStore:
    """Small files of one driver and run. Methods that write may run on any thread, but not concurrently."""

    def __init__(self, data_dir: Path, wallet_id: WalletId, node_id: NodeId, run_id: RunId) -> None:
        self.folder = data_dir / "drives" / wallet_id / run_id
        self._data_dir = data_dir
        self._node_id = node_id
        self._position = self._file(POSITION_FILE, _StoredPosition)
        self._sessions = self._file(SESSIONS_FILE, _StoredSessions)
        self._record = self._file(RECORD_FILE, DriverRecord)

    def load(self) -> TrainingRecord:
        """Load the record of earlier starts with the last written position; a new record without files.

        Raises StorageError for files that cannot be read.
        """
        stored, place = self._record.read(), self._position.read()
        record = TrainingRecord()
        if stored is not None:
            record = TrainingRecord(
                stored.progress,
                LossCurve(stored.history),
                EvaluationRecord(stored.evaluations),
                stored.evaluation_seconds,
                stored.node_id,
                stored.pinned_digest,
            )
        if place is not None:
            record.node_id = place.node_id
            record.progress = replace(record.progress, position=place.position)
        return record

    def start_after(self, record: TrainingRecord) -> tuple[DataPosition | None, NodeId | None]:
        """Data position from which a node with this restored record continues, and the node whose position it is.

        A checkpoint contains the position after its last step. Data sent after that may already be part of steps of
        other nodes, so the position file is used if it is not behind. Raises StorageError for a file that cannot be
        read.
        """
        place = self._position.read()
        own, checkpointed = record.node_id in (None, self._node_id), record.progress.position
        if place is None or place.node_id != self._node_id:
            return checkpointed, record.node_id
        if own and checkpointed is not None and _is_later(checkpointed, place.position):
            return checkpointed, record.node_id
        return place.position, place.node_id

    def note_position(self, position: DataPosition) -> None:
        """Write a data position to disk. Raises StorageError."""
        self._position.write(_StoredPosition(self._node_id, position))

    def first_session(self, now: float) -> int:
        """Return a session number above those of all earlier sessions, which other nodes may remember as closed.

        The number is in milliseconds since the epoch, and no driver opens sessions faster than that. The last returned
        number is stored in case the clock is set back. Raises StorageError for a file that cannot be read.
        """
        before = self._sessions.read()
        first = max(int(now * 1000), 0 if before is None else before.first + SESSIONS_OF_A_START)
        try:
            self._sessions.write(_StoredSessions(first))
        except StorageError as error:
            _LOG.warning("%s", error)
        return first

    def stored_form(self, record: TrainingRecord) -> DriverRecord:
        """Copy the present record for `save`, which may run on another thread."""
        return DriverRecord(
            self._node_id,
            record.progress,
            record.history.snapshot(),
            tuple(each for each in record.evaluations.evaluations if each.is_finite),  # JSON has no other numbers
            record.evaluation_seconds,
            record.pinned_digest,
        )

    def save(self, record: DriverRecord) -> None:
        """Write a record to disk. Raises StorageError."""
        self._record.write(record)

    def _file(self, name: str, form: type[T]) -> StateFile[T]:
        path = self.folder / name
        return StateFile(path, form, "fail", _ADVICE, max_bytes=MAX_FILE_BYTES, data_dir=self._data_dir)


def _is_later(one: DataPosition, other: DataPosition) -> bool:
    return (one.order, one.window) > (other.order, other.window)


RETRY_SECONDS = 5.0  # while the position cannot be written
BATCHES_AT_ONCE = 8  # read and noted together: one disk write takes as long as computing a small microbatch


class WriteAheadFeed:
    """Feed that writes the data position to disk before it returns the data, so that a restart never sends data twice.

    While the position cannot be written, it returns no data. After a kill, the batches that were read but not returned,
    fewer than BATCHES_AT_ONCE, are left out until the next pass.
    """

    def __init__(
        self, feed: Feed, note: Callable[[DataPosition], None], is_needed: Callable[[], bool] = lambda: True
    ) -> None:
        """`note` writes a position to disk on another thread. Raises StorageError if it cannot.

        While `is_needed` returns False, no data leave this node, and its checkpoints contain the position.
        """
        self._feed = feed
        self._note = note
        self._is_needed = is_needed
        self._trouble = ""
        self._taken: deque[Batch] = deque()  # one sequence each, read but not yet returned
        self._safe = 0  # number of first entries of `_taken` whose position is on disk
        self._given: DataPosition | None = None
        self._noted: DataPosition | None = None  # the last position on disk

    @property
    def position(self) -> DataPosition:
        """First window after the returned data."""
        return self._given or self._feed.position

    async def next_batch(self, sequences: int, *, step: int | None = None) -> Batch:
        """Return the next batch. Data that a cancelled call has read are returned by the next call."""
        if self._is_needed() or self._taken:
            while self._safe < sequences:
                await self._take(BATCHES_AT_ONCE * sequences, step)
            self._safe -= sequences
            batch = _joined([self._taken.popleft() for _ in range(sequences)])
        else:
            batch = await self._feed.next_batch(sequences, step=step)
        self._given = batch.position
        return batch

    async def _take(self, sequences: int, step: int | None) -> None:
        """Read until `sequences` sequences are ready, and write the position after them to disk."""
        while len(self._taken) < sequences:
            self._taken.append(await self._feed.next_batch(1, step=step))
        await self._make_safe(self._taken[-1].position)
        self._safe = len(self._taken)

    async def held_out(self, count: int = PINNED_SEQUENCES) -> HeldOut:
        return await self._feed.held_out(count)

    def note_evaluation(self, train_loss: float, held_out_loss: float | None, step: int) -> None:
        self._feed.note_evaluation(train_loss, held_out_loss, step)

    def rewind(self, position: DataPosition) -> None:
        """Continue from an earlier position, but not from one before data that may have left this node."""
        while len(self._taken) > self._safe:  # read by a cancelled call, and never noted
            self._taken.pop()
        if self._noted is not None and _is_later(self._noted, position):
            position = self._noted
        if position != self._feed.position:  # otherwise the data in `_taken` follow, which are read but not returned
            self._feed.rewind(position)
            self._given = self._given if self._taken else None

    def status(self) -> DataStatus:
        """Status of the feed, with the reason while the position cannot be written."""
        status = self._feed.status()
        return replace(status, explanation=f"{status.explanation} {self._trouble}".strip())

    async def _make_safe(self, position: DataPosition) -> None:
        while True:
            try:
                await anyio.to_thread.run_sync(self._note, position)
            except StorageError as error:
                self._trouble = error.message
                _LOG.warning("%s Driving stops until the file can be written.", self._trouble)
                await anyio.sleep(RETRY_SECONDS)
            else:
                self._trouble, self._noted = "", position
                return


def _joined(batches: Sequence[Batch]) -> Batch:
    """Concatenate batches in their order."""
    inputs, labels = torch.cat([one.input_ids for one in batches]), torch.cat([one.labels for one in batches])
    return Batch(inputs, labels, batches[-1].position, sum(one.token_count for one in batches))
