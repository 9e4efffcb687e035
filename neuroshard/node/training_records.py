"""Small records of a training node: what a trainer without layers knows, and its signed shard rotations."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec

from neuroshard.data.shard_assignment import Rotation
from neuroshard.errors import StorageError
from neuroshard.identity import NodeIdentity, sign_claim
from neuroshard.training.drive_store import DriveStore
from neuroshard.training.trainer import Trainer
from neuroshard.types import RunId

_LOG = logging.getLogger(__name__)

SAVE_SECONDS = 30.0  # between two saves, if there were steps


@dataclass
class RecordSaver:
    """Saves a trainer's steps, curve and evaluations; a kill loses those of the last SAVE_SECONDS."""

    store: DriveStore
    trainer: Trainer
    _saved_steps: int = field(default=-1, init=False)

    async def run(self) -> None:
        """Save every SAVE_SECONDS until cancelled; a failure is logged and tried again."""
        while True:
            await anyio.sleep(SAVE_SECONDS)
            try:
                await self.save()
            except StorageError as error:
                _LOG.warning("%s", error)

    async def save(self) -> None:
        """Save the record if there were steps since the last save. Raises StorageError."""
        record = self.trainer.record
        steps = record.progress.steps
        if steps != self._saved_steps:
            await anyio.to_thread.run_sync(self.store.save, self.store.stored_form(record))
            self._saved_steps = steps


KIND = "rotation"


@dataclass(frozen=True)
class RotationOfRun:
    """The payload of the signed claim in the log."""

    run_id: RunId
    rotation: Rotation


class RotationLog:
    """Appends one JSON line per shard rotation to a file of the run: the rotation, and the signed claim in base64."""

    def __init__(
        self, data_dir: Path, run_id: RunId, identity: NodeIdentity, clock: Callable[[], float] = time.time
    ) -> None:
        self.path = data_dir / "rotations" / f"{run_id}.jsonl"
        self._run_id = run_id
        self._identity = identity
        self._clock = clock
        self._last: Rotation | None = None

    def record(self, rotations: Sequence[Rotation]) -> None:
        """Append the rotations since the last call. If the write fails, the next call tries again."""
        new = rotations[_index_after(rotations, self._last) :]
        if not new:
            return
        lines = b"".join(self._line(rotation) for rotation in new)
        try:
            self.path.parent.mkdir(mode=0o700, exist_ok=True)
            with self.path.open("ab") as file:
                file.write(lines)
        except OSError as error:
            _LOG.warning("Changes of shard could not be recorded in %s: %s.", self.path, error.strerror)
            return
        self._last = new[-1]

    def _line(self, rotation: Rotation) -> bytes:
        claim = sign_claim(self._identity, KIND, RotationOfRun(self._run_id, rotation), self._clock())
        return msgspec.json.encode({"rotation": rotation, "claim": claim.encode()}) + b"\n"


def _index_after(rotations: Sequence[Rotation], last: Rotation | None) -> int:
    """Index of the first rotation after `last`, compared by identity; 0 if `last` is not in the sequence."""
    return next((i + 1 for i in range(len(rotations) - 1, -1, -1) if rotations[i] is last), 0)
