"""Keeps this node's changes of shard as signed claims: others cannot recompute the losses that led to them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from neuroshard.data.assignment import Rotation
from neuroshard.identity import NodeIdentity, sign_claim
from neuroshard.types import RunId

log = logging.getLogger(__name__)

DOMAIN = "rotation"


class RotationLog:
    """One JSON line a rotation, appended to a file of the run."""

    def __init__(
        self, data_dir: Path, run_id: RunId, identity: NodeIdentity, clock: Callable[[], float] = time.time
    ) -> None:
        self.path = data_dir / "rotations" / f"{run_id}.jsonl"
        self._run_id = run_id
        self._identity = identity
        self._clock = clock
        self._last: Rotation | None = None

    def record(self, rotations: Sequence[Rotation]) -> None:
        """Append what came since the last call; when the disk refuses, the next call tries again."""
        new = rotations[_index_after(rotations, self._last) :]
        if not new:
            return
        lines = b"".join(self._line(rotation) for rotation in new)
        try:
            self.path.parent.mkdir(mode=0o700, exist_ok=True)
            with self.path.open("ab") as file:
                file.write(lines)
        except OSError as error:
            log.warning("Changes of shard could not be recorded in %s: %s.", self.path, error.strerror)
            return
        self._last = new[-1]

    def _line(self, rotation: Rotation) -> bytes:
        payload = {"run": self._run_id, **rotation.to_json()}
        return sign_claim(self._identity, DOMAIN, payload, self._clock()).encode() + b"\n"


def _index_after(rotations: Sequence[Rotation], last: Rotation | None) -> int:
    """Index of the first rotation that is newer than `last`, which is one object of the same sequence."""
    return next((i + 1 for i in range(len(rotations) - 1, -1, -1) if rotations[i] is last), 0)
