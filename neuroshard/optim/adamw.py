"""AdamW as a step that all replicas make with the same bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor

from neuroshard.config.run_parameters import InnerOptimization

EPSILON = 1e-8
_CHUNK = 1 << 20  # numbers per pass: the only temporary memory of a step

Stretch = tuple[int, int]
"""First number of a part of a vector, and the one after its last."""


@dataclass(frozen=True)
class AdamWState:
    """Weights and AdamW's moments, all (d,) fp32 on the CPU, after `steps` steps."""

    weights: Tensor
    first_moment: Tensor
    second_moment: Tensor
    steps: int


def replicated_adamw_step(
    state: AdamWState,
    gradient: Tensor,
    parameters: InnerOptimization,
    learning_rate: float,
    *,
    decayed: Sequence[Stretch],
    scale: float = 1.0,
) -> AdamWState:
    """The state after a step on scale * gradient (d,). Returns a new state.

    Every product, quotient, root and sum is rounded on its own, in fp32 on the CPU, so replicas get equal bytes
    whatever their kernels. `decayed` are the ranges of the vector with weight decay, in order. Raises ValueError
    unless the gradient is an fp32 CPU vector of the weights' length.
    """
    shape = state.weights.shape
    if gradient.shape != shape or gradient.dtype != torch.float32 or gradient.device.type != "cpu":
        raise ValueError(f"AdamW needs an fp32 CPU gradient of shape {tuple(shape)}")
    steps, kept = state.steps + 1, 1.0 - learning_rate * parameters.weight_decay
    step_size = learning_rate / (1.0 - _power(parameters.beta1, steps))
    root = sqrt(1.0 - _power(parameters.beta2, steps))
    weights, first, second = (torch.empty_like(state.weights) for _ in range(3))
    for start in range(0, shape[0], _CHUNK):
        part = slice(start, min(start + _CHUNK, shape[0]))
        scaled = gradient[part] * scale
        torch.mul(state.first_moment[part], parameters.beta1, out=first[part])
        first[part].add_(scaled * (1.0 - parameters.beta1))
        torch.mul(state.second_moment[part], parameters.beta2, out=second[part])
        second[part].add_(scaled.mul_(scaled).mul_(1.0 - parameters.beta2))
        update = first[part] * step_size
        update.div_(torch.sqrt(second[part]).div_(root).add_(EPSILON))
        weights[part] = state.weights[part]
        for begin, end in _within(decayed, part):
            weights[begin:end].mul_(kept)
        weights[part].sub_(update)
    return AdamWState(weights, first, second, steps)


def _power(base: float, exponent: int) -> float:
    """base^exponent by squaring: the power functions of two machines' libraries may differ."""
    result = 1.0
    while exponent:
        if exponent % 2:
            result *= base
        base, exponent = base * base, exponent // 2
    return result


def _within(stretches: Sequence[Stretch], part: slice) -> Iterator[Stretch]:
    for begin, end in stretches:
        if begin < part.stop and end > part.start:
            yield max(begin, part.start), min(end, part.stop)
