"""Sums whose order is fixed: the same float64 on every machine, whatever its kernels and its number of threads."""

from __future__ import annotations

import torch
from torch import Tensor

_LANES = 1 << 16


BLOCK = 4096  # numbers that are summed by halving
LANES = 128  # how far a product is folded before it waits for others
_LINES_AT_ONCE = 32  # folded together: few calls, and each too small to be shared among threads


def fold_products(left: Tensor, right: Tensor, scratch: Tensor, out: Tensor) -> None:
    """Products of two (blocks * 4,096,) float64 vectors, every block folded to 128 lanes, into `out` (blocks, 128)."""
    lanes = torch.mul(left, right, out=scratch).view(-1, BLOCK)
    while lanes.shape[1] > 2 * LANES:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half].add_(lanes[:, half:])
    torch.add(lanes[:, :LANES], lanes[:, LANES:], out=out)


def folded(lanes: Tensor) -> Tensor:
    """(n, blocks, 128) to the sums (n, blocks) of every block; overwrites the lanes.

    Together with `fold_products` every block is added by halving: elements i and i + 2,048, then i and i + 1,024, and
    so on.
    """
    for start in range(0, lanes.shape[0], _LINES_AT_ONCE):
        rest = lanes[start : start + _LINES_AT_ONCE]
        while rest.shape[-1] > 1:
            half = rest.shape[-1] // 2
            rest = rest[..., :half].add_(rest[..., half:])
    return lanes[..., 0]


def dot_product(left: Tensor, right: Tensor) -> float:
    """Sum of left_i * right_i over two (d,) vectors, in float64.

    Element i is added to lane i mod 65,536, in order, and the lanes are added by halving. Every product and sum is a
    separate elementwise operation, which IEEE 754 fixes to the last bit; library reductions choose their own order.
    It is finite exactly when all elements of fp32 vectors are: float64 cannot overflow on their products.
    """
    if left.dim() != 1 or left.shape != right.shape:
        raise ValueError(f"a dot product needs two equal vectors, got {tuple(left.shape)} and {tuple(right.shape)}")
    lanes = torch.zeros(_LANES, dtype=torch.float64)
    product = torch.empty(_LANES, dtype=torch.float64)
    factor = torch.empty(_LANES, dtype=torch.float64)
    for start in range(0, left.shape[0], _LANES):
        size = min(_LANES, left.shape[0] - start)
        product[:size].copy_(left[start : start + size])
        if left is right:
            product[:size].mul_(product[:size])
        else:
            factor[:size].copy_(right[start : start + size])
            product[:size].mul_(factor[:size])
        lanes[:size].add_(product[:size])
    while lanes.shape[0] > 1:
        half = lanes.shape[0] // 2
        lanes = lanes[:half] + lanes[half:]
    return float(lanes.item())
