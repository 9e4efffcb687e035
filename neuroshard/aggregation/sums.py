"""Sums whose order is fixed: the same float64 on every machine, whatever its kernels and its number of threads."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_LANES = 1 << 16

BLOCK = 4096  # numbers that are summed for themselves
LANES = 128  # how far a product is folded before it waits for others
Floats: TypeAlias = NDArray[np.float32]
Doubles: TypeAlias = NDArray[np.float64]
"""NumPy's: its operations on a cache's worth of numbers cost half of PyTorch's, and no other thread is asked."""


def fold_products(left: Doubles, right: Doubles, scratch: Doubles, out: Doubles) -> None:
    """Products of two (blocks * 4,096,) vectors, every block folded to 128 lanes, into `out` (blocks, 128).

    Products i, i + 128, i + 256 ... of a block are added to lane i in this order: NumPy adds along an axis that is not
    the last one row after row.
    """
    np.multiply(left, right, out=scratch)
    np.add.reduce(scratch.reshape(-1, BLOCK // LANES, LANES), axis=1, out=out)


def folded(lanes: Doubles) -> Doubles:
    """(n, blocks, 128) to the sums (n, blocks) of every block: lanes i and i + 64 are added, then i and i + 32, ..."""
    rows, half = np.ascontiguousarray(lanes.reshape(-1, LANES).T), LANES // 2
    while half:
        np.add(rows[:half], rows[half : 2 * half], out=rows[:half])
        half //= 2
    return rows[0].reshape(lanes.shape[:-1])


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
