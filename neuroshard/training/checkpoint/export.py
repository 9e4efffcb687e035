"""`checkpoint export --format torch`: the keys of the classic NeuroShard file, readable with weights_only=True."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from neuroshard.config.atomic_write import TEMPORARY_PREFIX, sync_folder
from neuroshard.errors import StorageError

if TYPE_CHECKING:
    from pathlib import Path

    from neuroshard.training.checkpoint.store import LoadedCheckpoint

_LAYER = re.compile(r"layers\.(\d+)\.(.+)")


def export_torch(checkpoint: LoadedCheckpoint, path: Path) -> None:
    """Write the file, whole or not at all. Raises StorageError."""
    temporary = path.with_name(f"{TEMPORARY_PREFIX}{path.name}-{secrets.token_hex(4)}")
    try:
        with temporary.open("xb") as file:
            torch.save(classic_content(checkpoint), file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    except (OSError, RuntimeError) as error:  # torch reports a failed write as RuntimeError
        temporary.unlink(missing_ok=True)
        raise StorageError(f"{path} cannot be written: {error}.", "Name a folder with enough space.") from error


def classic_content(checkpoint: LoadedCheckpoint) -> dict[str, object]:
    """The classic keys: layers hold {layer id: {name: tensor}}, what is in no layer lies under `outside_layers`."""
    meta, tensors = checkpoint.meta, checkpoint.tensors
    layers: dict[int, dict[str, Tensor]] = {}
    outside: dict[str, Tensor] = {}
    for name, tensor in _under("model/", tensors).items():
        if match := _LAYER.fullmatch(name):
            layers.setdefault(int(match[1]), {})[match[2]] = tensor
        else:
            outside[name] = tensor
    return {
        "layer_ids": list(range(meta.layers.start, meta.layers.stop)),
        "architecture": asdict(meta.architecture),
        "layers": layers,
        "outside_layers": outside,
        "optimizer": {"state": _optimizer_state(tensors)},
        "diloco": {
            **_under("outer/", tensors),
            "outer_step": meta.outer_step,
            "inner_step": meta.inner_step,
        },
        "training_rounds": meta.step,
        "current_loss": meta.loss,
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
