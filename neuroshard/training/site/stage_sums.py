"""Tensors of a stage that its ranks share or add: weights, moments and gradients, in an order that is equal on all."""

from __future__ import annotations

import torch
from torch import Tensor

from neuroshard.model.transformer import StageModel
from neuroshard.pipeline.executor import StageExecutor
from neuroshard.training.site.process_group import ProcessGroup


def held_tensors(executor: StageExecutor, *, with_moments: bool) -> list[Tensor]:
    """The weights of a stage, with the moments after each of them."""
    tensors = list[Tensor]()
    for parameter in executor.model.parameters():
        tensors.append(parameter.data)
        if with_moments:
            moments = executor.optimizer.state[parameter]
            tensors += [moments[name] for name in sorted(moments)]
    return tensors


def gradient_mask(model: StageModel) -> bytes:
    """One byte for each parameter: 1 if it has a gradient."""
    return bytes(parameter.grad is not None for parameter in model.parameters())


def joined_masks(masks: list[bytes]) -> bytes:
    """Mask of the parameters of which at least one rank has a gradient."""
    return bytes(any(flags) for flags in zip(*masks, strict=True))


def add_gradients(group: ProcessGroup, model: StageModel, mask: bytes) -> None:
    """Replace the gradients by their sums over all ranks; a rank without one counts as zero.

    A parameter of which no rank has a gradient keeps none, so that the optimizer leaves it alone as on one device.
    """
    gradients = list[Tensor]()
    for parameter, is_present in zip(model.parameters(), mask, strict=True):
        if is_present:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
    group.add(gradients)
