"""Writes what is agreed on in a PowerSGD step; kernels are chosen by the environment."""

from __future__ import annotations

import sys
from hashlib import sha256

import numpy as np
import torch
from numpy.typing import NDArray

from neuroshard.compression.power_sgd import FactorPlan, first_right, next_right, orthonormal_basis, restored

PLAN = FactorPlan.of([(300, 211), (7,), (97, 500), (64, 64)], 16)


def made(length: int, start: int) -> NDArray[np.float32]:
    """Numbers of many sizes from whole numbers, so that no generator's version matters."""
    index = np.arange(start, start + length, dtype=np.uint64)
    bits = (index * np.uint64(2654435761) + np.uint64(12345)) % np.uint64(2**32)
    return ((bits % 2003).astype(np.float32) - 1001) * np.float32(2) ** -(bits >> 20).astype(np.float32).__mod__(30)


def digests() -> list[str]:
    """Of the first Q, a basis, a gradient and the next Q."""
    left, projected = (torch.from_numpy(made(n, n)) for n in (PLAN.left_length, PLAN.projection_length))
    basis = orthonormal_basis(PLAN, left)
    agreed = first_right(PLAN, 5), basis, restored(PLAN, projected, basis), next_right(PLAN, projected, 5, 1)
    return [sha256(vector.numpy().tobytes()).hexdigest() for vector in agreed]


if __name__ == "__main__":
    sys.stdout.write(" ".join(digests()))
