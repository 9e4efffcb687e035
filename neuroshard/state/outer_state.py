"""Counts around a stage's outer steps, the rules for when the next one is due, and the root that replicas compare."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import IO, Any, cast

from neuroshard.optim.outer import KEPT_DURATIONS, LONGEST_CODE, MOST_CANDIDATES, LineProgress, OuterState
from neuroshard.state.stage_tensors import ANCHOR, VELOCITY
from neuroshard.state.tensor_file import StoredTensor, TensorLayout, bytes_of

ROOT_LABEL = b"neuroshard/outer-state"


@dataclass(frozen=True)
class OuterProgress:
    """Counts around the outer steps; a checkpoint stores them."""

    inner_steps: int = 0  # since the last round
    sequences: int = 0  # since the last round
    successful: int = 0
    failed: int = 0
    members: int = 1
    last_sync: float | None = None  # seconds since the epoch
    state_root: str = ""
    last_failure: str = ""
    wallet_rounds: int = 0  # contributions accepted by certified rounds, over the whole line of training
    since_round: int = 0  # trained by this replica since the work in `OuterState.line`
    # The mean of the replicas' weights in the last round is the anchor plus this many velocities, see `replica_mean`.
    # None: there is no such mean, because the node was alone or the round was about a part of the weights.
    lead: float | None = None


LARGEST_COUNT = 1 << 48


def line_to_json(line: LineProgress) -> dict[str, Any]:
    """The entries of a checkpoint for the progress of its line."""
    return {
        "line_sequences": line.sequences,
        "line_durations": [list(pair) for pair in line.durations],
        "line_choice": line.choice,
        "line_chosen_at": line.chosen_at,
    }


def line_from_json(fields: object) -> LineProgress:
    """Read the entries of `line_to_json`. A malformed entry counts as missing; the root then shows the difference."""
    if not isinstance(fields, Mapping):
        return LineProgress()
    entries = cast("Mapping[str, object]", fields)
    durations = entries.get("line_durations")
    pairs = [_codes(pair) for pair in cast("list[object]", durations)] if isinstance(durations, list) else []
    found = tuple(pair for pair in pairs if pair is not None)
    choice, chosen_at = (count_of(entries.get(name)) for name in ("line_choice", "line_chosen_at"))
    return LineProgress(
        count_of(entries.get("line_sequences")),
        found[-KEPT_DURATIONS:],
        choice if choice < MOST_CANDIDATES else 0,
        chosen_at,
    )


def lead_from_json(fields: object) -> float | None:
    """Read `OuterProgress.lead` from a checkpoint's entries. Returns None too if the last round was abandoned."""
    if not isinstance(fields, Mapping):
        return None
    entries = cast("Mapping[str, object]", fields)
    lead = entries.get("lead")
    if not isinstance(lead, float) or not 0 <= lead < 1 or entries.get("last_failure"):
        return None
    return lead


def _codes(pair: object) -> tuple[int, int] | None:
    codes = cast("list[object]", pair) if isinstance(pair, list) else []
    numbers = [code for code in codes if type(code) is int and 0 <= code <= LONGEST_CODE]
    return (numbers[0], numbers[1]) if len(numbers) == len(codes) == 2 else None


def count_of(value: object) -> int:
    """A count from a checkpoint's metadata; 0 if it is none."""
    return value if type(value) is int and 0 <= value < LARGEST_COUNT else 0


def _head(outer_step: int, line: LineProgress) -> bytes:
    codes = bytes(chain.from_iterable(line.durations))
    chosen = bytes([line.choice]) + line.chosen_at.to_bytes(8, "big") if line.choice or line.chosen_at else b""
    counts = outer_step.to_bytes(8, "big") + line.sequences.to_bytes(8, "big")
    return ROOT_LABEL + counts + bytes([len(codes)]) + codes + chosen


def state_root(state: OuterState) -> str:
    """Return the hex SHA-256 over outer step, line, anchor and velocity, which replicas compare.

    A line without a measured choice adds no bytes for it. The length of the vectors is fixed, so no two states of one
    stage have the same bytes.
    """
    digest = sha256(_head(state.outer_step, state.line))
    for vector in (state.anchor, state.velocity):
        digest.update(bytes_of(vector.contiguous()))
    return digest.hexdigest()


_READ_BYTES = 4 << 20


def outer_root(path: Path, layout: TensorLayout, outer_step: int, line: LineProgress) -> str:
    """`state_root` of the outer state in a tensor file. Raises OSError."""
    digest = sha256(_head(outer_step, line))
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


YOUNG_SHARE = 0.1  # of a step's sequences: up to this share the step is young
SERVING_SHARE = 0.2  # from this share on, no transfer of the state starts
PATIENCE_SECONDS = 180.0
PUT_OFF_SECONDS = 60.0


def round_is_due(
    *,
    counted_sequences: int,
    enough_sequences: int,
    elapsed_seconds: float,
    max_round_seconds: float,
) -> bool:
    """Return whether the members counted enough sequences since the last round, or it is too long ago.

    With no sequences there is nothing to contribute, so no round is due.
    """
    if enough_sequences < 1 or counted_sequences < 0:
        raise ValueError("enough_sequences must be positive, counts not negative")
    if counted_sequences == 0:
        return False
    return counted_sequences >= enough_sequences or elapsed_seconds >= max_round_seconds


def may_download_averaged(counted_sequences: int, enough_sequences: int, waited_seconds: float) -> bool:
    """Return whether to start downloading an averaged state, which every step replaces as a whole.

    A download starts while the step is young, so it can finish before the next step. The wait is at most three minutes,
    because steps may take long.
    """
    return counted_sequences < YOUNG_SHARE * enough_sequences or waited_seconds >= PATIENCE_SECONDS


def may_serve_averaged(counted_sequences: float, enough_sequences: int, waited_seconds: float) -> bool:
    """Return whether to start sending an averaged state: not shortly before a step, whose exchange needs bandwidth.

    A node that was refused for a minute gets the state anyway: the step may be waiting for that node only.
    """
    return counted_sequences < SERVING_SHARE * enough_sequences or waited_seconds >= PUT_OFF_SECONDS
