"""From a vector to its factors and back. What members agree on is the same bits on every machine.

A member's own products may differ in their last bits from machine to machine; what follows from what was agreed may
not: the basis, the gradient and the next Q.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import shake_256
from math import ceil, log2

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from neuroshard.compression.codec import checked_vector
from neuroshard.compression.power_sgd.orthonormal import UNIT_BITS, orthonormal
from neuroshard.compression.power_sgd.plan import FactorPlan

_EXACT_BITS = 53  # of float64: whole numbers up to 2^53
_CHUNK = 1 << 20  # numbers of a product made at once: the only temporary memory beside the factors
_LARGEST = float(np.finfo(np.float32).max)


def first_right(plan: FactorPlan, seed: int) -> Tensor:
    """Q (right_length,) before the first step: numbers in (-1, 1), the same for the same seed on every machine."""
    right = torch.zeros(plan.right_length)
    _draw_missing(plan, right, seed, 0)
    return right


def left_factors(plan: FactorPlan, vector: Tensor, right: Tensor) -> Tensor:
    """P = M Q (left_length,) of a member's vector (d,): what travels in the first phase.

    Raises ValueError for vectors of other lengths, and when the matrices or their product are not finite in fp32.
    """
    numbers = _array(vector, plan.length, "vector")
    found = torch.empty(plan.left_length)
    pairs = zip(plan.left(found.numpy()), plan.right(_array(right, plan.right_length, "Q")), strict=True)
    for (matrix, left), of_matrix in pairs:
        np.matmul(of_matrix, matrix.of(numbers).T, out=left)
    return _finite(found)


def orthonormal_basis(plan: FactorPlan, left: Tensor) -> Tensor:
    """The basis (left_length,) that the averaged P (left_length,) spans, the same bits on every machine."""
    found = torch.empty(plan.left_length)
    pairs = zip(plan.left(_array(left, plan.left_length, "P")), plan.left(found.numpy()), strict=True)
    for (_, averaged), (_, basis) in pairs:
        basis[:] = orthonormal(averaged)
    return found


def projection(plan: FactorPlan, vector: Tensor, basis: Tensor) -> Tensor:
    """What travels in the second phase (projection_length,): the plain numbers, then M^T basis.

    Raises ValueError for vectors of other lengths, and when a number is not finite in fp32.
    """
    numbers = _array(vector, plan.length, "vector")
    found = torch.empty(plan.projection_length)
    sent = found.numpy()
    for here, there in plan.plain():
        sent[there] = numbers[here]
    factors = plan.left(_array(basis, plan.left_length, "basis"))
    for (matrix, left), right in zip(factors, plan.right(sent[plan.plain_length :]), strict=True):
        np.matmul(left, matrix.of(numbers), out=right)
    return _finite(found)


def restored(plan: FactorPlan, projected: Tensor, basis: Tensor) -> Tensor:
    """The vector (d,) that a projection stands for, the same bits on every machine.

    The products are of whole numbers, so small that float64 has every sum of them: their order does not matter. Factors
    lose what is below 2^-23 of the largest of their matrix for it, at a rank of 64. A matrix with factors that are not
    finite is NaN.
    """
    sent = _array(projected, plan.projection_length, "projection")
    found = torch.empty(plan.length)
    numbers = found.numpy()
    for here, there in plan.plain():
        numbers[here] = sent[there]
    factors = plan.left(_array(basis, plan.left_length, "basis"))
    for (matrix, left), right in zip(factors, plan.right(sent[plan.plain_length :]), strict=True):
        _multiply(left, right, matrix.of(numbers))
    return found


def next_right(plan: FactorPlan, projected: Tensor, seed: int, step: int) -> Tensor:
    """Q (right_length,) of step number `step` from the agreed projection of the step before.

    Every column is scaled by a power of two, which changes no bit of its direction, until its largest number is in
    [0.5, 1). A column without a direction is drawn anew: it would be zero for good.
    """
    sent = _array(projected, plan.projection_length, "projection")
    right = torch.from_numpy(sent[plan.plain_length :].copy())  # pyright: ignore[reportUnknownMemberType]
    for rows in plan.right(right.numpy()):
        largest = np.abs(rows).max(axis=1)
        rows[~np.isfinite(largest)] = 0.0
        _, exponents = np.frexp(np.where(np.isfinite(largest), largest, 0.0))
        rows[:] = np.ldexp(rows.astype(np.float64), -exponents[:, None])
    _draw_missing(plan, right, seed, step)
    return right


def _draw_missing(plan: FactorPlan, right: Tensor, seed: int, step: int) -> None:
    """Fill the columns that are zero, from 16 bits of SHAKE-256 a number."""
    for index, rows in enumerate(plan.right(right.numpy())):
        for column in _without_direction(rows):
            key = f"neuroshard/power-sgd/{seed}/{step}/{index}/{column}".encode()
            bits = np.frombuffer(shake_256(key).digest(2 * rows.shape[1]), "<i2")
            rows[column] = (bits.astype(np.float32) + np.float32(0.5)) / np.float32(1 << 15)


def _without_direction(rows: NDArray[np.float32]) -> Iterable[int]:
    return np.flatnonzero(~rows.any(axis=1)).tolist()


def _multiply(left: NDArray[np.float32], right: NDArray[np.float32], out: NDArray[np.float32]) -> None:
    """left^T right (rows, columns) of (k, rows) in multiples of 2^-24 up to 1 and (k, columns)."""
    largest = float(np.abs(right).max())
    if not np.isfinite(largest):
        out[:] = np.nan
        return
    rank = left.shape[0]
    exponent = int(np.frexp(largest)[1]) - (_EXACT_BITS - UNIT_BITS - ceil(log2(rank)))
    whole = np.rint(np.ldexp(right.astype(np.float64), -exponent))
    basis = np.ldexp(left.astype(np.float64), UNIT_BITS)
    rows = max(1, _CHUNK // right.shape[1])
    for start in range(0, left.shape[1], rows):
        product = np.ascontiguousarray(basis[:, start : start + rows].T) @ whole
        product = np.ldexp(product, exponent - UNIT_BITS)
        out[start : start + rows] = np.clip(product, -_LARGEST, _LARGEST)


def _array(vector: Tensor, length: int, what: str) -> NDArray[np.float32]:
    """The numbers of an fp32 CPU vector of that length."""
    if checked_vector(vector).shape[0] != length:
        raise ValueError(f"the {what} has {length} numbers here, got {vector.shape[0]}")
    return vector.detach().numpy()


def _finite(factors: Tensor) -> Tensor:
    if not bool(factors.isfinite().all()):
        raise ValueError("numbers that are not finite, or whose sums are not, have no factors")
    return factors
