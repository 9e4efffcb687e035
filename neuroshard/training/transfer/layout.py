"""Where every tensor of a stage lies in the file of its state, known without building it. Nothing is allocated."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import IO

import torch

from neuroshard.config.run_parameters import OuterOptimization
from neuroshard.model.tensor_schema import TensorSchema
from neuroshard.model.transformer import StageModel
from neuroshard.optim.eager_adamw import EagerAdamW
from neuroshard.optim.outer import OuterState
from neuroshard.training.checkpoint.tensor_file import TensorLayout, TensorSpec
from neuroshard.training.outer_sync import ROOT_LABEL
from neuroshard.training.stage_state import ANCHOR, VELOCITY, materialise_moments, stage_tensors
from neuroshard.training.strategy import kept_length
from neuroshard.types import Architecture, LayerRange

_READ_BYTES = 4 << 20


def snapshot_layout(
    architecture: Architecture, layers: LayerRange, outer: OuterOptimization | None = None
) -> TensorLayout:
    """The layout of a stage's checkpoint, in a run that synchronises so; None: as runs do by default."""
    with torch.device("meta"):
        model = StageModel(architecture, layers)
    optimizer = EagerAdamW(model.parameters())
    materialise_moments(model, optimizer)
    schema = TensorSchema.of(model)
    sizes = schema.total_size, kept_length(outer or OuterOptimization(), schema)
    anchor, kept = (torch.empty(size) for size in sizes)  # their memory is never touched
    return TensorLayout.of(stage_tensors(model, optimizer, OuterState(anchor, kept, 0)))


def outer_root(path: Path, layout: TensorLayout, outer_step: int) -> str:
    """`state_root` of the outer state in a tensor file. Raises OSError."""
    digest = sha256(ROOT_LABEL + outer_step.to_bytes(8, "big"))
    start = layout.file_bytes - layout.data_bytes
    with path.open("rb") as file:
        for name in (ANCHOR, VELOCITY):
            for piece in _pieces(file, layout.specs[name], start):
                digest.update(piece)
    return digest.hexdigest()


def _pieces(file: IO[bytes], spec: TensorSpec, start: int) -> Iterator[bytes]:
    file.seek(start + spec.start)
    for position in range(spec.start, spec.stop, _READ_BYTES):
        yield file.read(min(_READ_BYTES, spec.stop - position))
