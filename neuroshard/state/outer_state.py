"""The root of a stage's outer state, which replicas compare, and the counts around its outer steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import IO

from neuroshard.optim.outer import OuterState
from neuroshard.state.stage_tensors import ANCHOR, VELOCITY
from neuroshard.state.tensor_file import StoredTensor, TensorLayout, bytes_of

ROOT_LABEL = b"neuroshard/outer-state"


@dataclass(frozen=True)
class OuterProgress:
    """Counts around the outer steps; a checkpoint keeps them."""

    inner_steps: int = 0  # since the last round
    sequences: int = 0  # since the last round
    successful: int = 0
    failed: int = 0
    members: int = 1
    last_sync: float | None = None  # seconds since the epoch
    state_root: str = ""
    last_failure: str = ""
    wallet_rounds: int = 0  # contributions that certified rounds accepted, over the whole line
    line_sequences: int = 0  # that a replica trained on until the last round, by the certificates of the whole line
    since_round: int = 0  # that this replica has trained on since then

    @property
    def scheduled_sequences(self) -> int:
        """What the schedule of the learning rate counts: how far the line is, not what this node has done of it."""
        return self.line_sequences + self.since_round


def state_root(state: OuterState) -> str:
    """Hex SHA-256 over the outer step (8 bytes), the anchor's and the velocity's bytes: what replicas compare."""
    digest = sha256(ROOT_LABEL + state.outer_step.to_bytes(8, "big"))
    for vector in (state.anchor, state.velocity):
        digest.update(bytes_of(vector.contiguous()))
    return digest.hexdigest()


_READ_BYTES = 4 << 20


def outer_root(path: Path, layout: TensorLayout, outer_step: int) -> str:
    """`state_root` of the outer state in a tensor file. Raises OSError."""
    digest = sha256(ROOT_LABEL + outer_step.to_bytes(8, "big"))
    start = layout.file_bytes - layout.data_bytes
    with path.open("rb") as file:
        for name in (ANCHOR, VELOCITY):
            for piece in _pieces(file, layout.specs[name], start):
                digest.update(piece)
    return digest.hexdigest()


def _pieces(file: IO[bytes], spec: StoredTensor, start: int) -> Iterator[bytes]:
    file.seek(start + spec.start)
    for position in range(spec.start, spec.stop, _READ_BYTES):
        yield file.read(min(_READ_BYTES, spec.stop - position))
