"""Saves what a trainer knows beside its data position, which is safe already when data are sent."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import anyio
import anyio.to_thread

from neuroshard.errors import StorageError
from neuroshard.training.drive_store import DriveStore
from neuroshard.training.trainer import Trainer

log = logging.getLogger(__name__)

SAVE_SECONDS = 30.0  # between two looks at whether the record must be saved


@dataclass
class RecordKeeper:
    """Keeps a trainer's steps, curve and evaluations; a kill costs those of the last half minute."""

    store: DriveStore
    trainer: Trainer
    _saved_steps: int = field(default=-1, init=False)

    async def run(self) -> None:
        """Save now and then until cancelled."""
        while True:
            await anyio.sleep(SAVE_SECONDS)
            try:
                await self._save()
            except OSError as error:
                log.warning("The record cannot be saved in %s: %s.", self.store.folder, error.strerror or error)

    async def save_in_the_end(self) -> None:
        """Save what the last steps added. Raises StorageError."""
        try:
            await self._save()
        except OSError as error:
            raise StorageError(
                f"The record of this trainer cannot be saved in {self.store.folder}: {error.strerror or error}.",
                "Free space there; no data will be sent twice.",
            ) from error

    async def _save(self) -> None:
        record = self.trainer.record
        steps = record.progress.steps
        if steps != self._saved_steps:
            await anyio.to_thread.run_sync(self.store.save, self.store.encoded(record))
            self._saved_steps = steps
