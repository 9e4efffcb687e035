"""Tensors of one stage under their checkpoint names: weights, moments, outer state."""

from __future__ import annotations

from collections.abc import Mapping
from math import nan

import torch
from torch import Tensor

from neuroshard.model.transformer import StageModel
from neuroshard.optim.outer import LineProgress, OuterState

ANCHOR = "outer/anchor"
VELOCITY = "outer/velocity"
OUTER_TENSORS = frozenset({ANCHOR, VELOCITY})  # replaced by new ones at a round, never changed in place


def stage_tensors(model: StageModel, optimizer: torch.optim.AdamW, outer: OuterState) -> dict[str, Tensor]:
    """Map names to a stage's tensors, not copied.

    Names: "model/<name>", "inner/<name>/<moment>", "outer/anchor", "outer/velocity".
    """
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        tensors[f"model/{name}"] = parameter.detach()
        for moment, tensor in optimizer.state[parameter].items():
            tensors[f"inner/{name}/{moment}"] = tensor
    tensors[ANCHOR] = outer.anchor
    tensors[VELOCITY] = outer.velocity
    return tensors


def load_stage_tensors(
    tensors: Mapping[str, Tensor],
    model: StageModel,
    optimizer: torch.optim.AdamW,
    outer_step: int,
    line: LineProgress,
) -> OuterState:
    """Copy weights and moments from a checkpoint; the outer state takes its tensors as they are.

    `tensors` has exactly the names of `stage_tensors`. Runs on the compute thread.
    """
    state = OuterState(tensors[ANCHOR], tensors[VELOCITY], outer_step, line)
    for name, tensor in stage_tensors(model, optimizer, state).items():
        if name not in OUTER_TENSORS:
            tensor.copy_(tensors[name])
    return state


def without_values(tensor: Tensor) -> Tensor:
    """Return a tensor of the same shape and type that uses the memory of one NaN, so that no check takes it for real.

    It cannot be written to.
    """
    return torch.full((), nan, dtype=tensor.dtype).expand(tensor.shape)
