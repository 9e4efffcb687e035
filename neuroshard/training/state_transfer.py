"""States that this node has received: a stage continues from one, or a certified one is stored for other programs."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from neuroshard.config.state_file import is_disk_full, make_folder
from neuroshard.errors import DiskFullError, StorageError
from neuroshard.model.transformer import StageModel
from neuroshard.optim.outer import replica_mean
from neuroshard.pipeline.executor import Precision
from neuroshard.state.checkpoint_manifest import CheckpointMeta
from neuroshard.state.checkpoint_store import CheckpointStore
from neuroshard.state.outer_state import OuterProgress, count_of, line_from_json
from neuroshard.state.receiver import ReceivedState
from neuroshard.state.stage_tensors import ANCHOR, VELOCITY
from neuroshard.state.tensor_file import StoredTensor, TensorLayout, bytes_of, write_tensor_file
from neuroshard.status.snapshot import CheckpointGeneration
from neuroshard.training.record import Inherited, Progress, StageIdentity, TrainingRecord, to_meta
from neuroshard.types import MAX_LOSS, Architecture, LayerRange


def adopted_meta(received: ReceivedState, identity: StageIdentity) -> CheckpointMeta:
    """Create the record of a stage that continues from a donor's state.

    Steps, tokens and the progress towards the next round continue. The donor's curve, evaluations, data position and
    random generator do not.
    """
    meta = received.manifest.meta
    progress = Progress(
        steps=meta.step,
        tokens=meta.tokens,
        sequences=meta.sequences,
        loss_ema=_loss(meta.loss_ema),
        initial_loss=_loss(meta.extra.get("initial_loss")),
    )
    outer = OuterProgress(
        inner_steps=meta.inner_step,
        sequences=_count(meta.extra.get("outer"), "sequences"),
        since_round=_count(meta.extra.get("outer"), "since_round"),
        state_root=received.root,
    )
    made = to_meta(
        TrainingRecord(progress, inherited=Inherited(meta.step, meta.tokens)),
        outer=outer,
        outer_step=meta.outer_step,
        line=line_from_json(meta.extra.get("outer")),
        identity=identity,
        precision=Precision.FP32,
        time=meta.time,
    )
    return replace(made, rng={}, precision="")


def install(received: ReceivedState, identity: StageIdentity, store: CheckpointStore) -> None:
    """Store a received state as the newest checkpoint of the stage. Blocks on disk. Raises StorageError."""
    store.adopt(adopted_meta(received, identity), received.path, received.manifest.checkpoint.tensors.sha256)


def certified_layout(architecture: Architecture, layers: LayerRange, source: TensorLayout) -> TensorLayout:
    """The layout of a stored certified state: weights and outer state, without the moments of a checkpoint."""
    with torch.device("meta"):
        model = StageModel(architecture, layers)
        weights = {f"model/{name}": parameter.detach() for name, parameter in model.named_parameters()}
        outer = {name: torch.empty(source.specs[name].shape) for name in (ANCHOR, VELOCITY)}
    return TensorLayout.of(weights | outer)


@dataclass(frozen=True)
class Certified:
    """Facts that the certificate of a received state proves."""

    at: float  # seconds since the epoch
    lead: float | None  # see `certified_lead`
    sequences_per_step: int


def store_certified(
    received: ReceivedState, source: TensorLayout, certified: Certified, identity: StageIdentity, store: CheckpointStore
) -> CheckpointGeneration:
    """Store the outer state in a received file as a checkpoint whose every number follows from its certified root.

    Its weights are the mean of the replicas in the round that led to the state; without one, the anchor. Its step is
    that of the run's certified work. Blocks on disk. Raises StorageError.
    """
    meta = received.manifest.meta
    line = line_from_json(meta.extra.get("outer"))
    steps = max(1, line.sequences // certified.sequences_per_step)
    made = to_meta(
        TrainingRecord(Progress(steps=steps, sequences=line.sequences)),
        outer=OuterProgress(state_root=received.root),
        outer_step=meta.outer_step,
        line=line,
        identity=identity,
        precision=Precision.FP32,
        time=certified.at,
    )
    layout = certified_layout(identity.architecture, identity.layers, source)
    path = store.folder / _CERTIFIED_FILE
    try:
        make_folder(store.folder, store.data_dir)
        with path.open("wb") as file:
            digest = write_tensor_file(file, layout, _certified_numbers(received.path, source, certified.lead))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        kind = DiskFullError if is_disk_full(error) else StorageError
        raise kind(f"{path} cannot be written: {error.strerror or error}.", "Free some space.") from error
    return store.adopt(replace(made, rng={}, precision=""), path, digest)


_CERTIFIED_FILE = "certified.part"
_NUMBERS = 1 << 20  # at a time


def _certified_numbers(path: Path, source: TensorLayout, lead: float | None) -> Iterator[memoryview]:
    """Yield the bytes of weights, anchor and velocity, some at a time."""
    start = source.file_bytes - source.data_bytes
    with path.open("rb") as file:

        def numbers(name: str, part: slice) -> Tensor:
            spec = source.specs[name]
            file.seek(start + spec.start + 4 * part.start)
            return torch.frombuffer(bytearray(file.read(4 * (part.stop - part.start))), dtype=torch.float32)

        for part in _slices(source.specs[ANCHOR]):
            weights = numbers(ANCHOR, part)
            yield bytes_of(weights if lead is None else replica_mean(weights, numbers(VELOCITY, part), lead))
        for name in (ANCHOR, VELOCITY):
            for part in _slices(source.specs[name]):
                yield bytes_of(numbers(name, part))


def _slices(spec: StoredTensor) -> Iterator[slice]:
    (length,) = spec.shape
    return (slice(start, min(start + _NUMBERS, length)) for start in range(0, length, _NUMBERS))


def _loss(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and isfinite(value) and 0 <= value <= MAX_LOSS else None


def _count(fields: Any, name: str) -> int:
    return count_of(cast("Mapping[str, Any]", fields).get(name)) if isinstance(fields, Mapping) else 0
