"""DiLoCo's outer step: Nesterov momentum on the anchor, the same bytes on every replica (Douillard et al. 2023)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_CHUNK = 1 << 20  # numbers handled at once: the only temporary memory of a step
RAMP_ROUNDS = 5
RAMP_START = 0.5


@dataclass(frozen=True)
class OuterState:
    """What replicas agree on: anchor (d,) and velocity, fp32 on the CPU, after `outer_step` committed rounds."""

    anchor: Tensor  # weights every replica agreed on at the last round
    velocity: Tensor  # (d,), or what else the strategy keeps beside the anchor, in one vector
    outer_step: int

    def __post_init__(self) -> None:
        for tensor in (self.anchor, self.velocity):
            if tensor.dim() != 1 or tensor.dtype != torch.float32 or tensor.device.type != "cpu":
                raise ValueError(f"outer state is an fp32 vector on the CPU, got {tensor.dtype} {tuple(tensor.shape)}")
        if self.outer_step < 0:
            raise ValueError("outer_step must not be negative")


def fresh_outer_state(anchor: Tensor) -> OuterState:
    """The state before the first round: this anchor (d,), no velocity."""
    return OuterState(anchor, torch.zeros(anchor.shape, dtype=anchor.dtype, device=anchor.device), 0)


def pseudo_gradient(anchor: Tensor, weights: Tensor) -> Tensor:
    """anchor - weights (d,): what descent subtracts from the anchor to reach the local weights."""
    return torch.sub(anchor, weights)


def nesterov_outer_step(state: OuterState, pseudo_gradient: Tensor, lr: float, momentum: float) -> OuterState:
    """v' = m v + d and a' = a - lr (d + m v'), for aggregate d of (anchor - local weights); returns a new state.

    Apply it to the anchor, never to the local weights, and subtract: both other forms were measured to diverge.
    Every product and sum is rounded on its own, in fp32 on the CPU, so replicas get equal bytes whatever their kernels.
    Raises ValueError when velocity or pseudo-gradient are not fp32 CPU vectors of the anchor's length.
    """
    shape = state.anchor.shape
    if state.velocity.shape != shape:
        raise ValueError("anchor and velocity must have one length")
    if pseudo_gradient.shape != shape or pseudo_gradient.dtype != torch.float32 or pseudo_gradient.device.type != "cpu":
        raise ValueError(f"the outer step needs an fp32 CPU vector of shape {tuple(shape)}")
    anchor, velocity = torch.empty_like(state.anchor), torch.empty_like(state.velocity)
    for start in range(0, shape[0], _CHUNK):
        part = slice(start, start + _CHUNK)
        torch.mul(state.velocity[part], momentum, out=velocity[part])
        velocity[part].add_(pseudo_gradient[part])
        update = velocity[part] * momentum
        update.add_(pseudo_gradient[part])
        update.mul_(lr)
        torch.sub(state.anchor[part], update, out=anchor[part])
    return OuterState(anchor, velocity, state.outer_step + 1)


def momentum_at(outer_step: int, target: float) -> float:
    """Momentum of the round that follows `outer_step` committed ones: from 0.5 linearly to the target over 5 rounds.

    A target below 0.5 is used from the start.
    """
    if outer_step < 0 or not 0 <= target < 1:
        raise ValueError(f"needs outer_step >= 0 and a target in [0, 1), got {outer_step} and {target}")
    start = min(RAMP_START, target)
    return start + (target - start) * min(1.0, outer_step / RAMP_ROUNDS)
