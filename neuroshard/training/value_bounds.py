"""How large the numbers may be that stages and drivers tell each other, and when two of them say the same. Pure.

Far above what a model in training gives, far below where squares and sums of fp32 overflow: whoever sends more is at
fault, and whoever computes more itself has spoilt weights.
"""

from __future__ import annotations

from math import isfinite

import torch
from torch import Tensor

LARGEST_VALUE = 2.0**20  # of an activation or its gradient where it is made
LARGEST_RECEIVED = 2 * LARGEST_VALUE  # int8 and bf16 round a little upwards, on every way
LARGEST_LOSS = 10_000.0  # nats a token
LARGEST_ROUNDING = 0.02  # between outputs of the same weights, of their norm: bf16 arithmetic and int8 on the wire


def is_within(tensor: Tensor, largest: float) -> bool:
    """Whether all values are numbers and none is larger, in either direction."""
    low, high = torch.aminmax(tensor)  # NaN when one value is
    return -largest <= low.item() and high.item() <= largest


def are_alike(output: Tensor, other: Tensor) -> bool:
    """Whether two outputs of equal shape are those of the same weights, as far as rounding lets one tell."""
    expected = other.float()
    apart, size = (tensor.square().sum().item() for tensor in (output.float() - expected, expected))
    return apart <= LARGEST_ROUNDING**2 * size


def is_loss(loss_sum: float, tokens: int) -> bool:
    """Whether it can be the cross-entropy of so many tokens, summed."""
    return isfinite(loss_sum) and 0 <= loss_sum <= LARGEST_LOSS * tokens
