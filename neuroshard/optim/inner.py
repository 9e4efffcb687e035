"""The inner optimizer: AdamW on one stage's parameters, and the norm its gradients are clipped to."""

from __future__ import annotations

from math import sqrt

from torch import nn

from neuroshard.config.run_parameters import InnerOptimization
from neuroshard.optim.eager_adamw import EagerAdamW


def make_inner_optimizer(model: nn.Module, parameters: InnerOptimization) -> EagerAdamW:
    """Fused AdamW with weight decay on matrices only: the embedding is a matrix, norm scales are not.

    Parameters keep the order of `named_parameters()` within the two groups: matrices first, then vectors.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": parameters.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    return EagerAdamW(
        [group for group in groups if group["params"]],
        lr=parameters.learning_rate,
        betas=(parameters.beta1, parameters.beta2),
        fused=True,
    )


def stage_clip_norm(stage: int, stage_count: int, max_norm: float) -> float:
    """Clipping norm of one of S stages: max_norm / sqrt(S), and 5 / sqrt(S) times it for the last (DESIGN 4.1)."""
    if not 0 <= stage < stage_count:
        raise ValueError(f"stage must be in 0..{stage_count - 1}, got {stage}")
    if stage_count == 1:
        return max_norm
    return max_norm * (5.0 if stage == stage_count - 1 else 1.0) / sqrt(stage_count)
