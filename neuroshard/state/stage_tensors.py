"""Tensors of one stage under their checkpoint names: weights, moments, outer state."""

from __future__ import annotations

from math import nan

import torch
from torch import Tensor

from neuroshard.model.transformer import StageModel
from neuroshard.optim.outer import OuterState

ANCHOR = "outer/anchor"
VELOCITY = "outer/velocity"
OUTER_TENSORS = frozenset({ANCHOR, VELOCITY})  # replaced by new ones at a round, never changed in place


def stage_tensors(model: StageModel, optimizer: torch.optim.AdamW, outer: OuterState) -> dict[str, Tensor]:
    """Map names to a stage's tensors, not copied.

    Names: "model/<name>", "inner/<name>/<moment>", "outer/anchor", "outer/velocity".
    """
    return inner_tensors(model, optimizer) | {ANCHOR: outer.anchor, VELOCITY: outer.velocity}


def inner_tensors(model: StageModel, optimizer: torch.optim.AdamW) -> dict[str, Tensor]:
    """The tensors of `stage_tensors` that change at an inner step: weights and moments."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        tensors[f"model/{name}"] = parameter.detach()
        for moment, tensor in optimizer.state[parameter].items():
            tensors[f"inner/{name}/{moment}"] = tensor
    return tensors


def without_values(tensor: Tensor) -> Tensor:
    """Return a tensor of the same shape and type that uses the memory of one NaN, so that no check takes it for real.

    It cannot be written to.
    """
    return torch.full((), nan, dtype=tensor.dtype).expand(tensor.shape)
