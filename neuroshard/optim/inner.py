"""The inner optimizer: AdamW on one stage's parameters and the clipping of their gradients."""

from __future__ import annotations

from collections.abc import Iterable
from math import sqrt

import torch
from torch import Tensor, nn

from neuroshard.config.run_parameters import InnerOptimization


def make_inner_optimizer(model: nn.Module, parameters: InnerOptimization) -> torch.optim.AdamW:
    """Fused AdamW with weight decay on matrices only: the embedding is a matrix, norm scales are not.

    Parameters keep the order of `named_parameters()` within the two groups: matrices first, then vectors.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": parameters.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=parameters.learning_rate,
        betas=(parameters.beta1, parameters.beta2),
        fused=True,
    )


def clip_gradients(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """Scale all gradients so that their joint L2 norm is at most max_norm; returns the norm before, a scalar.

    A non-finite norm is returned as it is and makes the gradients non-finite: the caller skips that step.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return torch.zeros(())
    norm = torch.nn.utils.get_total_norm(gradients)
    if norm.device.type == "cpu" and bool(norm <= max_norm):
        return norm  # saves one pass over the gradients; on an accelerator the comparison would wait for it
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(scale)
    return norm


def stage_clip_norm(stage: int, stage_count: int, max_norm: float) -> float:
    """Clipping norm of one of S stages: max_norm / sqrt(S), and 5 / sqrt(S) times it for the last (DESIGN 4.1)."""
    if not 0 <= stage < stage_count:
        raise ValueError(f"stage must be in 0..{stage_count - 1}, got {stage}")
    if stage_count == 1:
        return max_norm
    return max_norm * (5.0 if stage == stage_count - 1 else 1.0) / sqrt(stage_count)
