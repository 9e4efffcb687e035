"""Records what this computer contributes to training, in the data folder, across restarts and kills."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

import anyio
import anyio.to_thread

from neuroshard.config.state_file import StateFile
from neuroshard.errors import StorageError
from neuroshard.status.board import Publisher, StatusBoard
from neuroshard.status.history import WorkDone
from neuroshard.status.snapshot import NodeState, NodeStatus
from neuroshard.telemetry.work_history import WorkHistory, WorkRecord
from neuroshard.types import LayerRange
from neuroshard.waiting import sleep_to_tick

_LOG = logging.getLogger(__name__)

FILE_NAME = "contribution.json"
MOST_BYTES = 1_000_000
LOOK_SECONDS = 1.0
SHOW_SECONDS = 5.0
SAVE_SECONDS = 60.0  # a kill may lose the work of this time
MOST_ELAPSED_SECONDS = 10.0  # counted between two looks: a computer that slept has not trained


class WorkMeter:
    """Computes the work between two snapshots. Its only state is the figures of the previous snapshot."""

    def __init__(self) -> None:
        self._uptime: float | None = None
        self._bytes = (0, 0)
        self._counts: tuple[LayerRange | None, int, int] | None = None  # layers, steps, tokens; None: no trainer

    def look(self, status: NodeStatus) -> WorkDone | None:
        """Return the work since the last look, or None if there was none.

        Steps and tokens that a trainer restores or inherits are not work: counting begins with the figures that the
        trainer has when it leaves its start-up.
        """
        elapsed = 0.0 if self._uptime is None else status.uptime_seconds - self._uptime
        self._uptime = status.uptime_seconds
        steps, tokens = self._advance(status)
        sent, received = status.network.bytes_sent, status.network.bytes_received
        before, self._bytes = self._bytes, (sent, received)
        is_training = status.state is NodeState.TRAINING and not status.is_standing_by
        work = WorkDone(
            status.time,
            tokens,
            steps,
            max(0, sent - before[0]),
            max(0, received - before[1]),
            min(max(elapsed, 0.0), MOST_ELAPSED_SECONDS) if is_training else 0.0,
            status.training.loss_ema if tokens else None,
        )
        return work if work != WorkDone(status.time) else None

    def _advance(self, status: NodeStatus) -> tuple[int, int]:
        """Steps and tokens since the last look; zeros if no trainer ran then or its layers have changed."""
        training = status.training
        if status.state is NodeState.STARTING or training.batch_size == 0:
            self._counts = None
            return 0, 0
        layers = None if status.model is None else status.model.layers
        before, self._counts = self._counts, (layers, training.steps, training.tokens)
        if before is None or before[0] != layers:
            return 0, 0
        return max(0, training.steps - before[1]), max(0, training.tokens - before[2])


class ContributionRecorder:
    """Reads the status board every second, adds up the work, publishes the record and saves it to disk."""

    def __init__(
        self, data_dir: Path, board: StatusBoard, publisher: Publisher, clock: Callable[[], float] = time.time
    ) -> None:
        """`clock` returns seconds since the epoch."""
        self._file = record_file(data_dir)
        self._board = board
        self._publisher = publisher
        self._clock = clock
        self._meter = WorkMeter()
        record = self._file.read(publisher.warn)
        self._history = WorkHistory() if record is None else WorkHistory.of(record)
        self._is_saved = True
        self._has_failed = False

    async def run(self) -> None:
        """Record until cancelled; then record and save the last work."""
        self._show()
        looks = 0
        try:
            while True:
                await sleep_to_tick(LOOK_SECONDS)
                self._look()
                looks += 1
                if looks % round(SHOW_SECONDS / LOOK_SECONDS) == 0:
                    self._show()
                if looks % round(SAVE_SECONDS / LOOK_SECONDS) == 0:
                    await self._save()
        finally:
            self._look()
            with anyio.CancelScope(shield=True):
                await self._save()

    def _look(self) -> None:
        work = self._meter.look(self._board.current())
        if work is not None:
            self._history.add(work)
            self._is_saved = False

    def _show(self) -> None:
        status = self._history.status(self._clock())
        if status != self._board.current().contribution:
            self._publisher.change(contribution=status)

    async def _save(self) -> None:
        """Write the record if it has changed. After a disk error the next call tries again."""
        if self._is_saved:
            return
        record = self._history.record(self._clock())
        try:
            await anyio.to_thread.run_sync(self._file.write, record)
        except StorageError as error:
            if not self._has_failed:  # warn once: a full disk stays full for hours
                _LOG.warning("The record of your contribution cannot be saved: %s", error)
            self._has_failed = True
            return
        self._is_saved, self._has_failed = True, False


def record_file(data_dir: Path) -> StateFile[WorkRecord]:
    """The record of a data folder."""
    return StateFile(
        data_dir / FILE_NAME,
        WorkRecord,
        on_damage="set_aside",
        if_damaged="a new record of your contribution begins",
        max_bytes=MOST_BYTES,
        data_dir=data_dir,
    )
