"""Files of a driver: its data position, written before the data are used, its sessions, and a record without layers."""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import torch

from neuroshard.config.state_file import make_folder, write_atomically
from neuroshard.data.feed import HeldOut
from neuroshard.data.held_out_losses import PINNED_SEQUENCES, Evaluation, EvaluationRecord
from neuroshard.data.windows import Batch
from neuroshard.errors import StorageError
from neuroshard.pipeline.driver import Feed
from neuroshard.status.data import DataStatus
from neuroshard.status.snapshot import LossPoint
from neuroshard.training.record import LossHistory, Progress, TrainingRecord
from neuroshard.types import DataPosition, NodeId, RunId, WalletId

if TYPE_CHECKING:
    from pydantic import TypeAdapter


_LOG = logging.getLogger(__name__)

MAX_FILE_BYTES = 4_000_000
POSITION_FILE = "position.json"
SESSIONS_FILE = "sessions.json"
SESSIONS_OF_A_START = 10**8  # more than a start opens while the clock stands still
RECORD_FILE = "record.json"
_START_ANEW = "Move it away: the data then go on where the other file in its folder says, or from the beginning."


@dataclass(frozen=True)
class _StoredPosition:
    node_id: NodeId  # whose assignment it is a place in
    position: DataPosition  # everything before it was sent, or was about to be


@dataclass(frozen=True)
class _StoredSessions:
    first: int  # of the last start


@dataclass(frozen=True)
class _StoredRecord:
    node_id: NodeId
    progress: Progress
    history: tuple[LossPoint, ...]
    evaluations: tuple[Evaluation, ...]
    evaluation_seconds: float | None
    pinned_digest: str


class DriveStore:
    """Two small files of one node and run. What writes may be called in any thread, once at a time."""

    def __init__(self, data_dir: Path, wallet_id: WalletId, node_id: NodeId, run_id: RunId) -> None:
        self.folder = data_dir / "drives" / wallet_id / run_id
        self._data_dir = data_dir
        self._node_id = node_id

    def load(self) -> TrainingRecord:
        """The record of earlier starts, with the position that was written last; a new one when there are none.

        Raises StorageError for files that cannot be read.
        """
        stored: _StoredRecord | None = self._read(RECORD_FILE, _record_reader())
        place: _StoredPosition | None = self._read(POSITION_FILE, _position_reader())
        record = TrainingRecord()
        if stored is not None:
            record = TrainingRecord(
                stored.progress,
                LossHistory(stored.history),
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
        """Where a node that restores this record goes on in its data, and whose place that is.

        A checkpoint knows the data behind its last step; what was sent after it lies behind the steps of other nodes.
        Raises StorageError for a file that cannot be read.
        """
        place: _StoredPosition | None = self._read(POSITION_FILE, _position_reader())
        own, checkpointed = record.node_id in (None, self._node_id), record.progress.position
        if place is None or place.node_id != self._node_id:
            return checkpointed, record.node_id
        if own and checkpointed is not None and _is_later(checkpointed, place.position):
            return checkpointed, record.node_id
        return place.position, place.node_id

    def note_position(self, position: DataPosition) -> None:
        """Make a position safe. Raises OSError."""
        self._write(POSITION_FILE, _encoded(_StoredPosition(self._node_id, position)))

    def first_session(self, now: float) -> int:
        """A number above those of all earlier sessions, which other nodes may remember as closed.

        Milliseconds since the epoch: no driver opens a session in less. What was given out last is remembered for the
        day on which the clock was set back. Raises StorageError for a file that cannot be read.
        """
        before: _StoredSessions | None = self._read(SESSIONS_FILE, _sessions_reader())
        first = max(int(now * 1000), 0 if before is None else before.first + SESSIONS_OF_A_START)
        try:
            self._write(SESSIONS_FILE, _encoded(_StoredSessions(first)))
        except OSError as error:
            _LOG.warning("%s cannot be written: %s.", self.folder / SESSIONS_FILE, error.strerror or error)
        return first

    def encoded(self, record: TrainingRecord) -> bytes:
        """The record as it is now, for `save`."""
        stored = _StoredRecord(
            self._node_id,
            record.progress,
            record.history.snapshot(),
            record.evaluations.evaluations,
            record.evaluation_seconds,
            record.pinned_digest,
        )
        return _encoded(stored)

    def save(self, record: bytes) -> None:
        """Make an encoded record safe. Raises OSError."""
        self._write(RECORD_FILE, record)

    def _write(self, name: str, data: bytes) -> None:
        make_folder(self.folder, self._data_dir)
        write_atomically(self.folder / name, data)

    def _read(self, name: str, reader: TypeAdapter[Any]) -> Any:
        from pydantic import ValidationError

        file = self.folder / name
        try:
            with file.open("rb") as stream:
                return reader.validate_json(stream.read(MAX_FILE_BYTES), strict=True)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StorageError(f"{file} cannot be read: {error.strerror}.", "Give it back to this user.") from error
        except ValidationError as error:
            raise StorageError(f"{file} is damaged.", _START_ANEW) from error


def _is_later(one: DataPosition, other: DataPosition) -> bool:
    return (one.order, one.window) > (other.order, other.window)


def _encoded(value: _StoredPosition | _StoredRecord | _StoredSessions) -> bytes:
    return json.dumps(asdict(value), allow_nan=False).encode()


@cache
def _position_reader() -> TypeAdapter[Any]:
    """Built on first use: pydantic is not needed to train."""
    from pydantic import TypeAdapter

    return TypeAdapter(_StoredPosition)


@cache
def _sessions_reader() -> TypeAdapter[Any]:
    from pydantic import TypeAdapter

    return TypeAdapter(_StoredSessions)


@cache
def _record_reader() -> TypeAdapter[Any]:
    from pydantic import TypeAdapter

    return TypeAdapter(_StoredRecord)


RETRY_SECONDS = 5.0  # while the position cannot be written
BATCHES_AT_ONCE = 8  # are taken and noted together: writing costs a disk as much as computing a small microbatch


class WriteAheadFeed:
    """See Feed. While the position cannot be written no data are given out: they might be sent twice.

    A kill leaves out what was taken and not yet given out, less than BATCHES_AT_ONCE batches, until the next pass.
    """

    def __init__(
        self, feed: Feed, note: Callable[[DataPosition], None], is_needed: Callable[[], bool] = lambda: True
    ) -> None:
        """`note` makes a position safe, in another thread; it raises OSError when it cannot.

        While it is not needed, no data leave this node: its checkpoints say where they go on.
        """
        self._feed = feed
        self._note = note
        self._is_needed = is_needed
        self._trouble = ""
        self._taken: deque[Batch] = deque()  # of one sequence each, not yet given out
        self._safe = 0  # of those, from the first one on
        self._given: DataPosition | None = None

    @property
    def position(self) -> DataPosition:
        """See Feed: behind what was given out."""
        return self._given or self._feed.position

    async def next_batch(self, sequences: int, *, step: int | None = None) -> Batch:
        """See Feed. After a call that was cancelled, the next one may give what that one had taken."""
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
        """Have so many ready, their position safe."""
        while len(self._taken) < sequences:
            self._taken.append(await self._feed.next_batch(1, step=step))
        await self._make_safe(self._taken[-1].position)
        self._safe = len(self._taken)

    async def held_out(self, count: int = PINNED_SEQUENCES) -> HeldOut:
        """See Feed."""
        return await self._feed.held_out(count)

    def note_evaluation(self, train_loss: float, held_out_loss: float | None, step: int) -> None:
        """See Feed."""
        self._feed.note_evaluation(train_loss, held_out_loss, step)

    def status(self) -> DataStatus:
        """See Feed."""
        status = self._feed.status()
        return replace(status, explanation=f"{status.explanation} {self._trouble}".strip())

    async def _make_safe(self, position: DataPosition) -> None:
        while True:
            try:
                await anyio.to_thread.run_sync(self._note, position)
            except OSError as error:
                self._trouble = f"The data position cannot be written: {error.strerror or error}."
                _LOG.warning("%s Nothing is driven until it can.", self._trouble)
                await anyio.sleep(RETRY_SECONDS)
            else:
                self._trouble = ""
                return


def _joined(batches: Sequence[Batch]) -> Batch:
    """One behind the other."""
    inputs, labels = torch.cat([one.input_ids for one in batches]), torch.cat([one.labels for one in batches])
    return Batch(inputs, labels, batches[-1].position, sum(one.token_count for one in batches))
