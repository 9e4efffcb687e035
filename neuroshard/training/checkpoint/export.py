"""`checkpoint export --format torch`: the keys of the classic NeuroShard file, readable with weights_only=True."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from neuroshard.config.atomic_write import TEMPORARY_PREFIX, sync_folder
from neuroshard.errors import CheckpointError, StorageError
from neuroshard.training.checkpoint.catalogue import DamagedStageError, SavedStage
from neuroshard.training.checkpoint.tensor_file import map_tensor_file

if TYPE_CHECKING:
    from pathlib import Path

    from neuroshard.training.checkpoint.metadata import CheckpointMeta

_LAYER = re.compile(r"layers\.(\d+)\.(.+)")


def export_torch(stages: Sequence[SavedStage], path: Path) -> None:
    """Write stages that follow each other, whole or not at all. Raises DamagedStageError, StorageError.

    Their tensors are mapped, not read; of several stages the two vectors of the outer state are joined in memory.
    """
    parts = [(stage.manifest.meta, _tensors(stage)) for stage in stages]
    temporary = path.with_name(f"{TEMPORARY_PREFIX}{path.name}-{secrets.token_hex(4)}")
    try:
        with temporary.open("xb") as file:
            torch.save(classic_content(parts), file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    except (OSError, RuntimeError) as error:  # torch reports a failed write as RuntimeError
        temporary.unlink(missing_ok=True)
        raise StorageError(f"{path} cannot be written: {error}.", "Name a folder with enough space.") from error


def classic_content(parts: Sequence[tuple[CheckpointMeta, Mapping[str, Tensor]]]) -> dict[str, object]:
    """The classic keys: layers hold {layer id: {name: tensor}}, what is in no layer lies under `outside_layers`.

    Of several stages the file has the smallest count of everything; `stages` tells what each of them had.
    """
    metas = [meta for meta, _ in parts]
    layers: dict[int, dict[str, Tensor]] = {}
    outside: dict[str, Tensor] = {}
    optimizer: dict[str, dict[str, Tensor]] = {}
    for _, tensors in parts:
        for name, tensor in _under("model/", tensors).items():
            if match := _LAYER.fullmatch(name):
                layers.setdefault(int(match[1]), {})[match[2]] = tensor
            else:
                outside[name] = tensor
        optimizer |= _optimizer_state(tensors)
    return {
        "layer_ids": [layer for meta in metas for layer in range(meta.layers.start, meta.layers.stop)],
        "architecture": asdict(metas[0].architecture),
        "layers": layers,
        "outside_layers": outside,
        "optimizer": {"state": optimizer},
        "diloco": {
            **_joined([_under("outer/", tensors) for _, tensors in parts]),
            "outer_step": min(meta.outer_step for meta in metas),
            "inner_step": min(meta.inner_step for meta in metas),
        },
        "training_rounds": min(meta.step for meta in metas),
        "current_loss": next((meta.loss for meta in reversed(metas) if meta.loss is not None), None),
        "timestamp": min(meta.time for meta in metas),
        "stages": [_summary(meta) for meta in metas],
    }


def _tensors(stage: SavedStage) -> dict[str, Tensor]:
    try:
        return map_tensor_file(stage.tensor_file, stage.manifest.tensors.sha256)
    except CheckpointError as error:
        raise DamagedStageError(stage, error.message) from error


def _joined(outer: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The vectors of the whole: parameters lie in them in the order of the layers."""
    if len(outer) == 1:
        return dict(outer[0])
    return {name: torch.cat([vectors[name] for vectors in outer]) for name in outer[0]}


def _summary(meta: CheckpointMeta) -> dict[str, object]:
    return {
        "layer_ids": list(range(meta.layers.start, meta.layers.stop)),
        "training_rounds": meta.step,
        "outer_step": meta.outer_step,
        "inner_step": meta.inner_step,
        "timestamp": meta.time,
    }


def _optimizer_state(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    state: dict[str, dict[str, Tensor]] = {}
    for name, tensor in _under("inner/", tensors).items():
        parameter, _, moment = name.rpartition("/")
        state.setdefault(parameter, {})[moment] = tensor
    return state


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
