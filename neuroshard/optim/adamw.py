"""AdamW with gradient clipping: the inner step of one stage, and the replicated form with the same bytes everywhere.

`EagerAdamW` avoids PyTorch's compiler, which torch.optim loads at its first call: 85 MB and seconds for nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from inspect import unwrap
from math import sqrt

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from neuroshard.config.run_parameters import InnerOptimization


class EagerAdamW(AdamW):
    """torch.optim.AdamW whose methods are the plain functions under the decorators that load the compiler."""

    add_param_group = unwrap(Optimizer.add_param_group)
    load_state_dict = unwrap(Optimizer.load_state_dict)
    state_dict = unwrap(Optimizer.state_dict)
    step = torch.no_grad()(unwrap(AdamW.step))  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
    zero_grad = unwrap(Optimizer.zero_grad)


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


def clipped_step(optimizer: AdamW, learning_rate: float, *, tokens: int, grad_norm: float, max_norm: float) -> None:
    """Make one step of fused AdamW on the mean gradient per token, with its norm clipped to max_norm.

    The parameters have the gradients of losses summed over `tokens`. `grad_norm` is the norm of their mean before it is
    clipped; it must be finite.
    """
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    # Fused AdamW divides the gradients as it reads them, which saves a pass over them.
    divisor = tokens * max(1.0, grad_norm / max_norm)
    device = optimizer.param_groups[0]["params"][0].device
    scale = torch.tensor(divisor, dtype=torch.float32, device=device)
    optimizer.grad_scale = scale  # pyright: ignore[reportAttributeAccessIssue]
    optimizer.found_inf = torch.zeros_like(scale)  # pyright: ignore[reportAttributeAccessIssue]
    optimizer.step()  # pyright: ignore[reportUnknownMemberType]


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
