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
_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


def materialise_moments(model: StageModel, optimizer: torch.optim.AdamW) -> None:
    """Create AdamW's zero moments now instead of in its first step, so that memory and checkpoints have one layout."""
    for parameter in model.parameters():
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),  # on the device: it is fused
            # not zeros_like: for a parameter without memory it loads 100 MB of symbolic mathematics
            "exp_avg": torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device),
            "exp_avg_sq": torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device),
        }


def stage_tensors(model: StageModel, optimizer: torch.optim.AdamW, outer: OuterState) -> dict[str, Tensor]:
    """Map names to a stage's tensors, not copied.

    Names: "model/<name>", "inner/<name>/<moment>", "outer/anchor", "outer/velocity".
    """
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        tensors[f"model/{name}"] = parameter.detach()
        for moment in _MOMENTS:
            tensors[f"inner/{name}/{moment}"] = optimizer.state[parameter][moment]
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
